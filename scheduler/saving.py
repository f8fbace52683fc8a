"""What to do with saved blocks: which to save, which to send away, what a prompt starts from.

Helpers of `decide`, and as pure: they read the state and return decisions.
"""

import heapq
from collections.abc import Iterator
from itertools import islice
from typing import Literal

from journal import events
from journal.events import Decision, KvLimits, Part, PlannedBlock
from scheduler.chains import STATE_SUFFIX
from scheduler.draft import model_of
from scheduler.prefix import (
    Block,
    Match,
    block_bytes,
    key_of,
    match,
    state_bytes,
    state_every_tokens,
)
from scheduler.request import Request
from scheduler.state import SchedulerState

MAX_EVICTED = 128
"""Blocks that one decision sends away at most; the next step goes on."""

MAX_BAD = 16
"""Unreadable files that one step sends away at most."""

MAX_PLANNED = 64
"""Blocks of one request that one decision saves at most."""

NO_MATCH = Match(num_blocks=0, num_tokens=0, num_memory_tokens=0, parted_at="", because="off")
RETRY = Match(num_blocks=0, num_tokens=0, num_memory_tokens=0, parted_at="", because="retry")

EvictionReason = Literal["budget", "reserve", "age", "cleared", "never_matched", "bad"]


def kv_of(state: SchedulerState) -> KvLimits | None:
    """The limits of saved KV, or nothing when none is saved in this run."""
    kv = state.limits.kv if state.limits is not None else None
    return kv if state.index.domain else None


# Saving


def plan_saves(state: SchedulerState) -> list[Decision]:
    """The full blocks that rows hold and disk does not, as far as writers and budget have room."""
    kv = kv_of(state)
    if kv is None or state.index.stopped is not None:
        return []
    decisions: list[Decision] = []
    room = room_bytes(state, kv)
    for number in state.unsaved:
        request = state.requests[number]
        if request.failure is not None:
            continue  # what a failed row holds is not to be believed
        blocks, room = plan_blocks(state, kv, request, request.unsaved, room)
        if blocks:
            decisions.append(planned(request, blocks))
    return decisions


