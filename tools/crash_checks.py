"""What must hold when a story is over: each check returns what is wrong, one line each.

The journal of a server that has stopped is read, the files that lie beside it, and what its clients
were sent. None of it asks the server.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from journal import events
from journal.errors import JournalError
from journal.events import Record
from journal.journal import Journal
from journal.queries import last_position
from journal.reader import JournalReader
from scheduler.engine.model import Tokenizer
from scheduler.evolve import fold
from scheduler.invariants import InvariantBroken, check
from scheduler.keptfiles import known_files, tail_file
from scheduler.kvcache.naming import BlockFile, StateFile
from scheduler.kvcache.store import BlockStore, ReadFailed
from scheduler.recovery import encode_state, recover_state
from scheduler.replay import Replay
from scheduler.state import SchedulerState
from tools.crash_clients import Client
from tools.crash_delivery import Output, Tally, problems_of_delivery

Files = Mapping[str, int]
"""Paths below kv/, and sizes."""


@dataclass(frozen=True)
class Allowed:
    """What a story does on purpose. `lost`: blocks may be lost, since something damages them.
    `aborts`: rows fail, or memory never comes. `purges`: tokens of ended requests go at once.
    """

    lost: bool = False
    aborts: bool = False
    purges: bool = False


@dataclass
class Evidence:
    """What is left of a story. `at_deaths` are the files that lay there when a life was ended, by
    the number that the journal's last run had then.
    """

    state: Path
    clients: Sequence[Client]
    tokenizer: Tokenizer
    at_deaths: dict[int, Files] = field(default_factory=dict[int, Files])
    allowed: Allowed = field(default_factory=Allowed)


def files_below(folder: Path) -> Files:
    """All that lies in the store's folder."""
    return {
        str(path.relative_to(folder)): path.lstat().st_size
        for path in sorted(folder.rglob("*"))
        if not path.is_dir()
    }


def last_run(state: Path) -> int:
    """The number of the journal's last run, read beside whoever has it; 0 before there is one."""
    try:
        with JournalReader.open(state) as reader, reader.transaction() as run:
            return last_position(run).run_id
    except JournalError:
        return 0


def problems_of(evidence: Evidence) -> list[str]:
    """Everything that is wrong."""
    journal = Journal.open(evidence.state)
    try:
        state, _ = recover_state(journal)
        records = list(journal.read())
        return [
            *(f"verify: {line}" for line in journal.verify()),
            *check_state(state),
            *check_ends(records, evidence.allowed),
            *check_replay(records),
            *check_recovery(records, state),
            *check_files(state, evidence.state / "kv", evidence.allowed),
            *check_pins(records, evidence),
            *check_clients(journal, evidence),
        ]
    finally:
        journal.close()


def check_state(state: SchedulerState) -> Iterator[str]:
    """Invariants hold, and nothing is counted of requests that have ended."""
    yield from check_invariants(state, "when all is over")
    left = {
        "requests": len(state.requests),
        "reserved bytes": state.reserved_bytes,
        "pauses": len(state.paused) + len(state.pausing),
        "rows": len(state.admitted),
        "blocks with a lease": sum(block.leases > 0 for block in state.index.blocks.values()),
        "blocks with a pin": sum(block.pins > 0 for block in state.index.blocks.values()),
        "tails": len(state.index.tails),
        "bytes being written": state.index.writing_bytes,
    }
    yield from (f"counters: {count} {what} are left" for what, count in left.items() if count)


def check_invariants(state: SchedulerState, when: str) -> Iterator[str]:
    """All of them, at a committed boundary."""
    try:
        check(state)
    except InvariantBroken as error:
        yield f"invariants, {when}: {error}"


def check_ends(records: Iterable[Record], allowed: Allowed) -> Iterator[str]:
    """Every request that was received has exactly one end, and a proper one."""
    open_ids: set[str] = set()
    for record in records:
        match record.event:
            case events.StateCarried(state=state):
                numbers = cast("dict[str, int]", state["numbers"])
                open_ids = set(numbers)
            case events.RequestReceived(request_id=request_id):
                open_ids.add(request_id)
            case (
                events.RequestFinished(request_id=request_id)
                | events.RequestCancelled(request_id=request_id)
                | events.RequestRejected(request_id=request_id)
                | events.RequestAborted(request_id=request_id)
                | events.RequestJoined(request_id=request_id)
            ) as event:
                if request_id not in open_ids:
                    yield f"ends: {request_id} has a second end, {type(event).__name__}"
                open_ids.discard(request_id)
                if isinstance(event, events.RequestAborted) and not allowed.aborts:
                    yield f"ends: {request_id} is aborted: {event}"
            case _:
                continue
    yield from (f"ends: {request_id} never came to its end" for request_id in sorted(open_ids))


def check_replay(records: Iterable[Record]) -> Iterator[str]:
    """What was decided is decided again."""
    for divergence in Replay(records).divergences():
        yield f"replay: {divergence}"


