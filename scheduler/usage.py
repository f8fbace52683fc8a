"""How much memory is in use: the analytic sum, and what the newest reading makes of it.

The sum counts the weights, each row's caches, rows that are leaving, bytes in the writers' hands,
blocks kept in memory and what the planned chunk needs while it is computed. What is reserved for a
row and not yet allocated comes on top of the sum and of the reading alike.
"""

from journal.events import MemoryLimits
from scheduler.memory import chunk_bytes, row_bytes
from scheduler.request import Request
from scheduler.state import SchedulerState


def memory_of(state: SchedulerState) -> MemoryLimits | None:
    """The limits of memory, or nothing when there is no ceiling."""
    if state.limits is None or state.memory.ceiling_bytes is None:
        return None
    return state.limits.memory


def mark_bytes(state: SchedulerState, permille: int) -> int:
    """This part of the ceiling that holds now."""
    assert state.memory.ceiling_bytes is not None
    return state.memory.ceiling_bytes * permille // 1000


def row_now_bytes(state: SchedulerState, request: Request) -> int:
    """What the request's row takes now. One that is filled from disk has its room at once."""
    assert state.model is not None
    return row_bytes(state.model, max(request.num_cached_tokens, request.room_tokens))


def row_hold_bytes(state: SchedulerState, request: Request) -> int:
    """What the row takes or may take: it can grow beyond what was reserved for it."""
    return max(request.reserved_bytes, row_now_bytes(state, request))


def sums_of_rows(state: SchedulerState) -> tuple[int, int]:
    """What all rows take now, and what they take or may take: one pass, as there may be many."""
    now_bytes = hold_bytes = 0
    for number in state.admitted:
        request = state.requests[number]
        row_now = row_now_bytes(state, request)
        now_bytes += row_now
        hold_bytes += max(request.reserved_bytes, row_now)
    return now_bytes, hold_bytes


def leaving_bytes(state: SchedulerState) -> int:
    """What goes away by itself: rows that are leaving, and the writers' bytes."""
    return sum(state.leaving.values()) + state.index.writing_bytes


def rows_bytes(state: SchedulerState) -> int:
    """What all rows take or may take, those that are leaving among them, and the writers' bytes."""
    return sums_of_rows(state)[1] + leaving_bytes(state)


def unallocated_bytes(state: SchedulerState) -> int:
    """What is reserved for rows and not yet allocated."""
    now_bytes, hold_bytes = sums_of_rows(state)
    return hold_bytes - now_bytes


def fixed_bytes(state: SchedulerState) -> int:
    """The weights, and what the largest chunk needs while it is computed."""
    assert state.model is not None
    assert state.limits is not None
    return state.model.weights_bytes + chunk_bytes(state.model, state.limits)


def transient_bytes(state: SchedulerState) -> int:
    """What the planned chunk needs while it is computed."""
    length = state.chunk.length if state.chunk is not None else 0
    return transient_bytes_per_token(state) * length


def transient_bytes_per_token(state: SchedulerState) -> int:
    """What a chunk needs for each of its tokens while it is computed: as the model's facts have
    it, or as the last chunks have shown. Attention that is not fused needs more in a long row.
    """
    assert state.model is not None
    return max(state.model.transient_bytes_per_token, state.chunk_bytes_per_token)


def usage_bytes(state: SchedulerState) -> int:
    """What the marks are compared with, as of the newest reading."""
    return usage_with(state, state.memory.active_bytes + state.memory.cached_bytes)


def usage_with(state: SchedulerState, read_bytes: int) -> int:
    """The larger of a reading and the sum, with what is reserved and not yet allocated."""
    assert state.model is not None
    now_bytes, hold_bytes = sums_of_rows(state)
    analytic = state.model.weights_bytes + now_bytes + leaving_bytes(state)
    analytic += state.index.hot_bytes + transient_bytes(state)
    return max(read_bytes, analytic) + hold_bytes - now_bytes


def firm_bytes(state: SchedulerState) -> int:
    """Usage less what can be given back at no cost: the allocator's unused buffers and the blocks
    in memory. What admission and resume compare with the low mark; a chunk is counted with them.
    """
    now_bytes, hold_bytes = sums_of_rows(state)
    analytic = fixed_bytes(state) + now_bytes + leaving_bytes(state)
    read = state.memory.active_bytes - state.index.hot_bytes
    return max(read, analytic) + hold_bytes - now_bytes


def lasting_bytes(state: SchedulerState) -> int:
    """What is in use and does not go away by itself: weights, rows as they are and the chunk, or
    the reading less rows that leave, blocks in memory and in the writers' hands. Over this a row
    that is alone may be dropped.
    """
    assert state.model is not None
    now_bytes, _ = sums_of_rows(state)
    analytic = state.model.weights_bytes + now_bytes + transient_bytes(state)
    return max(analytic, kept_bytes(state))


def passing_bytes(state: SchedulerState) -> int:
    """What goes away by itself: rows that leave, blocks in memory and in the writers' hands."""
    return state.index.hot_bytes + leaving_bytes(state)


def kept_bytes(state: SchedulerState) -> int:
    """The reading less what goes away by itself, or was on its way when it was taken."""
    return state.memory.active_bytes - max(state.memory.passing_bytes, passing_bytes(state))
