"""The one function that changes the scheduler's state.

`evolve` folds one event into the state. It is deterministic, total over the closed union of
events, and changes the state in place; nothing else ever does. What it may use is the state and
the event, so a state is a function of the events alone: live, recovered or replayed, it comes out
the same.

Facts may speak of requests that have ended meanwhile (a result that crossed a cancel): those are
folded to nothing. Decisions may not: `decide` saw the state, so one that does not apply is our own
bug, and raises.
"""

from bisect import insort
from collections.abc import Iterable
from typing import assert_never

import msgspec

from journal import events
from journal.events import ModelFacts, Record
from scheduler.memory import max_context_tokens
from scheduler.request import WITH_ROW, Phase, Request, enter
from scheduler.state import STATE_VERSION, Chunk, SchedulerState


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


def dispatch(state: SchedulerState, record: Record) -> None:  # noqa: C901, PLR0912
    """The one dispatch over the closed union: each arm is one call."""
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
            end_wanted(state, event.request_id, "client_gone")
        case events.CancelRequested() as event:
            end_wanted(state, event.request_id, "cancel_requested")
        case events.ServerStarted() as event:
            server_started(state, event)
        case events.EngineReady() as event:
            engine_ready(state, event)
        case events.ServerStopping():
            server_stopping(state)
        case events.StateCarried() as event:
            state_carried(state, event)
        case events.RequestQueued() as event:
            request_queued(state, event, record.seq)
        case events.RequestRejected() as event:
            end(state, event.request_id, "request_rejected")
        case events.RequestAdmitted() as event:
            request_admitted(state, event)
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
            end(state, event.request_id, "request_aborted")
        case _:
            assert_never(record.event)


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
    )
    state.numbers[event.request_id] = event.number
    state.arrivals.append(event.number)


def prefill_chunk_done(state: SchedulerState, event: events.PrefillChunkDone) -> None:
    chunk = state.chunk
    if chunk is None or chunk.chunk != event.chunk:
        return  # the row has ended or failed since the chunk was planned
    done = (chunk.start, chunk.length) == (event.start, event.length)
    state.chunk = msgspec.structs.replace(chunk, done=done)


def tokens_decoded(state: SchedulerState, event: events.TokensDecoded) -> None:
    requests = state.requests
    for number, count in zip(event.numbers, event.counts, strict=True):
        request = requests.get(number)
        if count and request is not None and is_decoding(request, event.batch):
            request.num_output_tokens += count
            request.num_cached_tokens += count
    for row in event.ended:
        request = requests.get(row.number)
        if request is None or request.end_reason is not None:
            continue
        if is_decoding(request, event.batch):
            request.end_reason = row.reason
            state.endings.append(row.number)
    state.decoded_since_chunk = True


def is_decoding(request: Request, batch: int) -> bool:
    """Whether tokens of this batch are this request's: it decodes, and had joined by then."""
    return request.phase is Phase.DECODING and request.joined_batch <= batch


def kv_freed(state: SchedulerState, event: events.KvFreed) -> None:
    state.reserved_bytes -= state.leaving.pop(event.number, 0)


def engine_failed(state: SchedulerState, event: events.EngineFailed) -> None:
    request = state.find(event.request_id)
    if request is None or request.phase is Phase.WAITING or request.failure is not None:
        return
    request.failure = f"{event.during}: {event.error}"
    state.failures.append(request.number)


def end_wanted(state: SchedulerState, request_id: str, reason: str) -> None:
    request = state.find(request_id)
    if request is not None and request.cancel_reason is None:
        request.cancel_reason = reason
        state.cancellations.append(request.number)


def server_stopping(state: SchedulerState) -> None:
    state.stopping = True


def server_started(state: SchedulerState, event: events.ServerStarted) -> None:
    """The recovery table: what was in the dead run's engine waits again, with its tokens.

    A run that ended without `server_stopping` died, and each request that was in its engine is
    charged with it: after `max_deaths` the request comes back alone, and after one more `decide`
    gives it up.
    """
    died = state.limits is not None and not state.stopping
    for request in list(state.requests.values()):
        if request.phase is not Phase.WAITING:
            enter(request, "server_started")
            back_to_waiting(state, request)
            request.deaths += died
        request.solo = request.deaths >= event.limits.max_deaths
        if request.deaths > event.limits.max_deaths:
            request.failure = f"in the engine at {request.deaths} deaths of the server"
            state.failures.append(request.number)
    state.policy_version = event.policy_version
    state.code_digest = event.code_digest
    state.limits = event.limits
    state.engine_ready = False
    state.one_row_only = False
    state.stopping = False
    forget_engine(state)
    set_model(state, event.model)


