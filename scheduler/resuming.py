"""Who gets a row when there is room: what fits, held requests that go on, and what newcomers may
take beside them.

Helpers of `decide`, and as pure.
"""

from dataclasses import dataclass

from journal import events
from scheduler.draft import Draft, Staying, limits_of, model_of
from scheduler.leaving import NO_CLIENT
from scheduler.memory import row_bytes, rows_capacity_bytes
from scheduler.pausing import unpinned
from scheduler.prefix import Match, match, state_bytes
from scheduler.request import Phase, Request, order_of
from scheduler.saving import kv_of
from scheduler.state import SchedulerState
from scheduler.usage import (
    firm_bytes,
    fixed_bytes,
    kept_bytes,
    mark_bytes,
    memory_of,
    rows_bytes,
)

MAX_RESUMED = 2
"""Held requests that begin to go on in one step at most."""


# What fits


def reserve_bytes(
    state: SchedulerState, request: Request, max_tokens: int, num_cached_tokens: int
) -> int:
    """What is held for a row when it begins with so many tokens: `MemoryLimits.reserve` says how
    far ahead. A row that is filled from disk takes room for all its known tokens at once, and one
    that was held needs at least what it had: else it would be held again at the same place.
    """
    limits = limits_of(state)
    bound = request.num_prompt_tokens + max_tokens
    known = request.num_known_tokens
    if limits.memory is None or limits.memory.reserve == "bound":
        return row_bytes(model_of(state), bound)
    if limits.memory.reserve == "expected":
        return row_bytes(model_of(state), min(bound, known + limits.memory.growth_tokens))
    first = min(bound, num_cached_tokens + limits.chunk_tokens)
    had = known if num_cached_tokens else request.resuming_tokens
    return row_bytes(model_of(state), max(first, had))


def fits(state: SchedulerState, draft: Draft, need_bytes: int) -> bool:
    """Whether a row of so many bytes has room now, beside those that this step has let in."""
    room = room_bytes(state, draft)
    return room is None or (need_bytes <= room and not waits_for_relief(state, draft))


def room_bytes(state: SchedulerState, draft: Draft) -> int | None:
    """What one more row may take: up to the low mark, or, when nothing else is in the engine, up to
    the ceiling. Below zero: usage is over it. Null: there is no ceiling.
    """
    limits = memory_of(state)
    if limits is None:
        capacity = rows_capacity_bytes(model_of(state), limits_of(state))
        in_use = state.reserved_bytes + state.index.writing_bytes + draft.added_bytes
        return None if capacity is None else capacity - in_use
    if is_empty(state, draft):
        assert state.memory.ceiling_bytes is not None
        in_use = fixed_bytes(state) + rows_bytes(state) + draft.added_bytes
        return state.memory.ceiling_bytes - in_use
    if draft.firm_bytes is None:
        draft.firm_bytes = firm_bytes(state)
    in_use = draft.firm_bytes + draft.added_bytes
    return mark_bytes(state, limits.low_permille) - in_use


def is_empty(state: SchedulerState, draft: Draft) -> bool:
    """Whether nothing is in the engine. A row that ends in this step is still there."""
    return not (state.admitted or draft.num_added or state.leaving)


def waits_for_relief(state: SchedulerState, draft: Draft) -> bool:
    """Whether nobody gets a row until memory is below its marks again: while others have one."""
    return memory_of(state) is not None and is_short(state) and not is_empty(state, draft)


def is_short(state: SchedulerState) -> bool:
    """Whether usage is over a mark, or something is being done about it."""
    return bool(state.memory.level or state.reliefs)


def staying(state: SchedulerState, draft: Draft) -> Staying:
    """The rows that are there after this step. Who ends is known before anybody asks for room."""
    if draft.staying is None:
        rows = [state.requests[number] for number in state.admitted if number not in draft.ended]
        num_tokens = sum(row.num_prompt_tokens + row.max_tokens for row in rows)
        draft.staying = Staying(len(rows), num_tokens, any(row.solo for row in rows))
    return draft.staying


def num_rows(state: SchedulerState, draft: Draft) -> int:
    """Rows that are in the engine after this step so far."""
    return staying(state, draft).num_rows + draft.num_added


def is_crowded(state: SchedulerState, draft: Draft, request: Request, bound: int) -> bool:
    """Whether the rows that are there leave no place for this one, whatever the memory."""
    if num_rows(state, draft) == 0:
        return False
    limits, there = limits_of(state), staying(state, draft)
    tokens = there.num_tokens + draft.added_tokens
    max_rows = 1 if state.one_row_only else limits.max_rows
    is_solo = request.solo or draft.has_solo or there.has_solo
    is_full = num_rows(state, draft) >= max_rows
    return is_solo or is_full or tokens + bound > limits.token_budget


# Held requests that go on


def head_of_paused(state: SchedulerState, draft: Draft) -> Request | None:
    """The held request that goes on next: in the order of their first admission, those left out
    for which room is not all that they wait for.
    """
    for number in state.paused:
        request = state.requests[number]
        gone = number in draft.ended or number in draft.resumed
        if not gone and not stays_held(draft, request):
            return request
    return None


def stays_held(draft: Draft, request: Request) -> bool:
    """Whether it does not go on though there is room. Who is adopted in this step has a client."""
    if request.number in draft.adopted:
        return request.hold or request.held_reason not in (None, NO_CLIENT)
    return request.stays_held


