"""What to do next: a pure function of the state.

`decide` answers what the facts of a step have brought, in a fixed order: ends first, since they
make room; then arrivals, committed chunks, admissions, the batch and the next chunk. Each helper
reads the state and a `Draft`, in which the helpers before it noted what their decisions will
change, and none of them changes the state.

Everything is an integer and every tie is broken by the request's number, so the same state gives
the same decisions on every machine.
"""

from dataclasses import dataclass, field
from itertools import chain
from typing import Literal

from journal import events
from journal.events import Decision, Limits, ModelFacts
from scheduler.memory import capacity_numbers, row_bytes, rows_capacity_bytes
from scheduler.request import WITH_ROW, Phase, Request
from scheduler.state import SchedulerState

POLICY_VERSION = 1
"""To be raised with every change that alters a decision: replay tells other policies' runs from
divergences.
"""

MAX_ADMISSIONS = 32
"""Requests admitted in one step at most; the others are looked at again in the next one."""


@dataclass(slots=True)
class Draft:
    """The decisions so far, and what of the state they will have changed."""

    decisions: list[Decision] = field(default_factory=list[Decision])
    ended: set[int] = field(default_factory=set[int])
    """Numbers of requests that leave the engine or the queue. Asked for membership only, never
    iterated.
    """
    committed: dict[int, int] = field(default_factory=dict[int, int])
    """Cached tokens of a request whose chunk is committed in this step."""
    admitted: list[Request] = field(default_factory=list[Request])
    queued: dict[int, int] = field(default_factory=dict[int, int])
    """Requests that are taken in this step, with the limit of their output."""
    chunk_open: bool = False
    batch_is_empty: bool = True


def decide(state: SchedulerState) -> list[Decision]:
    """The decisions that this state calls for, in the order in which they are to be folded. May be
    none.
    """
    draft = Draft(chunk_open=state.chunk is not None)
    if state.endings or state.cancellations or state.failures:
        end_requests(state, draft)
    if state.arrivals:
        judge_arrivals(state, draft)
    if state.chunk is not None:
        commit_chunk(state, draft)
    if state.engine_ready and not state.stopping and (state.waiting or draft.queued):
        admit(state, draft)
    change_batch(state, draft)
    if not draft.chunk_open and state.engine_ready:
        plan_chunk(state, draft)
    return draft.decisions


# Ends


def end_requests(state: SchedulerState, draft: Draft) -> None:
    """A request that has reached its end finishes, even when a cancel came in the same step."""
    for number in state.endings:
        close(draft, number, finish(state.requests[number]))
    for number in state.cancellations:
        if number not in draft.ended:
            close(draft, number, cancel(state.requests[number]))
    for number in state.failures:
        if number not in draft.ended:
            close(draft, number, retry_or_abort(state, state.requests[number]))
    if state.chunk is not None and state.chunk.number in draft.ended:
        draft.chunk_open = False


def close(draft: Draft, number: int, decision: Decision) -> None:
    """Notes that this request leaves the engine and the queue in this step."""
    draft.decisions.append(decision)
    draft.ended.add(number)


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
            )
        case _:
            raise AssertionError(f"{request.request_id} ends for {request.end_reason}")


def cancel(request: Request) -> Decision:
    """The end that was asked for."""
    match request.cancel_reason:
        case "client_gone" | "cancel_requested" as reason:
            return events.RequestCancelled(
                request_id=request.request_id,
                number=request.number,
                reason=reason,
                num_output_tokens=request.num_output_tokens,
                had_row=request.phase in WITH_ROW,
            )
        case _:
            raise AssertionError(f"{request.request_id} is cancelled for {request.cancel_reason}")


def retry_or_abort(state: SchedulerState, request: Request) -> Decision:
    """A failed row costs its request a retry; the last failure, and a death too many, its life."""
    limits = limits_of(state)
    killed = request.deaths > limits.max_deaths
    if not killed and request.retries < limits.max_retries:
        return events.RequestRetried(
            request_id=request.request_id, number=request.number, retry=request.retries + 1
        )
    return events.RequestAborted(
        request_id=request.request_id,
        number=request.number,
        reason="server_deaths" if killed else "engine_failed",
        detail=request.failure or "",
        num_output_tokens=request.num_output_tokens,
        had_row=request.phase in WITH_ROW,
    )


