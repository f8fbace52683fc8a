"""What to do next: a pure function of the state.

`decide` answers what the facts of a step have brought, in a fixed order: ends first, since they
make room; then arrivals, committed chunks, admissions, the batch, the next chunk, and last what
leaves the disk. Each helper reads the state and a `Draft`, in which the helpers before it noted
what their decisions will change, and none of them changes the state.

Everything is an integer and every tie is broken by the request's number, so the same state gives
the same decisions on every machine.
"""

from dataclasses import dataclass
from itertools import takewhile
from typing import Literal

from journal import events
from journal.events import Decision
from scheduler.admission import admit, judge_arrivals
from scheduler.adopting import CancelReason, nobody_came
from scheduler.draft import Draft, limits_of
from scheduler.eviction import send_away, send_bad
from scheduler.feeding import in_even_parts, tokens_beside_rows
from scheduler.pausing import (
    advance_pauses,
    held_without_row,
    hold_by_hand,
    hold_drained,
    hold_orphans,
    unpinned,
)
from scheduler.relief import chunk_fits, make_place, relieve, tokens_with_room
from scheduler.request import Phase, Request
from scheduler.resuming import resume, waited_until_ns, waits_for_others
from scheduler.saving import plan_boundary, plan_saves, up_to_boundary
from scheduler.state import SchedulerState
from scheduler.usage import memory_of

MAX_OVERDUE = 8
"""Requests that one step ends at most because their time is over."""

AGING = 4
"""Tokens that others are fed, for one that a request comes nearer to its turn."""

POLICY_VERSION = 6
"""To be raised with every change that alters a decision: replay tells other policies' runs from
divergences.
"""


def decide(state: SchedulerState) -> list[Decision]:
    """The decisions that this state calls for, in the order in which they are to be folded. May be
    none.
    """
    draft = Draft(chunk_open=state.chunk is not None)
    if state.unsaved:
        plan_saves(state, draft)
    if state.endings or state.cancellations or state.failures:
        end_requests(state, draft)
    end_overdue(state, draft)
    if state.arrivals:
        judge_arrivals(state, draft)
    if state.chunk is not None:
        commit_chunk(state, draft)
    make_room(state, draft)
    if state.engine_ready:
        use_engine(state, draft)
    else:
        change_batch(state, draft)
        advance_pauses(state, draft)
    if state.index.bad:
        draft.decisions += send_bad(state)
    takes_blocks = draft.admitted or draft.committed or draft.pinned or draft.num_resumed
    if not takes_blocks:  # else it could be what is held just now
        draft.decisions += send_away(state)
    return draft.decisions


def use_engine(state: SchedulerState, draft: Draft) -> None:
    """Who gets a row, who decodes, and what is fed next."""
    if not state.stopping and (state.waiting or draft.queued or draft.back):
        admit(state, draft)
    give_up_waiting(state, draft)
    if not draft.chunk_open:
        make_place_for_chunk(state, draft)
    change_batch(state, draft)
    if state.pausing or draft.pausing:
        advance_pauses(state, draft)
    if not draft.chunk_open:
        plan_chunk(state, draft)


def make_room(state: SchedulerState, draft: Draft) -> None:
    """Who is held, and who goes on: by an operator's wish, for want of a client, and for memory."""
    if state.holds:
        hold_by_hand(state, draft)
    if state.orphans:
        hold_orphans(state, draft)
    if state.drained:
        hold_drained(state, draft)
    if state.memory.level:
        relieve(state, draft)
    if state.paused or len(state.admitted) > len(state.batch_rows):
        resume(state, draft)


# Ends


def end_requests(state: SchedulerState, draft: Draft) -> None:
    """A request that has reached its end finishes, even when a cancel came in the same step."""
    for number in state.endings:
        close(state, draft, number, finish(state.requests[number]))
    for number in state.cancellations:
        request = state.requests[number]
        if number not in draft.ended:
            close(state, draft, number, cancel(state, request, wish_of(request)))
    for number in state.failures:
        if number not in draft.ended:
            decision = retry_or_abort(state, state.requests[number])
            close(state, draft, number, decision)
            if isinstance(decision, events.RequestRetried):
                draft.retried.add(number)
                if state.requests[number].hold:
                    draft.decisions.append(held_without_row(state.requests[number]))
    if state.chunk is not None and state.chunk.number in draft.ended:
        draft.chunk_open = False


def close(state: SchedulerState, draft: Draft, number: int, decision: Decision) -> None:
    """Notes that this request leaves the engine and the queue in this step. What it had pinned may
    go.
    """
    draft.decisions += unpinned(state.requests[number], "ended")
    draft.decisions.append(decision)
    draft.ended.add(number)