def is_behind_waiting(state: SchedulerState, draft: Draft, request: Request) -> bool:
    """Whether somebody in the queue had a row before this held request had one: after a death of
    the process those that were running wait, and come first.
    """
    for number in state.waiting:
        other = state.requests[number]
        if other.first_admitted_seq == 0:
            return False
        if number not in draft.ended and order_of(other) < order_of(request):
            return True
    return False


def resume(state: SchedulerState, draft: Draft) -> None:
    """Rows that have been filled go on; then those get one whose turn it is and for whom there is
    room.
    """
    for number in state.admitted:
        request = state.requests[number]
        if request.phase is Phase.RESUMING and not request.restoring and number not in draft.ended:
            go_on(draft, request, request.num_cached_tokens)
    if not state.engine_ready or state.stopping:
        return
    for number in state.paused:
        request = state.requests[number]
        if number in draft.ended or stays_held(draft, request):
            continue
        if draft.num_resumed == MAX_RESUMED or is_behind_waiting(state, draft, request):
            return
        if not begin(state, draft, request):
            return


def is_still_short(state: SchedulerState, request: Request, need_bytes: int) -> bool:
    """Whether a request that was dropped though it was alone would meet the same emergency again:
    what is in use without it, by the newest reading, leaves too little.
    """
    if not request.dropped_alone or state.memory.ceiling_bytes is None:
        return False
    return kept_bytes(state) + need_bytes > state.memory.ceiling_bytes


def go_on(draft: Draft, request: Request, num_cached_tokens: int) -> None:
    """The row is what the request was; what of it is lost is fed again. Nothing stays pinned."""
    draft.decisions.append(
        events.RequestResumed(
            request_id=request.request_id,
            number=request.number,
            num_cached_tokens=num_cached_tokens,
            num_lost_tokens=max(0, request.resuming_tokens - num_cached_tokens),
        )
    )
    draft.decisions += unpinned(request, "resumed")
    draft.admitted.append(request)


@dataclass(frozen=True, slots=True)
class Start:
    """What a held request goes on from."""

    num_blocks: int
    num_tokens: int
    num_memory_tokens: int
    has_tail: bool
    because: str


def start_of(state: SchedulerState, request: Request) -> Start:
    """Its own chain while that is whole, else the longest prefix that is on disk."""
    names = request.hashes[: request.chain_blocks]
    index = state.index
    stateful = state_bytes(model_of(state)) > 0
    needs_tail = stateful or request.saved_tokens > request.tail_start
    has_tail = request.tail_bytes > 0
    kv = kv_of(state)
    if kv is None or request.saved_tokens == 0:
        return Start(0, 0, 0, has_tail=False, because="off" if kv is None else "whole")
    is_whole = request.saved_tokens > 0 and all(name in index.blocks for name in names)
    if is_whole and (has_tail or not needs_tail):
        hot = sum(name in index.hot for name in names) * kv.block_tokens
        return Start(len(names), request.saved_tokens, hot, has_tail, "whole")
    found: Match = match(index, request.hashes, request.num_known_tokens, kv.block_tokens, stateful)
    return Start(found.num_blocks, found.num_tokens, found.num_memory_tokens, False, found.because)


def begin(state: SchedulerState, draft: Draft, request: Request) -> bool:
    """The held request gets a row, if there is room; its bytes are reserved from here on."""
    number = request.number
    bound = request.num_prompt_tokens + request.max_tokens
    if number in state.leaving or is_crowded(state, draft, request, bound):
        return False
    start = start_of(state, request)
    need_bytes = reserve_bytes(state, request, request.max_tokens, start.num_tokens)
    if not fits(state, draft, need_bytes) or is_still_short(state, request, need_bytes):
        return False
    num_others = num_rows(state, draft)
    draft.decisions.append(
        events.ResumeStarted(
            request_id=request.request_id,
            number=number,
            num_known_tokens=request.num_known_tokens,
            num_cached_tokens=start.num_tokens,
            reserved_bytes=need_bytes,
            in_use_bytes=rows_bytes(state) + draft.added_bytes,
            ceiling_bytes=state.memory.ceiling_bytes,
            num_admitted=num_others,
            solo=request.solo or num_others == 0,
            num_blocks=start.num_blocks,
            has_tail=start.has_tail,
            num_memory_tokens=start.num_memory_tokens,
            num_disk_tokens=start.num_tokens - start.num_memory_tokens,
            parted_because=start.because,
            held_ns=state.now_ns - request.paused_ns,
        )
    )
    draft.num_resumed += 1
    draft.resumed.add(number)
    draft.num_added += 1
    draft.added_bytes += need_bytes
    draft.added_tokens += bound
    draft.has_solo |= request.solo
    if start.num_tokens == 0:
        go_on(draft, request, 0)
    return True


# Waiting for other programs


def waits_for_others(state: SchedulerState) -> int | None:
    """The number of the request that would be next, while nothing is in the engine and something
    else has the memory: the ceiling, which follows what other programs leave, is too low for it, or
    it was dropped though it was alone.
    """
    limits = memory_of(state)
    if limits is None or state.admitted or state.leaving:
        return None
    if not state.engine_ready or state.stopping:
        return None
    for number in state.paused:
        request = state.requests[number]
        if not request.stays_held:
            return number if limits.is_auto or request.dropped_alone else None
    return state.waiting[0] if limits.is_auto and state.waiting else None


def waited_until_ns(state: SchedulerState, request: Request) -> int:
    """Until when it may wait: some time after anything went on last."""
    limits = memory_of(state)
    assert limits is not None
    since_ns = max(state.progress_ns, request.received_ns, request.paused_ns)
    return since_ns + limits.wait_limit_ns
