"""Which blocks of rows to save, and where the state of layers that cannot be cut is kept.

Helpers of `decide`, and as pure: they read the state and what is decided so far.
"""

from collections.abc import Iterable

from journal import events
from journal.events import KvLimits, Part, PlannedBlock
from scheduler.draft import Draft, model_of
from scheduler.prefix import STATE_SUFFIX, block_bytes, state_bytes, state_every_tokens
from scheduler.request import Request
from scheduler.state import SchedulerState

MAX_PLANNED = 64
"""Blocks of one request that one decision saves at most."""

MAX_SAVERS = 8
"""Requests of whose unsaved blocks one step saves some at most."""


def kv_of(state: SchedulerState) -> KvLimits | None:
    """The limits of saved KV, or nothing when none is saved in this run."""
    kv = state.limits.kv if state.limits is not None else None
    return kv if state.index.domain else None


def plan_saves(state: SchedulerState, draft: Draft) -> None:
    """The full blocks that rows hold and disk does not, as far as writers and budget have room."""
    kv = kv_of(state)
    if kv is None or state.index.stopped is not None:
        return
    num_savers = 0
    for number in sorted(state.unsaved, key=lambda number: number not in state.pausing):
        request = state.requests[number]
        if request.failure is not None:
            continue  # what a failed row holds is not to be believed
        blocks = plan_blocks(state, draft, kv, request, request.unsaved)
        if blocks:
            draft.decisions.append(save(request, blocks))
            num_savers += 1
        if num_savers == MAX_SAVERS:
            return


def plan_boundary(
    state: SchedulerState, draft: Draft, request: Request, num_before: int, num_cached: int
) -> None:
    """What a chunk's commit makes worth saving: the blocks that it filled, and the state at its
    end.
    """
    kv = kv_of(state)
    if kv is None or state.index.stopped is not None:
        return
    end = min(num_cached // kv.block_tokens, len(request.hashes))
    full = range(num_before // kv.block_tokens, end)
    blocks = plan_blocks(state, draft, kv, request, full)
    at_boundary = num_cached == end * kv.block_tokens
    if at_boundary and is_boundary(state, kv, request, num_cached):
        blocks += plan_state(state, draft, kv, request, end - 1)
    if blocks:
        draft.decisions.append(save(request, blocks))


def save(request: Request, blocks: list[PlannedBlock]) -> events.BlockSavePlanned:
    """The decision to save these."""
    return events.BlockSavePlanned(
        request_id=request.request_id, number=request.number, blocks=tuple(blocks)
    )


def plan_of(request: Request, number: int, part: Part) -> PlannedBlock:
    """One file of a block, with the block before it."""
    parent = request.hashes[number - 1] if number else ""
    return PlannedBlock(index=number, hash=request.hashes[number], part=part, parent=parent)


def plan_blocks(
    state: SchedulerState, draft: Draft, kv: KvLimits, request: Request, numbers: Iterable[int]
) -> list[PlannedBlock]:
    """Those of the request's blocks that are neither on disk nor on the way, while there is room.

    Two rows that compute the same block save it once.
    """
    index = state.index
    each = block_bytes(model_of(state), kv)
    room = min(writers_room_bytes(state, draft, kv), disk_room_bytes(state, draft, kv))
    blocks: list[PlannedBlock] = []
    for number in numbers:
        name = request.hashes[number]
        there = (index.writing, index.blocks, index.bad, draft.saving)
        if any(name in names for names in there):
            continue
        if room < each or len(blocks) == MAX_PLANNED:
            break
        room -= each
        draft.saving_bytes += each
        draft.saving.add(name)
        blocks.append(plan_of(request, number, "block"))
    return blocks


def plan_state(
    state: SchedulerState, draft: Draft, kv: KvLimits, request: Request, number: int
) -> list[PlannedBlock]:
    """The state at this block's end, unless it is kept or is on the way.

    It is there now or never: the next chunk changes it. So it may go over the writers' bound by
    its own size.
    """
    name = request.hashes[number]
    index = state.index
    block = index.blocks.get(name)
    kept = name in index.early_states or (block is not None and block.state_bytes > 0)
    if kept or name in index.writing_states or name + STATE_SUFFIX in index.bad:
        return []
    num_bytes = state_bytes(model_of(state))
    has_room = writers_room_bytes(state, draft, kv) >= 0 and num_bytes <= kv.writing_bytes
    if not has_room or num_bytes > disk_room_bytes(state, draft, kv):
        return []
    draft.saving_bytes += num_bytes
    return [plan_of(request, number, "state")]


def writers_room_bytes(state: SchedulerState, draft: Draft, kv: KvLimits) -> int:
    """What may still be given to the writers. Negative when a state went over their bound."""
    return kv.writing_bytes - state.index.writing_bytes - draft.saving_bytes


def disk_room_bytes(state: SchedulerState, draft: Draft, kv: KvLimits) -> int:
    """What the budget on disk has left."""
    index = state.index
    return kv.max_bytes - index.disk_bytes - index.writing_bytes - draft.saving_bytes


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
