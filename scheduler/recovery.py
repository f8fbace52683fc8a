"""From a journal back to a running scheduler: the folded state, and what the tables hold of open
requests.

A snapshot is a cache: it counts only if its state version and the digest of the code that folded
it are ours, and all later events are folded over it. Without one the fold begins at the journal's
first event.
"""

from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path

import msgspec

from journal.crashpoints import reach
from journal.journal import Journal
from scheduler.engine.base import TokenLogprobs
from scheduler.evolve import fold
from scheduler.known import KnownRequest, KnownRequests
from scheduler.parameters import decode_parameters
from scheduler.state import STATE_VERSION, SchedulerState
from scheduler.streams import Accepted, RequestStream, StreamHub

CORE = (
    "journal/events.py",
    "journal/bodies.py",
    "journal/facts.py",
    "journal/decisions.py",
    "scheduler/request.py",
    "scheduler/state.py",
    "scheduler/evolve.py",
    "scheduler/policy.py",
    "scheduler/draft.py",
    "scheduler/admission.py",
    "scheduler/saving.py",
    "scheduler/eviction.py",
    "scheduler/chains.py",
    "scheduler/runs.py",
    "scheduler/prefix.py",
    "scheduler/memory.py",
    "scheduler/effects.py",
    "scheduler/invariants.py",
    "scheduler/index_invariants.py",
    "scheduler/leaving.py",
    "scheduler/leases.py",
    "scheduler/orphans.py",
    "scheduler/adopting.py",
    "scheduler/losses.py",
    "scheduler/usage.py",
    "scheduler/holding.py",
    "scheduler/readings.py",
    "scheduler/pausing.py",
    "scheduler/relief.py",
    "scheduler/resuming.py",
    "scheduler/deadlines.py",
    "scheduler/feeding.py",
)
"""The files on which a state, folded from the same events, depends."""


@cache
def code_digest() -> str:
    """SHA-256 over the sources of the pure core and the events."""
    root = Path(__file__).parent.parent
    digest = sha256()
    for name in CORE:
        digest.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Recovered:
    """What a process starts from. `snapshot_seq` is that of the snapshot that was used, 0 for
    none.
    """

    state: SchedulerState
    known: KnownRequests
    hub: StreamHub
    snapshot_seq: int


def recover(journal: Journal, max_lingering: int) -> Recovered:
    """The state, the tokens of open requests, and their streams."""
    state, snapshot_seq = recover_state(journal)
    reach("recovery.state")
    hub = StreamHub(max_lingering)
    known = recover_requests(journal, state, hub)
    reach("recovery.done")
    return Recovered(state, known, hub, snapshot_seq)


def recover_state(journal: Journal) -> tuple[SchedulerState, int]:
    """The newest usable snapshot with all later events folded over it, and the snapshot's seq."""
    state = SchedulerState()
    snapshot = journal.latest_snapshot(STATE_VERSION, code_digest())
    if snapshot is not None:
        state = decode_state(snapshot[1])
        assert state.seq == snapshot[0], "a snapshot is stored under the seq of its state"
    snapshot_seq = state.seq
    fold(state, journal.read(after_seq=snapshot_seq))
    return state, snapshot_seq


def encode_state(state: SchedulerState) -> bytes:
    """The body of a snapshot."""
    return msgspec.msgpack.encode(state)


def decode_state(body: bytes) -> SchedulerState:
    """The inverse of `encode_state`."""
    return msgspec.msgpack.decode(body, type=SchedulerState)


def recover_requests(journal: Journal, state: SchedulerState, hub: StreamHub) -> KnownRequests:
    """The tokens of all open requests, and a stream for each, so that readers can attach."""
    known = KnownRequests()
    for request in state.requests.values():
        request_id = request.request_id
        prompt = journal.prompt_tokens(request_id)
        body = journal.parameters(request_id)
        assert prompt is not None, f"{request_id} is open, and its prompt is not in the journal"
        assert body is not None, f"{request_id} is open, and its parameters are not in the journal"
        output, packed = journal.output_tokens(request_id)
        assert len(output) == request.num_output_tokens, f"{request_id} lacks output tokens"
        parameters = decode_parameters(body)
        known.add(
            KnownRequest(
                number=request.number,
                request_id=request_id,
                num_prompt_tokens=len(prompt),
                tokens=prompt + output,
                parameters=parameters,
            )
        )
        stream = RequestStream(request_id, parameters, len(prompt), Accepted(request.max_tokens))
        stream.tokens.extend(output)
        stream.logprobs = unpacked(packed)
        hub.add(stream)
    return known


def unpacked(
    packed: list[tuple[float, tuple[tuple[int, float], ...]]] | None,
) -> list[TokenLogprobs] | None:
    """Log-probabilities as streams carry them."""
    return None if packed is None else [TokenLogprobs(chosen, top) for chosen, top in packed]
