"""What leaves the disk, and what leaves memory: in which order, and for which reason.

Helpers of `decide`, and as pure: they read the state and return decisions.
"""

import heapq
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Literal

from journal import events
from journal.events import Decision, KvLimits
from scheduler.prefix import STATE_SUFFIX, Block, is_tail, key_of
from scheduler.saving import kv_of
from scheduler.state import SchedulerState

MAX_EVICTED = 32
"""Blocks that one step sends away at most: their files are unlinked by the loop. The next step goes
on.
"""

MAX_BAD = 8
"""Unreadable files that one step sends away at most."""

EvictionReason = Literal["budget", "reserve", "age", "cleared", "never_matched", "bad"]


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


def over_budget(state: SchedulerState, kv: KvLimits) -> tuple[int, EvictionReason]:
    """The bytes that must go, and why. Room for what the writers may hold is made before it is
    needed; where a reserve is kept, on a full disk too, or a save would find it in its way for
    ever. Without one, a disk that others have filled is theirs: nothing of ours goes for it.
    """
    index = state.index
    headroom = min(kv.writing_bytes, kv.max_bytes // 10)
    over = index.disk_bytes + index.writing_bytes + headroom - kv.max_bytes
    short = 0
    if index.free_bytes is not None:
        short = kv.reserve_bytes - index.free_bytes
        short += min(headroom, kv.reserve_bytes) if index.stopped == "disk_full" else 0
    return (short, "reserve") if short > over else (over, "budget")


def evict_old(state: SchedulerState, kv: KvLimits) -> list[Decision]:
    """Blocks that nobody has used for `max_age`, of other domains and of ours."""
    index = state.index
    if not kv.max_age_ns:
        return []
    limit_ns = state.now_ns - kv.max_age_ns
    names: list[str] = []
    for is_ours in (0, 1):
        start = bisect_left(index.order, (is_ours,))
        end = bisect_left(index.order, (is_ours, limit_ns))
        names += [key[3] for key in islice(index.order, start, min(end, start + MAX_EVICTED))]
    return evicted(state, names, "age")


def evict(state: SchedulerState, num_bytes: int, reason: EvictionReason) -> list[Decision]:
    """Blocks in their order of going, until so many bytes are gone; nothing that is in use."""
    names: list[str] = []
    left = num_bytes
    for name, block in islice(in_order(state), MAX_EVICTED):
        if left <= 0:
            break
        names.append(name)
        left -= block.block_bytes + block.state_bytes
    return evicted(state, names, reason)


def evicted(state: SchedulerState, names: Sequence[str], reason: EvictionReason) -> list[Decision]:
    """The decision about these blocks. It names the files of one domain: of the first one's."""
    blocks = state.index.blocks
    if not names:
        return []
    domain = blocks[names[0]].domain
    names = [name for name in names if blocks[name].domain == domain][:MAX_EVICTED]
    return [
        events.BlocksEvicted(
            domain=domain,
            hashes=tuple(names),
            states=tuple(name for name in names if blocks[name].state_bytes),
            freed_bytes=sum(blocks[n].block_bytes + blocks[n].state_bytes for n in names),
            reason=reason,
        )
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
    if kv_of(state) is None:
        return []
    return [bad_file(name, domain) for name, domain in islice(state.index.bad.items(), MAX_BAD)]


def bad_file(name: str, domain: str) -> Decision:
    """The end of one such file."""
    is_state = name.endswith(STATE_SUFFIX)
    return events.BlocksEvicted(
        domain=domain,
        hashes=() if is_state or is_tail(name) else (name,),
        states=(name.removesuffix(STATE_SUFFIX),) if is_state else (),
        tails=(name,) if is_tail(name) else (),
        freed_bytes=0,
        reason="bad",
    )


def send_unwanted(state: SchedulerState) -> list[Decision]:
    """Blocks that nothing can match again, the deepest first, unless somebody uses them."""
    index = state.index
    children: dict[str, int] = {}
    names: list[str] = []
    for name in reversed(index.unwanted):
        block = index.blocks.get(name)
        if block is None or block.leases or block.pins or children.get(name, block.children):
            continue
        names.append(name)
        if len(names) == MAX_EVICTED:
            break
        parent = index.blocks.get(block.parent)
        if parent is not None:
            children[block.parent] = children.get(block.parent, parent.children) - 1
    return evicted(state, names, "never_matched")


def shrink_tier(state: SchedulerState, kv: KvLimits) -> list[Decision]:
    """Memory gives up what was used least recently, down to nine tenths of its bound, or of what is
    left below the low mark.
    """
    index = state.index
    most = kv.memory_bytes
    if state.memory.tier_bytes is not None:
        most = min(most, state.memory.tier_bytes)
    if index.hot_bytes <= most:
        return []
    left = index.hot_bytes - most * 9 // 10
    names: list[str] = []
    freed_bytes = 0
    for name, num_bytes in index.hot.items():
        if freed_bytes >= left or len(names) == MAX_EVICTED:
            break
        names.append(name)
        freed_bytes += num_bytes
    return [events.TierShrunk(hashes=tuple(names), freed_bytes=freed_bytes)]
