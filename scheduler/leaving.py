"""What it means for a request to leave the engine. Called by `evolve` and its helpers alone."""

from bisect import insort

from scheduler import leases
from scheduler.request import Request
from scheduler.state import SchedulerState
from scheduler.usage import row_hold_bytes

NO_CLIENT = "no_client"
"""Why a request without a row is put aside: nobody would read what it puts out."""


def end_wanted(state: SchedulerState, request_id: str, reason: str) -> None:
    """Somebody wants the request to end. Who came first counts."""
    request = state.find(request_id)
    if request is not None and request.cancel_reason is None:
        request.cancel_reason = reason
        state.cancellations.append(request.number)


def leave_engine(state: SchedulerState, request: Request) -> None:
    """Takes the request out of the engine's lists. Its bytes stay reserved until `kv_freed`."""
    number = request.number
    held_bytes = row_hold_bytes(state, request)
    leases.release_chain(state, request)
    state.admitted.remove(number)
    state.leaving[number] = state.leaving.get(number, 0) + held_bytes
    state.reserved_bytes += held_bytes - request.reserved_bytes
    state.reserved_tokens -= request.num_prompt_tokens + request.max_tokens
    if state.chunk is not None and state.chunk.number == number:
        state.chunk = None
    forget_marks(state, number)


def forget_marks(state: SchedulerState, number: int) -> None:
    """A decision has answered what the facts brought for this request."""
    for marks in (
        state.endings,
        state.cancellations,
        state.failures,
        state.holds,
        state.orphans,
        state.pausing,
    ):
        if number in marks:
            marks.remove(number)


def back_to_waiting(state: SchedulerState, request: Request) -> None:
    """The row is gone, the tokens stay: the request takes its old place in the queue."""
    forget_row(request)
    forget_pause(request)
    request.num_memory_tokens = 0
    request.num_disk_tokens = 0
    request.saved_tokens = -1
    request.resumed_tokens = None
    put_in_line(state, request)


def put_in_line(state: SchedulerState, request: Request) -> None:
    """The request takes its place in the queue, or beside it while it has no client."""
    if request.needs_client:
        request.held_reason = NO_CLIENT
        insort(state.held, request.number)
    else:
        insort(state.waiting, request.number)


def forget_row(request: Request) -> None:
    """What the engine had of the request is gone."""
    request.num_cached_tokens = 0
    request.room_tokens = 0
    request.fed = None
    request.reserved_bytes = 0
    request.admitted_ns = 0
    request.joined_batch = 0
    request.failure = None
    request.end_reason = None


def forget_pause(request: Request) -> None:
    """It is on its way to no pause any more."""
    request.pause_reason = None
    request.tail_planned = False
    request.save_failure = None
