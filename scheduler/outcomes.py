"""What HTTP and the engine hand over, as facts. Each helper of the sensors translates one thing."""

from collections.abc import Iterable, Iterator
from hashlib import sha256

from journal import events
from journal.events import Fact
from journal.tokens import StepTokens
from scheduler.engine.base import (
    BadFile,
    ChunkDone,
    EngineLoaded,
    MemoryReturned,
    RowFailed,
    RowFreed,
    RowRestored,
    RowTokens,
    StepDone,
)
from scheduler.evolve import is_decoding
from scheduler.known import KnownRequests
from scheduler.parameters import encode_parameters
from scheduler.state import SchedulerState
from scheduler.streams import Arrival


def received(arrival: Arrival, state: SchedulerState, num_before: int) -> events.RequestReceived:
    """The arrival with its number; `num_before` others arrive in this step before it."""
    assert state.model is not None, "nothing arrives before server_started"
    parameters = arrival.parameters
    return events.RequestReceived(
        request_id=arrival.request_id,
        number=state.next_number + num_before,
        client_request_id=arrival.client_request_id,
        model_fingerprint=state.model.fingerprint,
        route=arrival.route,
        stream=arrival.stream,
        num_prompt_tokens=len(arrival.prompt),
        max_tokens=arrival.max_tokens,
        seed=parameters.sampling.seed,
        parameters_digest=sha256(encode_parameters(parameters)).hexdigest(),
        num_suffix_tokens=arrival.num_suffix_tokens,
        keep_output=arrival.keep_output,
        content_digest=arrival.content_digest,
        session_digest=arrival.session_digest,
        key_digest=arrival.key_digest,
        owner_digest=arrival.owner_digest,
    )


def decoded(step: StepDone, state: SchedulerState) -> tuple[tuple[RowTokens, ...], Fact]:
    """The rows of a decode step and its fact. What a row that no longer decodes got is dropped.

    It is called for every token of every request: one pass over the rows.
    """
    requests, batch = state.requests, step.batch
    rows: list[RowTokens] = []
    numbers: list[int] = []
    counts: list[int] = []
    ended: list[events.RowEnd] = []
    for row in step.rows:
        request = requests.get(row.number)
        counted = row
        if request is None or not is_decoding(request, batch):
            counted = nothing(row)
        rows.append(counted)
        numbers.append(counted.number)
        counts.append(len(counted.token_ids))
        if counted.ended is not None:
            ended.append(events.RowEnd(number=counted.number, reason=counted.ended))
    fact = events.TokensDecoded(
        batch=batch,
        numbers=tuple(numbers),
        counts=tuple(counts),
        ended=tuple(ended),
        duration_ns=step.duration_ns,
    )
    return tuple(rows), fact


def nothing(row: RowTokens) -> RowTokens:
    """The row without its tokens."""
    return RowTokens(row.number, (), None)


def step_tokens(rows: tuple[RowTokens, ...]) -> StepTokens:
    """The tokens of a step as the journal keeps them."""
    return StepTokens.of(
        [
            (
                row.token_ids,
                None
                if row.logprobs is None
                else [(logprobs.chosen, logprobs.top) for logprobs in row.logprobs],
            )
            for row in rows
        ]
    )


def chunk_done(result: ChunkDone, request_id: str) -> Fact:
    return events.PrefillChunkDone(
        request_id=request_id,
        chunk=result.chunk,
        start=result.start,
        length=result.length,
        duration_ns=result.duration_ns,
        peak_bytes=result.peak_bytes,
        active_bytes=result.active_bytes,
    )


def engine_ready(result: EngineLoaded) -> Fact:
    return events.EngineReady(
        model=result.model,
        one_row_only=result.one_row_only,
        note=result.note,
        load_ns=result.load_ns,
        kv_domain=result.kv_domain,
    )


def reclaimed(result: MemoryReturned) -> Fact:
    return events.MemoryReclaimed(
        freed_bytes=result.freed_bytes,
        active_bytes=result.active_bytes,
        cached_bytes=result.cached_bytes,
        duration_ns=result.duration_ns,
    )


def row_failed(result: RowFailed, request_id: str) -> Fact:
    return events.EngineFailed(
        request_id=request_id, number=result.number, during=result.during, error=result.error
    )


def restored(result: RowRestored, request_id: str) -> Iterator[Fact]:
    """What could not be read, or is lost as well, comes first, so that nothing else starts from
    it.
    """
    for bad in result.bad:
        if bad.part == "tail":
            yield events.ChainRestoreFailed(
                request_id=request_id,
                number=result.number,
                reason=bad.reason,
                detail=bad.detail,
            )
        else:
            yield events.BlockCorrupt(
                hash=bad.hash, part=bad.part, reason=bad.reason, detail=bad.detail
            )
    for reason in ("missing", "corrupt"):
        if any(bad.reason == reason for bad in result.lost):
            yield lost(result.lost, reason)
    yield events.ChainRestored(
        request_id=request_id,
        number=result.number,
        num_tokens=result.num_tokens,
        num_memory_tokens=result.num_memory_tokens,
        num_disk_tokens=result.num_disk_tokens,
        read_bytes=result.read_bytes,
        duration_ns=result.duration_ns,
    )


def lost(files: Iterable[BadFile], reason: events.LostReason) -> Fact:
    """Those of the files that are lost for this reason, as one fact."""
    names: dict[str, list[str]] = {"block": [], "state": [], "tail": []}
    for bad in files:
        if bad.reason == reason:
            names[bad.part].append(bad.hash)
    return events.BlocksLost(
        hashes=tuple(names["block"]),
        states=tuple(names["state"]),
        tails=tuple(names["tail"]),
        reason=reason,
    )


def row_freed(result: RowFreed, known: KnownRequests, state: SchedulerState) -> Fact:
    """Nothing follows about the row of a request that has ended, so its id is forgotten."""
    request_id = known.row_ids[result.number]
    if result.number not in state.requests:
        del known.row_ids[result.number]
    return events.KvFreed(
        request_id=request_id, number=result.number, freed_bytes=result.freed_bytes
    )