def end_overdue(state: SchedulerState, draft: Draft) -> None:
    """Requests that are older than any may become (`requests` holds the oldest first), and those
    without a client for which nobody has come.
    """
    overdue: list[tuple[int, CancelReason]] = []
    if max_age_ns := limits_of(state).max_age_ns:
        limit_ns = state.now_ns - max_age_ns
        ages = takewhile(lambda n: state.requests[n].received_ns <= limit_ns, state.requests)
        overdue.extend((number, "deadline") for number in ages if number not in state.arrivals)
    overdue.extend(nobody_came(state))
    for number, reason in overdue[:MAX_OVERDUE]:
        if number not in draft.ended:
            close(state, draft, number, cancel(state, state.requests[number], reason))


def give_up_waiting(state: SchedulerState, draft: Draft) -> None:
    """Only other programs hold the memory, and have for too long: the request that would be next is
    told to come back later.
    """
    number = waits_for_others(state)
    if number is None or draft.num_let_in or draft.num_resumed or number in draft.ended:
        return
    request = state.requests[number]
    if state.now_ns < waited_until_ns(state, request):
        return
    close(
        state, draft, number, abort(state, request, "memory_wait", "other programs hold the memory")
    )


def finish(request: Request) -> Decision:
    """The end that the engine saw."""
    match request.end_reason:
        case "stop" | "end_of_turn" | "length" as reason:
            return events.RequestFinished(
                request_id=request.request_id,
                number=request.number,
                reason=reason,
                num_prompt_tokens=request.num_prompt_tokens,
                num_output_tokens=request.num_output_tokens,
                num_memory_tokens=request.num_memory_tokens,
                num_disk_tokens=request.num_disk_tokens,
                num_prefilled_tokens=request.num_prefilled_tokens,
            )
        case _:
            raise AssertionError(f"{request.request_id} ends for {request.end_reason}")


def wish_of(request: Request) -> CancelReason:
    """Who wanted the end."""
    match request.cancel_reason:
        case "client_gone" | "cancel_requested" as reason:
            return reason
        case _:
            raise AssertionError(f"{request.request_id} is cancelled for {request.cancel_reason}")


def cancel(state: SchedulerState, request: Request, reason: CancelReason) -> Decision:
    """An end from outside."""
    return events.RequestCancelled(
        request_id=request.request_id,
        number=request.number,
        reason=reason,
        num_output_tokens=request.num_output_tokens,
        had_row=request.number in state.admitted,
        num_memory_tokens=request.num_memory_tokens,
        num_disk_tokens=request.num_disk_tokens,
        num_prefilled_tokens=request.num_prefilled_tokens,
    )


def retry_or_abort(state: SchedulerState, request: Request) -> Decision:
    """A failed row costs its request a retry; the last failure, and a death too many, its life."""
    limits = limits_of(state)
    killed = request.deaths > limits.max_deaths
    if not killed and request.retries < limits.max_retries:
        return events.RequestRetried(
            request_id=request.request_id, number=request.number, retry=request.retries + 1
        )
    return abort(
        state, request, "server_deaths" if killed else "engine_failed", request.failure or ""
    )


def abort(
    state: SchedulerState,
    request: Request,
    reason: Literal["engine_failed", "server_deaths", "memory_wait"],
    detail: str,
) -> Decision:
    """The server gives the request up, and says why."""
    return events.RequestAborted(
        request_id=request.request_id,
        number=request.number,
        reason=reason,
        detail=detail,
        num_output_tokens=request.num_output_tokens,
        had_row=request.number in state.admitted,
        num_memory_tokens=request.num_memory_tokens,
        num_disk_tokens=request.num_disk_tokens,
        num_prefilled_tokens=request.num_prefilled_tokens,
    )


# Chunks and the batch


def commit_chunk(state: SchedulerState, draft: Draft) -> None:
    """A chunk that was fed counts from here on, unless its request has ended meanwhile."""
    chunk = state.chunk
    if chunk is None or not chunk.done or chunk.number in draft.ended:
        return
    request = state.requests[chunk.number]
    num_cached_tokens = chunk.start + chunk.length
    draft.committed[chunk.number] = num_cached_tokens
    draft.chunk_open = False
    draft.decisions.append(
        events.PrefillChunkCommitted(
            request_id=request.request_id, num_cached_tokens=num_cached_tokens
        )
    )
    plan_boundary(state, draft, request, chunk.start, num_cached_tokens)