def check_recovery(records: Iterable[Record], recovered: SchedulerState) -> Iterator[str]:
    """What a start finds, by a snapshot or without, is what all events fold to; and invariants held
    when each run began.
    """
    state = SchedulerState()
    for record in records:
        if isinstance(record.event, events.ServerStarted) and state.run_id:
            yield from check_invariants(state, f"at the end of run {state.run_id}")
        fold(state, [record])
    if encode_state(state) != encode_state(recovered):
        yield "recovery: the state from the snapshot is not what all events fold to"


def check_files(state: SchedulerState, folder: Path, allowed: Allowed) -> Iterator[str]:
    """What is on disk is what the index says, to the byte; each file is sound."""
    known, found = known_files(state.index), files_below(folder)
    for path in sorted(found.keys() - known.keys()):
        yield f"files: {path} is nobody's"
    for path in sorted(known.keys() - found.keys()):
        if not allowed.lost:
            yield f"files: {path} is gone"
    for path in sorted(known.keys() & found.keys()):
        if known[path] != found[path]:
            yield f"files: {path} has {found[path]} bytes, recorded are {known[path]}"
    store = BlockStore(folder)
    for name, block in state.index.blocks.items():
        kept = [BlockFile(block.domain, name)]
        kept += [StateFile(block.domain, name)] if block.state_bytes else []
        for file in kept:
            result = store.verify(file)
            if isinstance(result, ReadFailed) and not allowed.lost:
                yield f"files: {file.path} is {result.kind}: {result.detail}"


def pinned_files(state: SchedulerState) -> dict[str, int]:
    """The files without which a held request would lose tokens, and their sizes."""
    known = known_files(state.index)
    found: dict[str, int] = {}
    for request in state.requests.values():
        for name in request.pins:
            block = state.index.blocks[name]
            path = BlockFile(block.domain, name).path
            found[path] = known[path]
            if block.state_bytes:
                path = StateFile(block.domain, name).path
                found[path] = known[path]
    for name, tail in state.index.tails.items():
        found[tail_file(tail.domain, name).path] = tail.num_bytes
    return found


def check_pins(records: Iterable[Record], evidence: Evidence) -> Iterator[str]:
    """What was pinned at a death lay on disk then, and who was held with it lost no token."""
    if evidence.allowed.lost:
        return
    state = SchedulerState()
    dropped: set[str] = set()
    for record in records:
        match record.event:
            case events.ServerStarted() if state.run_id:
                yield from lost_pins(state, evidence.at_deaths.get(state.run_id))
            case events.KvDropped(request_id=request_id):
                dropped.add(request_id)
            case events.RequestResumed(request_id=request_id, num_lost_tokens=num_lost):
                if num_lost and request_id not in dropped:
                    yield f"pins: {request_id} lost {num_lost} tokens"
                dropped.discard(request_id)
            case _:
                pass
        fold(state, [record])


def lost_pins(state: SchedulerState, at_death: Files | None) -> Iterator[str]:
    """What was pinned when a run died, and did not lie there. A clean stop left nothing to look
    at.
    """
    if at_death is None:
        return
    for path, num_bytes in pinned_files(state).items():
        if at_death.get(path) != num_bytes:
            yield f"pins: {path} was pinned at the death of run {state.run_id}, and is not there"


def check_clients(journal: Journal, evidence: Evidence) -> Iterator[str]:
    """What clients were sent is what the journal holds, each token once and in its place."""
    for client in evidence.clients:
        yield from (f"{client.name}: {problem}" for problem in client.problems)
        if client.refusal == {"status": 410} and not evidence.allowed.purges:
            yield f"{client.name}: its answer is not kept any more"
        if not client.is_over:
            yield f"{client.name}: never came to an end"
        for attempt in client.attempts:
            known = known_output(journal, attempt.request_id, evidence.tokenizer)
            if attempt.pieces and not known.num_tokens and evidence.allowed.purges:
                continue
            for problem in problems_of_delivery(attempt, known):
                yield f"{client.name}: {attempt.request_id}: {problem}"


def known_output(journal: Journal, request_id: str, tokenizer: Tokenizer) -> Output:
    """What the journal has of a request's output."""
    tokens, packed = journal.output_tokens(request_id)
    logprobs = None if packed is None else [chosen for chosen, _ in packed]
    return Output.of(list(tokens), logprobs, tokenizer.detokenizer)


def tally_of(evidence: Evidence) -> tuple[Tally, int]:
    """What was delivered to all clients; and how many pauses the journal knows."""
    tally = Tally()
    journal = Journal.open(evidence.state)
    try:
        for client in evidence.clients:
            for attempt in client.attempts:
                known = known_output(journal, attempt.request_id, evidence.tokenizer)
                tally.add(attempt, known)
        pauses = (r for r in journal.read() if isinstance(r.event, events.RequestPaused))
        return tally, sum(1 for _ in pauses)
    finally:
        journal.close()