def plan_boundary(
    state: SchedulerState, request: Request, num_before: int, num_cached: int
) -> list[Decision]:
    """What a chunk's commit makes worth saving: the blocks that it filled, and the state at its
    end.

    The state is there now or never: the next chunk changes it. So it may go over the writers'
    bound by its own size.
    """
    kv = kv_of(state)
    if kv is None or state.index.stopped is not None:
        return []
    end = min(num_cached // kv.block_tokens, len(request.hashes))
    full = list(range(num_before // kv.block_tokens, end))
    fresh = [i for i in full if i not in request.unsaved]
    room = room_bytes(state, kv)
    for plan in plan_saves(state):
        assert isinstance(plan, events.BlockSavePlanned)
        room -= len(plan.blocks) * block_bytes(model_of(state), kv)
    blocks, room = plan_blocks(state, kv, request, fresh, room)
    if num_cached == end * kv.block_tokens and is_boundary(state, kv, request, num_cached):
        name = request.hashes[end - 1]
        fits = room > 0 and state_bytes(model_of(state)) <= disk_room_bytes(state, kv)
        if fits and not has_state(state, name):
            blocks.append(plan_of(request, end - 1, "state"))
    return [planned(request, blocks)] if blocks else []


def planned(request: Request, blocks: list[PlannedBlock]) -> Decision:
    """The decision to save these."""
    return events.BlockSavePlanned(
        request_id=request.request_id, number=request.number, blocks=tuple(blocks)
    )


def plan_of(request: Request, number: int, part: Part) -> PlannedBlock:
    """One file of a block, with the block before it."""
    parent = request.hashes[number - 1] if number else ""
    return PlannedBlock(index=number, hash=request.hashes[number], part=part, parent=parent)


def plan_blocks(
    state: SchedulerState, kv: KvLimits, request: Request, numbers: list[int], room: int
) -> tuple[list[PlannedBlock], int]:
    """Those of the request's blocks that are neither on disk nor on the way, while there is room;
    and the room left.
    """
    index = state.index
    each = block_bytes(model_of(state), kv)
    blocks: list[PlannedBlock] = []
    for number in numbers:
        name = request.hashes[number]
        if any(name in there for there in (index.writing, index.blocks, index.bad)):
            continue
        if room < each or len(blocks) == MAX_PLANNED:
            break
        room -= each
        blocks.append(plan_of(request, number, "block"))
    return blocks, room


def room_bytes(state: SchedulerState, kv: KvLimits) -> int:
    """What may still be given to the writers: their own bound, and the budget on disk."""
    return min(kv.writing_bytes - state.index.writing_bytes, disk_room_bytes(state, kv))


def disk_room_bytes(state: SchedulerState, kv: KvLimits) -> int:
    """What the budget on disk has left."""
    return kv.max_bytes - state.index.disk_bytes - state.index.writing_bytes


def has_state(state: SchedulerState, name: str) -> bool:
    """Whether the state at the block's end is on disk or on the way."""
    block = state.index.blocks.get(name)
    return name in state.index.writing_states or (block is not None and block.state_bytes > 0)


# Boundaries


def is_boundary(state: SchedulerState, kv: KvLimits, request: Request, position: int) -> bool:
    """Whether the state at this position is worth keeping."""
    if state_bytes(model_of(state)) == 0 or position == 0:
        return False
    every = state_every_tokens(model_of(state), kv)
    return position % every == 0 or position == suffix_boundary(kv, request)


def suffix_boundary(kv: KvLimits, request: Request) -> int:
    """The last block boundary before the prompt's generation suffix: there the next turn parts
    from this one.
    """
    end = min(request.num_prompt_tokens - request.num_suffix_tokens, request.num_prompt_tokens - 1)
    return max(0, end) // kv.block_tokens * kv.block_tokens


def up_to_boundary(state: SchedulerState, request: Request, start: int, length: int) -> int:
    """The chunk's length, cut at the next boundary where the state is to be kept."""
    kv = kv_of(state)
    if kv is None or state_bytes(model_of(state)) == 0:
        return length
    every = state_every_tokens(model_of(state), kv)
    stops = [(start // every + 1) * every, suffix_boundary(kv, request)]
    return min([length, *(stop - start for stop in stops if stop > start)])


# What a prompt starts from


def find_prefix(state: SchedulerState, request: Request) -> Match:
    """The longest saved prefix of the request's known tokens."""
    kv = kv_of(state)
    if kv is None:
        return NO_MATCH
    if request.retries:
        return RETRY  # its row failed, maybe by what it had restored
    stateful = state_bytes(model_of(state)) > 0
    return match(state.index, request.hashes, request.num_known_tokens, kv.block_tokens, stateful)


def awaited(state: SchedulerState, request: Request, found: Match) -> int:
    """The number of the request that is computing the next block of this one; 0 when waiting for
    it is no use.
    """
    index = state.index
    if index.stopped is not None or found.because != "being_computed":
        return 0
    writing = index.writing.get(found.parted_at)
    number = writing.number if writing is not None else index.coming.get(found.parted_at, 0)
    return 0 if number == request.number else number


# Going


def send_away(state: SchedulerState) -> list[Decision]:
    """What leaves the disk, one reason at a time, and what leaves memory."""
    kv = kv_of(state)
    if kv is None:
        return []
    return [*leave_disk(state, kv), *shrink_tier(state, kv)]


def leave_disk(state: SchedulerState, kv: KvLimits) -> list[Decision]:
    """What must go first: what cannot be used, what was cleared, what is over the budget, what is
    old.
    """
    index = state.index
    if index.unwanted and (unwanted := send_unwanted(state)):
        return unwanted
    if not index.order:
        return []
    if state.clearing:
        return evict(state, index.disk_bytes, "cleared")
    num_bytes, reason = over_budget(state, kv)
    if num_bytes > 0:
        return evict(state, num_bytes, reason)
    return evict_old(state, kv)


def deadline_ns(state: SchedulerState) -> int | None:
    """When time itself must act: now, while a bounded decision left blocks that must go, or when a
    wait ends.
    """
    kv = kv_of(state)
    if kv is None:
        return None
    if state.index.bad or leave_disk(state, kv):
        return state.now_ns
    waits = [state.requests[n].deferred_until_ns for n in state.waiting]
    return min((until for until in waits if until > state.now_ns), default=None)


def over_budget(state: SchedulerState, kv: KvLimits) -> tuple[int, EvictionReason]:
    """The bytes that must go, and why. Room for what the writers may hold is made before it is
    needed.
    """
    index = state.index
    short = 0 if index.free_bytes is None else kv.reserve_bytes - index.free_bytes
    headroom = min(kv.writing_bytes, kv.max_bytes // 10)
    over = index.disk_bytes + index.writing_bytes + headroom - kv.max_bytes
    return (short, "reserve") if short > over else (over, "budget")


def evict_old(state: SchedulerState, kv: KvLimits) -> list[Decision]:
    """Blocks that nobody has used for `max_age`."""
    oldest = state.index.order[0]
    if not kv.max_age_ns or oldest[1] >= state.now_ns - kv.max_age_ns:
        return []
    return evict(state, 1, "age")


def evict(state: SchedulerState, num_bytes: int, reason: EvictionReason) -> list[Decision]:
    """Blocks in their order of going, until so many bytes are gone; nothing that is in use."""
    by_domain: dict[str, list[str]] = {}
    freed: dict[str, int] = {}
    left = num_bytes
    for count, (name, block) in enumerate(in_order(state)):
        if left <= 0 or count == MAX_EVICTED:
            break
        by_domain.setdefault(block.domain, []).append(name)
        size = block.block_bytes + block.state_bytes
        freed[block.domain] = freed.get(block.domain, 0) + size
        left -= size
    return [
        events.BlocksEvicted(
            domain=domain,
            hashes=tuple(names),
            states=tuple(n for n in names if state.index.blocks[n].state_bytes),
            freed_bytes=freed[domain],
            reason=reason,
        )
        for domain, names in by_domain.items()
    ]


def in_order(state: SchedulerState) -> Iterator[tuple[str, Block]]:
    """Blocks as they would go, one by one: a parent may go when its last child has gone."""
    index = state.index
    order = iter(index.order)
    freed: list[tuple[int, int, int, str]] = []
    children: dict[str, int] = {}
    following = next(order, None)
    while following is not None or freed:
        if following is None or (freed and freed[0] < following):
            key = heapq.heappop(freed)
        else:
            key, following = following, next(order, None)
        name = key[3]
        block = index.blocks[name]
        yield name, block
        parent = index.blocks.get(block.parent)
        if parent is None:
            continue
        children[block.parent] = children.get(block.parent, parent.children) - 1
        if children[block.parent] == 0 and not parent.leases and not parent.pins:
            heapq.heappush(freed, key_of(index, block.parent, parent))


def send_bad(state: SchedulerState) -> list[Decision]:
    """Files that cannot be read."""
    return [
        events.BlocksEvicted(
            domain=domain,
            hashes=() if name.endswith(STATE_SUFFIX) else (name,),
            states=(name.removesuffix(STATE_SUFFIX),) if name.endswith(STATE_SUFFIX) else (),
            freed_bytes=0,
            reason="bad",
        )
        for name, domain in islice(state.index.bad.items(), MAX_BAD)
    ]


def send_unwanted(state: SchedulerState) -> list[Decision]:
    """Blocks that nothing can match again, the deepest first, unless somebody uses them."""
    index = state.index
    children: dict[str, int] = {}
    names: list[str] = []
    for name in islice(reversed(index.unwanted), MAX_EVICTED):
        block = index.blocks.get(name)
        if block is None or block.leases or block.pins or children.get(name, block.children):
            continue
        names.append(name)
        parent = index.blocks.get(block.parent)
        if parent is not None:
            children[block.parent] = children.get(block.parent, parent.children) - 1
    if not names:
        return []
    blocks = [index.blocks[name] for name in names]
    return [
        events.BlocksEvicted(
            domain=index.domain,
            hashes=tuple(names),
            states=tuple(n for n in names if index.blocks[n].state_bytes),
            freed_bytes=sum(b.block_bytes + b.state_bytes for b in blocks),
            reason="never_matched",
        )
    ]


def shrink_tier(state: SchedulerState, kv: KvLimits) -> list[Decision]:
    """Memory gives up what was used least recently, down to nine tenths of its bound."""
    index = state.index
    if index.hot_bytes <= kv.memory_bytes:
        return []
    left = index.hot_bytes - kv.memory_bytes * 9 // 10
    names: list[str] = []
    freed_bytes = 0
    for name, num_bytes in index.hot.items():
        if freed_bytes >= left or len(names) == MAX_EVICTED:
            break
        names.append(name)
        freed_bytes += num_bytes
    return [events.TierShrunk(hashes=tuple(names), freed_bytes=freed_bytes)]