# Arrivals


def judge_arrivals(state: SchedulerState, draft: Draft) -> None:
    """Each arrival is taken or refused in the step that brought it."""
    for number in state.arrivals:
        if number not in draft.ended:
            decision = judge(state, draft, state.requests[number])
            if isinstance(decision, events.RequestQueued):
                draft.queued[number] = decision.max_tokens
            draft.decisions.append(decision)


def judge(state: SchedulerState, draft: Draft, request: Request) -> Decision:
    """What can never fit is refused before what could only not be taken now: the client must not
    retry it.
    """
    num_waiting = len(state.waiting) + len(state.held) + len(draft.queued)
    max_tokens = output_limit(state, request)
    if request.num_prompt_tokens + 1 > state.max_context_tokens:
        return refuse(state, request, "context_length_exceeded", num_waiting)
    if request.num_prompt_tokens + max_tokens > state.max_context_tokens:
        return refuse(state, request, "max_tokens_exceeds_capacity", num_waiting)
    if state.stopping:
        return turn_away(request, "server_stopping", num_waiting)
    if num_waiting >= limits_of(state).max_waiting:
        return turn_away(request, "queue_full", num_waiting)
    return events.RequestQueued(
        request_id=request.request_id, max_tokens=max_tokens, num_waiting=num_waiting
    )


def output_limit(state: SchedulerState, request: Request) -> int:
    """The output that was asked for; when none was, the default, cut to what fits behind the
    prompt.
    """
    if request.asked_max_tokens is not None:
        return request.asked_max_tokens
    room = state.max_context_tokens - request.num_prompt_tokens
    return max(1, min(limits_of(state).default_max_tokens, room))


def refuse(
    state: SchedulerState,
    request: Request,
    reason: Literal["context_length_exceeded", "max_tokens_exceeds_capacity"],
    num_waiting: int,
) -> Decision:
    """The refusal of a request that never fits, with the numbers that say why."""
    prompt_tokens, max_tokens = request.num_prompt_tokens, output_limit(state, request)
    return events.RequestRejected(
        request_id=request.request_id,
        reason=reason,
        numbers=capacity_numbers(model_of(state), limits_of(state), prompt_tokens, max_tokens),
        num_waiting=num_waiting,
    )


def turn_away(
    request: Request, reason: Literal["queue_full", "server_stopping"], num_waiting: int
) -> Decision:
    """The refusal of a request that could be taken at another time."""
    return events.RequestRejected(
        request_id=request.request_id, reason=reason, numbers=None, num_waiting=num_waiting
    )


# Chunks, admission, batch


def commit_chunk(state: SchedulerState, draft: Draft) -> None:
    """A chunk that was fed counts from here on, unless its request has ended meanwhile."""
    chunk = state.chunk
    if chunk is None or not chunk.done or chunk.number in draft.ended:
        return
    num_cached_tokens = chunk.start + chunk.length
    draft.committed[chunk.number] = num_cached_tokens
    draft.chunk_open = False
    draft.decisions.append(
        events.PrefillChunkCommitted(
            request_id=state.requests[chunk.number].request_id,
            num_cached_tokens=num_cached_tokens,
        )
    )


def admit(state: SchedulerState, draft: Draft) -> None:
    """Admits in the order of arrival until one does not fit; nobody overtakes the head of the
    queue.
    """
    limits = limits_of(state)
    max_rows = 1 if state.one_row_only else limits.max_rows
    rows = [state.requests[n] for n in state.admitted if n not in draft.ended]
    if len(rows) >= max_rows or any(row.solo for row in rows):
        return
    num_admitted = len(rows)
    tokens = sum(row.num_prompt_tokens + row.max_tokens for row in rows)
    in_use_bytes = state.reserved_bytes
    for number in chain(state.waiting, draft.queued):
        if number in draft.ended:
            continue
        request = state.requests[number]
        bound = request.num_prompt_tokens + draft.queued.get(number, request.max_tokens)
        need_bytes = row_bytes(model_of(state), bound)
        crowded = num_admitted > 0 and (request.solo or tokens + bound > limits.token_budget)
        if crowded or exceeds(state, in_use_bytes + need_bytes):
            return
        draft.admitted.append(request)
        draft.decisions.append(admission(limits, request, need_bytes, in_use_bytes, num_admitted))
        num_admitted += 1
        tokens += bound
        in_use_bytes += need_bytes
        if num_admitted >= max_rows or request.solo or len(draft.admitted) == MAX_ADMISSIONS:
            return