def forget_engine(state: SchedulerState) -> None:
    """Rows, reservations, the batch and the chunk belong to an engine's life, and end with it."""
    state.admitted = []
    state.batch_rows = []
    state.chunk = None
    state.decoded_since_chunk = False
    state.leaving = {}
    state.reserved_bytes = 0
    state.reserved_tokens = 0


def engine_ready(state: SchedulerState, event: events.EngineReady) -> None:
    state.engine_ready = True
    state.one_row_only = event.one_row_only
    set_model(state, event.model)


def set_model(state: SchedulerState, model: ModelFacts) -> None:
    """Takes what is known of the model, and holds back the requests that this server cannot run."""
    assert state.limits is not None
    state.model = model
    state.max_context_tokens = max_context_tokens(model, state.limits)
    open_numbers = sorted(state.waiting + state.held)
    for number in open_numbers:
        request = state.requests[number]
        request.held_reason = held_reason(state, request)
    state.waiting = [n for n in open_numbers if state.requests[n].held_reason is None]
    state.held = [n for n in open_numbers if state.requests[n].held_reason is not None]


def held_reason(state: SchedulerState, request: Request) -> str | None:
    """Why a queued request cannot run on this server, however long it waits; null when it can."""
    assert state.model is not None
    if request.model_fingerprint != state.model.fingerprint:
        return "other_model"
    if request.num_prompt_tokens + request.max_tokens > state.max_context_tokens:
        return "exceeds_capacity"
    return None


def state_carried(state: SchedulerState, event: events.StateCarried) -> None:
    """The journal begins with the whole state at this seq, in place of the events before it."""
    assert event.state_version == STATE_VERSION, f"state version {event.state_version}"
    carried = msgspec.convert(event.state, SchedulerState, str_keys=True)
    for field in SchedulerState.__struct_fields__:
        setattr(state, field, getattr(carried, field))
    state.seq = event.through_seq


# Decisions


def request_queued(state: SchedulerState, event: events.RequestQueued, seq: int) -> None:
    request = state.get(event.request_id)
    enter(request, "request_queued")
    state.arrivals.remove(request.number)
    request.max_tokens = event.max_tokens
    request.queued_seq = seq
    insort(state.waiting, request.number)


def request_admitted(state: SchedulerState, event: events.RequestAdmitted) -> None:
    request = state.get(event.request_id)
    enter(request, "request_admitted")
    state.waiting.remove(request.number)
    state.admitted.append(request.number)
    request.num_cached_tokens = event.num_cached_tokens
    request.reserved_bytes = event.reserved_bytes
    request.admitted_ns = state.now_ns
    state.reserved_bytes += event.reserved_bytes
    state.reserved_tokens += request.num_prompt_tokens + request.max_tokens


def prefill_chunk_planned(state: SchedulerState, event: events.PrefillChunkPlanned) -> None:
    request = state.get(event.request_id)
    enter(request, "prefill_chunk_planned")
    assert state.chunk is None, "one chunk is planned at a time"
    request.last_chunk = event.chunk
    state.num_chunks = event.chunk
    state.chunk = Chunk(event.number, event.chunk, event.start, event.length)
    state.decoded_since_chunk = False


def prefill_chunk_committed(state: SchedulerState, event: events.PrefillChunkCommitted) -> None:
    request = state.get(event.request_id)
    enter(request, "prefill_chunk_committed")
    request.num_cached_tokens = event.num_cached_tokens
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


def back_to_waiting(state: SchedulerState, request: Request) -> None:
    """The row is gone, the tokens stay: the request takes its old place in the queue."""
    request.num_cached_tokens = 0
    request.reserved_bytes = 0
    request.admitted_ns = 0
    request.failure = None
    request.end_reason = None
    insort(state.waiting, request.number)


def end(state: SchedulerState, request_id: str, kind: str) -> None:
    """The request has ended: it leaves every list, and its row's bytes count until the engine
    gives them back.
    """
    request = state.get(request_id)
    had_row = request.phase in WITH_ROW
    enter(request, kind)
    if had_row:
        leave_engine(state, request)
    for numbers in (state.waiting, state.held, state.arrivals):
        if request.number in numbers:
            numbers.remove(request.number)
    forget_marks(state, request.number)
    del state.requests[request.number]
    del state.numbers[request_id]


def leave_engine(state: SchedulerState, request: Request) -> None:
    """Takes the request out of the engine's lists. Its bytes stay reserved until `kv_freed`."""
    number = request.number
    state.admitted.remove(number)
    state.leaving[number] = state.leaving.get(number, 0) + request.reserved_bytes
    state.reserved_tokens -= request.num_prompt_tokens + request.max_tokens
    if state.chunk is not None and state.chunk.number == number:
        state.chunk = None
    forget_marks(state, number)


def forget_marks(state: SchedulerState, number: int) -> None:
    """A decision has answered what the facts brought for this request."""
    for marks in (state.endings, state.cancellations, state.failures):
        if number in marks:
            marks.remove(number)