def next_batch(state: SchedulerState, draft: Draft) -> tuple[list[int], list[int], list[int]]:
    """The rows that decode after this step, and who joins and leaves with it: rows that end or are
    held leave, requests with nothing left to prefill join.
    """
    left = [n for n in state.batch_rows if n in draft.ended or n in draft.pausing]
    ready = [r for r in prefilling_requests(state, draft) if to_prefill(r, draft) == 0]
    joined = sorted(r.number for r in ready if not is_restoring(r, draft))
    if not left and not joined:
        return state.batch_rows, joined, left
    return [n for n in state.batch_rows if n not in left] + joined, joined, left


def change_batch(state: SchedulerState, draft: Draft) -> None:
    """Says which rows decode from now on, if that has changed."""
    numbers, joined, left = next_batch(state, draft)
    if left or joined:
        draft.decisions.append(
            events.BatchChanged(
                batch=state.batch + 1,
                numbers=tuple(numbers),
                joined=tuple(joined),
                left=tuple(left),
            )
        )
    draft.batch_is_empty = not numbers


def to_prefill(request: Request, draft: Draft) -> int:
    """Tokens still to be fed before the request can decode, after this step's commits."""
    cached = draft.committed.get(request.number, request.num_cached_tokens)
    return request.num_known_tokens - 1 - cached


def is_restoring(request: Request, draft: Draft) -> bool:
    """Whether its row is being filled from saved blocks, or will be after this step."""
    return request.restoring or draft.matched.get(request.number, 0) > 0


def make_place_for_chunk(state: SchedulerState, draft: Draft) -> None:
    """A request is held when the next chunk has no room beside the others, and will have none when
    the writers are done.
    """
    if memory_of(state) is None or not prefilling_requests(state, draft):
        return
    draft.batch_is_empty = not next_batch(state, draft)[0]
    chunk = next_chunk(state, draft)
    if chunk is None:
        return
    writing_bytes = state.index.writing_bytes
    if not chunk_fits(state, chunk.request, chunk.start, chunk.length, passing_bytes=writing_bytes):
        make_place(state, draft)


@dataclass(frozen=True, slots=True)
class NextChunk:
    """What would be fed next."""

    request: Request
    start: int
    length: int


def next_chunk(state: SchedulerState, draft: Draft) -> NextChunk | None:
    """The next chunk: of the request that has least to prefill, so that a short prompt is not
    behind a long one; what others are fed brings a request nearer, so that none starves.

    Running rows get at least one decode step between two chunks, and a chunk beside them is small.
    """
    if not draft.batch_is_empty and not state.decoded_since_chunk:
        return None
    prefilling = [
        r
        for r in prefilling_requests(state, draft)
        if to_prefill(r, draft) > 0 and not is_restoring(r, draft)
    ]
    if not prefilling:
        return None
    request = min(prefilling, key=lambda r: (turn_of(state, r, draft), r.number))
    start = draft.committed.get(request.number, request.num_cached_tokens)
    return NextChunk(request, start, chunk_tokens(state, draft, request, start))


def plan_chunk(state: SchedulerState, draft: Draft) -> None:
    """Plans the next chunk, if there is one and it has room."""
    chunk = next_chunk(state, draft)
    if chunk is None or not chunk_fits(state, chunk.request, chunk.start, chunk.length):
        return
    draft.decisions.append(
        events.PrefillChunkPlanned(
            request_id=chunk.request.request_id,
            number=chunk.request.number,
            chunk=state.num_chunks + 1,
            start=chunk.start,
            length=chunk.length,
        )
    )


def turn_of(state: SchedulerState, request: Request, draft: Draft) -> int:
    """The tokens that it still has to prefill, less a quarter of those that others were fed since
    its own last chunk.
    """
    new = request in draft.admitted
    num_passed = 0 if new else state.num_chunk_tokens - request.turn_tokens
    return to_prefill(request, draft) - num_passed // AGING


def chunk_tokens(state: SchedulerState, draft: Draft, request: Request, start: int) -> int:
    """The length of the next chunk of this prompt, which ends where a state is to be kept. What is
    fed up to there beside running rows is fed in even parts.
    """
    left = to_prefill(request, draft)
    if draft.batch_is_empty:
        most = tokens_with_room(state, request, min(limits_of(state).chunk_tokens, left))
        return up_to_boundary(state, request, start, most)
    beside = min(tokens_beside_rows(state, request, start), left)
    most = tokens_with_room(state, request, beside)
    return in_even_parts(up_to_boundary(state, request, start, left), most)


def prefilling_requests(state: SchedulerState, draft: Draft) -> list[Request]:
    """Requests with a row that do not decode yet, those that get one in this step among them."""
    if len(state.admitted) == len(state.batch_rows):
        return draft.admitted
    rows = [state.requests[n] for n in state.admitted if n not in draft.ended]
    there = [r for r in rows if r.phase is Phase.PREFILLING and r.number not in draft.pausing]
    return there + draft.admitted
