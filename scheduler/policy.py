"""What to do next: a pure function of the state.

`decide` answers what the facts of a step have brought, in a fixed order: ends first, since they
make room; then arrivals, committed chunks, admissions, the batch, the next chunk, and last what
leaves the disk. Each helper reads the state and a `Draft`, in which the helpers before it noted
what their decisions will change, and none of them changes the state.

Everything is an integer and every tie is broken by the request's number, so the same state gives
the same decisions on every machine.
"""

from journal import events
from journal.events import Decision
from scheduler.admission import admit, judge_arrivals
from scheduler.draft import Draft, limits_of
from scheduler.eviction import send_away, send_bad
from scheduler.request import WITH_ROW, Phase, Request
from scheduler.saving import plan_boundary, plan_saves, up_to_boundary
from scheduler.state import SchedulerState

POLICY_VERSION = 2
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
    if state.arrivals:
        judge_arrivals(state, draft)
    if state.chunk is not None:
        commit_chunk(state, draft)
    if state.engine_ready and not state.stopping and (state.waiting or draft.queued):
        admit(state, draft)
    change_batch(state, draft)
    if not draft.chunk_open and state.engine_ready:
        plan_chunk(state, draft)
    if state.index.bad:
        draft.decisions += send_bad(state)
    if not draft.admitted and not draft.committed:  # else it could be what is leased just now
        draft.decisions += send_away(state)
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
                num_memory_tokens=request.num_memory_tokens,
                num_disk_tokens=request.num_disk_tokens,
                num_prefilled_tokens=request.num_prefilled_tokens,
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
                num_memory_tokens=request.num_memory_tokens,
                num_disk_tokens=request.num_disk_tokens,
                num_prefilled_tokens=request.num_prefilled_tokens,
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


def change_batch(state: SchedulerState, draft: Draft) -> None:
    """Rows that ended leave the batch; requests with nothing left to prefill join it."""
    left = [n for n in state.batch_rows if n in draft.ended] if draft.ended else []
    ready = [r for r in prefilling_requests(state, draft) if to_prefill(r, draft) == 0]
    joined = [r.number for r in ready if not is_restoring(r, draft)]
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


def is_restoring(request: Request, draft: Draft) -> bool:
    """Whether its row is being filled from saved blocks, or will be after this step."""
    return request.restoring or draft.matched.get(request.number, 0) > 0


def plan_chunk(state: SchedulerState, draft: Draft) -> None:
    """Plans the next chunk: of the request that has waited longest for one, so that prompts take
    turns.

    Running rows get at least one decode step between two chunks, and a chunk beside them is small.
    """
    if not draft.batch_is_empty and not state.decoded_since_chunk:
        return
    prefilling = [
        r
        for r in prefilling_requests(state, draft)
        if to_prefill(r, draft) > 0 and not is_restoring(r, draft)
    ]
    if not prefilling:
        return
    request = min(prefilling, key=lambda r: (r.last_chunk, r.number))
    limits = limits_of(state)
    most = limits.chunk_tokens if draft.batch_is_empty else limits.chunk_tokens_beside_rows
    start = draft.committed.get(request.number, request.num_cached_tokens)
    draft.decisions.append(
        events.PrefillChunkPlanned(
            request_id=request.request_id,
            number=request.number,
            chunk=state.num_chunks + 1,
            start=start,
            length=up_to_boundary(state, request, start, min(most, to_prefill(request, draft))),
        )
    )


def prefilling_requests(state: SchedulerState, draft: Draft) -> list[Request]:
    """Requests with a row that do not decode yet, those admitted in this step among them."""
    if len(state.admitted) == len(state.batch_rows):
        return draft.admitted
    rows = [state.requests[n] for n in state.admitted if n not in draft.ended]
    return [r for r in rows if r.phase is Phase.PREFILLING] + draft.admitted
