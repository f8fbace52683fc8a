"""The one function that changes the scheduler's state.

`evolve` folds one event into the state. It is deterministic, total over the closed union of
events, and changes the state in place; nothing else ever does. What it may use is the state and
the event, so a state is a function of the events alone: live, recovered or replayed, it comes out
the same.

Facts may speak of requests that have ended meanwhile (a result that crossed a cancel): those are
folded to nothing. Decisions may not: `decide` saw the state, so one that does not apply is our own
bug, and raises.
"""

from collections.abc import Iterable

import msgspec

from journal import events
from journal.events import Record
from scheduler import chains, holding, leases, orphans, readings, runs
from scheduler.leaving import (
    back_to_waiting,
    end_wanted,
    forget_marks,
    leave_engine,
    put_in_line,
)
from scheduler.request import WITH_ROW, Fed, Phase, Request, enter
from scheduler.state import Chunk, SchedulerState
from scheduler.usage import row_now_bytes

MIN_TELLING_TOKENS = 16
"""A shorter chunk needs much that does not depend on its length."""


def fold(state: SchedulerState, records: Iterable[Record]) -> None:
    """Folds records in their order."""
    for record in records:
        evolve(state, record)


def evolve(state: SchedulerState, record: Record) -> None:
    """Folds one event. The record must be the next one: seqs have no gaps, and time does not go
    back.
    """
    carried = isinstance(record.event, events.StateCarried)
    assert carried or record.seq == state.seq + 1, f"seq {record.seq} after {state.seq}"
    assert record.at_ns >= state.now_ns, f"time went back at seq {record.seq}"
    state.seq = record.seq
    state.step = record.step
    state.run_id = record.run_id
    state.now_ns = record.at_ns
    dispatch(state, record)


def dispatch(state: SchedulerState, record: Record) -> None:  # noqa: C901, PLR0912, PLR0915
    """The one dispatch over the closed union: each arm is one call. What is about blocks goes on to
    a dispatch of its own.
    """
    match record.event:
        case events.TokensDecoded() as event:
            tokens_decoded(state, event)
        case events.RequestReceived() as event:
            request_received(state, event)
        case events.PrefillChunkDone() as event:
            prefill_chunk_done(state, event)
        case events.KvFreed() as event:
            kv_freed(state, event)
        case events.EngineFailed() as event:
            engine_failed(state, event)
        case events.ClientGone() as event:
            orphans.client_gone(state, event)
        case events.ClientAttached() as event:
            orphans.client_attached(state, event)
        case events.CancelRequested() as event:
            end_wanted(state, event.request_id, "cancel_requested")
        case events.ServerStarted() as event:
            runs.server_started(state, event)
        case events.EngineReady() as event:
            runs.engine_ready(state, event)
        case events.ServerStopping():
            server_stopping(state)
        case events.DrainEnded():
            drain_ended(state)
        case events.StateCarried() as event:
            runs.state_carried(state, event)
        case events.ClockTicked():
            pass
        case events.RequestQueued() as event:
            request_queued(state, event, record.seq)
        case events.RequestRejected() as event:
            end(state, event.request_id, "request_rejected")
        case events.RequestJoined() as event:
            end(state, event.request_id, "request_joined")
        case events.RequestAdopted() as event:
            orphans.request_adopted(state, event)
        case events.RequestAdmitted() as event:
            request_admitted(state, event, record.seq)
        case events.PrefillChunkPlanned() as event:
            prefill_chunk_planned(state, event)
        case events.PrefillChunkCommitted() as event:
            prefill_chunk_committed(state, event)
        case events.BatchChanged() as event:
            batch_changed(state, event)
        case events.RequestRetried() as event:
            request_retried(state, event)
        case events.RequestFinished() as event:
            end(state, event.request_id, "request_finished")
        case events.RequestCancelled() as event:
            end(state, event.request_id, "request_cancelled")
        case events.RequestAborted() as event:
            request_aborted(state, event)
        case _:
            if isinstance(record.event, holding.HoldEvent):
                holding.dispatch(state, record.event)
            else:
                chains.dispatch(state, record.event)