def exceeds(state: SchedulerState, rows_bytes: int) -> bool:
    """Whether rows of so many bytes are more than the ceiling leaves for them.

    A request that exceeds it on an empty server was refused at its arrival or is held, so the head
    of the queue gets in at some time.
    """
    capacity = rows_capacity_bytes(model_of(state), limits_of(state))
    return capacity is not None and rows_bytes > capacity


def admission(
    limits: Limits, request: Request, need_bytes: int, in_use_bytes: int, num_admitted: int
) -> Decision:
    """The admission with the numbers that led to it. Nothing is cached yet: all known tokens will
    be fed.
    """
    return events.RequestAdmitted(
        request_id=request.request_id,
        number=request.number,
        num_known_tokens=request.num_known_tokens,
        num_cached_tokens=0,
        reserved_bytes=need_bytes,
        in_use_bytes=in_use_bytes,
        ceiling_bytes=limits.ceiling_bytes,
        num_admitted=num_admitted,
        solo=request.solo,
    )


def change_batch(state: SchedulerState, draft: Draft) -> None:
    """Rows that ended leave the batch; requests with nothing left to prefill join it."""
    left = [n for n in state.batch_rows if n in draft.ended] if draft.ended else []
    joined = [n for n in draft.committed if to_prefill(state.requests[n], draft) == 0]
    joined += [r.number for r in draft.admitted if to_prefill(r, draft) == 0]
    numbers = state.batch_rows
    if left or joined:
        numbers = [n for n in state.batch_rows if n not in draft.ended] + sorted(joined)
        draft.decisions.append(
            events.BatchChanged(
                batch=state.batch + 1,
                numbers=tuple(numbers),
                joined=tuple(sorted(joined)),
                left=tuple(left),
            )
        )
    draft.batch_is_empty = not numbers


def to_prefill(request: Request, draft: Draft) -> int:
    """Tokens still to be fed before the request can decode, after this step's commits."""
    cached = draft.committed.get(request.number, request.num_cached_tokens)
    return request.num_known_tokens - 1 - cached


def plan_chunk(state: SchedulerState, draft: Draft) -> None:
    """Plans the next chunk: of the request that has waited longest for one, so that prompts take
    turns.

    Running rows get at least one decode step between two chunks, and a chunk beside them is small.
    """
    if len(state.admitted) == len(state.batch_rows) and not draft.admitted:
        return
    if not draft.batch_is_empty and not state.decoded_since_chunk:
        return
    prefilling = [r for r in prefilling_requests(state, draft) if to_prefill(r, draft) > 0]
    if not prefilling:
        return
    request = min(prefilling, key=lambda r: (r.last_chunk, r.number))
    limits = limits_of(state)
    most = limits.chunk_tokens if draft.batch_is_empty else limits.chunk_tokens_beside_rows
    draft.decisions.append(
        events.PrefillChunkPlanned(
            request_id=request.request_id,
            number=request.number,
            chunk=state.num_chunks + 1,
            start=draft.committed.get(request.number, request.num_cached_tokens),
            length=min(most, to_prefill(request, draft)),
        )
    )


def prefilling_requests(state: SchedulerState, draft: Draft) -> list[Request]:
    """Requests with a row that do not decode yet, those admitted in this step among them."""
    rows = [state.requests[n] for n in state.admitted if n not in draft.ended]
    return [r for r in rows if r.phase is Phase.PREFILLING] + draft.admitted


def limits_of(state: SchedulerState) -> Limits:
    assert state.limits is not None, "server_started comes first"
    return state.limits


def model_of(state: SchedulerState) -> ModelFacts:
    assert state.model is not None, "server_started comes first"
    return state.model