# Facts


def request_received(state: SchedulerState, event: events.RequestReceived) -> None:
    assert event.number == state.next_number, "request numbers have no gaps"
    assert event.request_id not in state.numbers, f"{event.request_id} is given twice"
    state.next_number += 1
    state.requests[event.number] = Request(
        number=event.number,
        request_id=event.request_id,
        model_fingerprint=event.model_fingerprint,
        route=event.route,
        num_prompt_tokens=event.num_prompt_tokens,
        asked_max_tokens=event.max_tokens,
        received_ns=state.now_ns,
        num_suffix_tokens=event.num_suffix_tokens,
        keep_output=event.keep_output,
        content_digest=event.content_digest,
        session_digest=event.session_digest,
        key_digest=event.key_digest,
        owner_digest=event.owner_digest,
    )
    state.numbers[event.request_id] = event.number
    state.arrivals.append(event.number)


def prefill_chunk_done(state: SchedulerState, event: events.PrefillChunkDone) -> None:
    chunk = state.chunk
    learn_need(state, event)
    if chunk is None or chunk.chunk != event.chunk:
        return  # the row has ended, failed or been dropped since the chunk was planned
    done = (chunk.start, chunk.length) == (event.start, event.length)
    state.chunk = msgspec.structs.replace(chunk, done=done)
    state.fed = Fed(event.start, event.length, event.duration_ns)
    state.requests[chunk.number].fed = state.fed
    state.progress_ns = state.now_ns


def learn_need(state: SchedulerState, event: events.PrefillChunkDone) -> None:
    """What a chunk needed beside what it left, for each of its tokens. It holds also where the row
    is gone: dropped because of this very chunk, it would meet the same emergency again.
    """
    if event.length >= MIN_TELLING_TOKENS:
        needed = max(0, event.peak_bytes - event.active_bytes) // event.length
        state.chunk_bytes_per_token = max(needed, state.chunk_bytes_per_token * 7 // 8)


def tokens_decoded(state: SchedulerState, event: events.TokensDecoded) -> None:
    requests = state.requests
    block_tokens = leases.block_tokens_of(state)
    for number, count in zip(event.numbers, event.counts, strict=True):
        request = requests.get(number)
        if count and request is not None and is_decoding(request, event.batch):
            request.num_output_tokens += count
            request.num_cached_tokens += count
            if block_tokens and request.num_cached_tokens % block_tokens < count:
                leases.grow(state, request, request.num_cached_tokens - count)
    for row in event.ended:
        request = requests.get(row.number)
        if request is None or request.end_reason is not None:
            continue
        if is_decoding(request, event.batch):
            request.end_reason = row.reason
            state.endings.append(row.number)
    state.decoded_since_chunk = True
    state.step_ns = lately(state.step_ns, event.duration_ns)
    state.progress_ns = state.now_ns


def lately(before: int, now: int) -> int:
    """A mean that forgets: each new value counts a quarter."""
    return now if before == 0 else (3 * before + now) // 4


def is_decoding(request: Request, batch: int) -> bool:
    """Whether tokens of this batch are this request's: it decodes, or did until the step that was
    under way, and had joined by then.
    """
    decodes = request.phase is Phase.DECODING or request.phase is Phase.PAUSING
    return decodes and 0 < request.joined_batch <= batch


def kv_freed(state: SchedulerState, event: events.KvFreed) -> None:
    state.reserved_bytes -= state.leaving.pop(event.number, 0)
    readings.row_left(state, event.number, event.freed_bytes)
    state.progress_ns = state.now_ns


def engine_failed(state: SchedulerState, event: events.EngineFailed) -> None:
    request = state.find(event.request_id)
    if request is None or request.phase not in WITH_ROW or request.failure is not None:
        return
    request.failure = f"{event.during}: {event.error}"
    state.failures.append(request.number)


def server_stopping(state: SchedulerState) -> None:
    state.stopping = True


def drain_ended(state: SchedulerState) -> None:
    state.drained = True


# Decisions


def request_queued(state: SchedulerState, event: events.RequestQueued, seq: int) -> None:
    request = state.get(event.request_id)
    enter(request, "request_queued")
    state.arrivals.remove(request.number)
    request.max_tokens = event.max_tokens
    request.queued_seq = seq
    if request.key_digest:
        state.keys[request.key_digest] = request.request_id
    put_in_line(state, request)


def request_admitted(state: SchedulerState, event: events.RequestAdmitted, seq: int) -> None:
    request = state.get(event.request_id)
    enter(request, "request_admitted")
    request.first_admitted_seq = request.first_admitted_seq or seq
    state.waiting.remove(request.number)
    state.admitted.append(request.number)
    request.num_memory_tokens = 0
    request.num_disk_tokens = 0
    request.turn_tokens = state.num_chunk_tokens
    request.restoring = event.num_cached_tokens > 0
    request.room_tokens = event.num_known_tokens if request.restoring else 0
    leases.join_chain(state, request, event.num_blocks)
    request.reserved_bytes = event.reserved_bytes
    request.admitted_ns = state.now_ns
    state.reserved_bytes += event.reserved_bytes
    state.reserved_tokens += request.num_prompt_tokens + request.max_tokens


def prefill_chunk_planned(state: SchedulerState, event: events.PrefillChunkPlanned) -> None:
    request = state.get(event.request_id)
    enter(request, "prefill_chunk_planned")
    assert state.chunk is None, "one chunk is planned at a time"
    state.num_chunks = event.chunk
    state.num_chunk_tokens += event.length
    request.turn_tokens = state.num_chunk_tokens
    state.chunk = Chunk(event.number, event.chunk, event.start, event.length)
    state.decoded_since_chunk = False


def prefill_chunk_committed(state: SchedulerState, event: events.PrefillChunkCommitted) -> None:
    request = state.get(event.request_id)
    enter(request, "prefill_chunk_committed")
    num_before = request.num_cached_tokens
    request.num_cached_tokens = event.num_cached_tokens
    leases.grow(state, request, num_before)
    state.chunk = None


def batch_changed(state: SchedulerState, event: events.BatchChanged) -> None:
    for number in event.joined:
        request = state.requests[number]
        enter(request, "batch_changed")
        request.joined_batch = event.batch
    state.batch = event.batch
    state.batch_rows = list(event.numbers)


def request_retried(state: SchedulerState, event: events.RequestRetried) -> None:
    request = state.get(event.request_id)
    enter(request, "request_retried")
    request.retries = event.retry
    leave_engine(state, request)
    back_to_waiting(state, request)


def request_aborted(state: SchedulerState, event: events.RequestAborted) -> None:
    """One that is given up for memory gives its row back: an action like others."""
    if event.reason == "memory":
        request = state.requests[event.number]
        readings.act(state, "abort", row_now_bytes(state, request), event.number)
    end(state, event.request_id, "request_aborted")


def end(state: SchedulerState, request_id: str, kind: str) -> None:
    """The request has ended: it leaves every list, and its row's bytes count until the engine
    gives them back.
    """
    request = state.get(request_id)
    enter(request, kind)
    if request.number in state.admitted:
        leave_engine(state, request)
    if not request.keep_output:
        leases.disown_output(state, request)
    assert not request.pins, f"{request_id} ends, and holds nothing any more"
    for numbers in (state.waiting, state.held, state.arrivals, state.paused):
        if request.number in numbers:
            numbers.remove(request.number)
    forget_marks(state, request.number)
    orphans.forget(state, request, finished=kind == "request_finished")
    del state.requests[request.number]
    del state.numbers[request_id]
