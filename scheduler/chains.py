"""How events change the index of blocks, and what requests hold of it. Called by `evolve` alone."""

from typing import assert_never

from journal import events
from scheduler import losses, readings
from scheduler.leases import (
    block_tokens_of,
    drop_lone_states,
    grow,
    holds,
    leave_unsaved,
    take_lease,
)
from scheduler.prefix import (
    STATE_SUFFIX,
    Writing,
    add_block,
    add_state,
    block_bytes,
    cool,
    heat,
    remove_block,
    remove_state,
    state_bytes,
)
from scheduler.request import Phase, Request, enter
from scheduler.state import SchedulerState

BlockEvent = (
    events.BlocksNamed
    | events.BlockSaved
    | events.BlockSaveFailed
    | events.SavingStopped
    | events.SavingResumed
    | events.ChainRestored
    | events.BlockCorrupt
    | events.BlocksLost
    | events.StoreMeasured
    | events.ClearRequested
    | events.RequestDeferred
    | events.BlockSavePlanned
    | events.BlocksEvicted
    | events.TierShrunk
)


def dispatch(state: SchedulerState, event: BlockEvent) -> None:  # noqa: C901, PLR0912
    """The part of `evolve`'s dispatch that is about blocks."""
    match event:
        case events.BlocksNamed():
            blocks_named(state, event)
        case events.BlockSaved():
            block_saved(state, event)
        case events.BlockSaveFailed():
            block_save_failed(state, event)
        case events.SavingStopped():
            saving_stopped(state, event)
        case events.SavingResumed():
            saving_resumed(state)
        case events.ChainRestored():
            chain_restored(state, event)
        case events.BlockCorrupt():
            losses.block_corrupt(state, event)
        case events.BlocksLost():
            losses.blocks_lost(state, event)
        case events.StoreMeasured():
            store_measured(state, event)
        case events.ClearRequested():
            clear_requested(state)
        case events.RequestDeferred():
            request_deferred(state, event)
        case events.BlockSavePlanned():
            block_save_planned(state, event)
        case events.BlocksEvicted():
            blocks_evicted(state, event)
        case events.TierShrunk():
            tier_shrunk(state, event)
        case _:
            assert_never(event)


def blocks_named(state: SchedulerState, event: events.BlocksNamed) -> None:
    request = state.find(event.request_id)
    if request is not None and len(request.hashes) == event.first:
        request.hashes.extend(event.hashes)


# Saving


def block_save_planned(state: SchedulerState, event: events.BlockSavePlanned) -> None:
    assert state.model is not None
    assert state.limits is not None
    assert state.limits.kv is not None
    request = state.get(event.request_id)
    index = state.index
    for planned in event.blocks:
        is_block = planned.part == "block"
        num_bytes = (
            block_bytes(state.model, state.limits.kv) if is_block else state_bytes(state.model)
        )
        writing = Writing(
            number=request.number,
            domain=index.domain,
            parent=request.hashes[planned.index - 1] if planned.index else "",
            end_tokens=(planned.index + 1) * state.limits.kv.block_tokens,
            num_bytes=num_bytes,
        )
        (index.writing if is_block else index.writing_states)[planned.hash] = writing
        index.writing_bytes += num_bytes
        if is_block and planned.index in request.unsaved:
            request.unsaved.remove(planned.index)
    if not request.unsaved:
        state.unsaved.pop(request.number, None)


def block_saved(state: SchedulerState, event: events.BlockSaved) -> None:
    """The file is there: whoever computes the same block holds a lease on it now, and memory has
    it too.
    """
    index = state.index
    is_block = event.part == "block"
    writing = (index.writing if is_block else index.writing_states).pop(event.hash, None)
    if writing is None:
        return  # planned by a run that is gone; the sweep at the start has the file
    index.writing_bytes -= writing.num_bytes
    if not is_block:
        add_state(index, event.hash, event.saved_bytes)
        drop_lone_states(state)
        if event.hash in index.blocks:
            warm(state, event.hash + STATE_SUFFIX, event.saved_bytes)
        return
    add_block(index, event.hash, writing, event.saved_bytes, state.now_ns)
    index.coming.pop(event.hash, None)
    warm(state, event.hash, event.saved_bytes)
    owner = state.requests.get(writing.number)
    if owner is not None and owner.number in state.admitted and event.hash in owner.hashes:
        take_lease(state, owner, event.hash)
    for number in list(state.unsaved):
        settle(state, state.requests[number], event.hash)


def settle(state: SchedulerState, request: Request, name: str) -> None:
    """Another request has saved a block that this one was to save."""
    waiting = [i for i in request.unsaved if request.hashes[i] == name]
    for number in waiting:
        request.unsaved.remove(number)
        take_lease(state, request, name)
    if not request.unsaved:
        state.unsaved.pop(request.number, None)


def warm(state: SchedulerState, name: str, num_bytes: int) -> None:
    """Memory keeps what was just saved or read, where there is a tier."""
    kv = state.limits.kv if state.limits is not None else None
    if kv is not None and kv.memory_bytes:
        heat(state.index, name, num_bytes)


def block_save_failed(state: SchedulerState, event: events.BlockSaveFailed) -> None:
    """A block that its row still holds is tried again, unless something stands in its place."""
    index = state.index
    is_block = event.part == "block"
    writing = (index.writing if is_block else index.writing_states).pop(event.hash, None)
    if writing is None:
        return
    index.writing_bytes -= writing.num_bytes
    index.unwanted.pop(event.hash, None)
    if is_block and event.reason not in ("obstructed", "not_taken"):
        owner = state.requests.get(writing.number)
        number = writing.end_tokens // block_tokens_of(state) - 1
        if owner is not None and holds(state, owner, number):
            leave_unsaved(state, owner, number)
    elif is_block and index.coming.get(event.hash) == writing.number:
        del index.coming[event.hash]
    drop_lone_states(state)


def saving_stopped(state: SchedulerState, event: events.SavingStopped) -> None:
    state.index.stopped = event.reason


def saving_resumed(state: SchedulerState) -> None:
    state.index.stopped = None


# Reading


def chain_restored(state: SchedulerState, event: events.ChainRestored) -> None:
    request = state.find(event.request_id)
    if request is None or not request.restoring or request.number not in state.admitted:
        return
    enter(request, "chain_restored")
    request.restoring = False
    request.num_cached_tokens = event.num_tokens
    count_restored(request, event)
    block_tokens = block_tokens_of(state)
    for name in request.hashes[: -(-event.num_tokens // block_tokens)]:
        if name in state.index.blocks:
            warm(state, name, state.index.blocks[name].block_bytes)
    grow(state, request, 0)  # a block may have been lost since the match


def count_restored(request: Request, event: events.ChainRestored) -> None:
    """How much of the prompt came from where. A request that goes on with what it had computed
    itself keeps its numbers, less what is lost.
    """
    prompt = request.num_prompt_tokens
    if request.phase is not Phase.RESUMING or request.saved_tokens < 0:
        request.num_memory_tokens, request.num_disk_tokens = event.of_prompt(prompt)
        return
    most = min(event.num_tokens, prompt)
    request.num_memory_tokens = min(request.num_memory_tokens, most)
    request.num_disk_tokens = min(request.num_disk_tokens, most - request.num_memory_tokens)


# Space


def store_measured(state: SchedulerState, event: events.StoreMeasured) -> None:
    state.index.free_bytes = event.free_bytes


def clear_requested(state: SchedulerState) -> None:
    state.clearing = bool(block_tokens_of(state) and state.index.order)


def blocks_evicted(state: SchedulerState, event: events.BlocksEvicted) -> None:
    """What is unlinked after this commit is no longer there from now on."""
    index = state.index
    for name in event.hashes:
        block = index.blocks.get(name)
        assert block is None or not block.in_use, f"block {name[:8]} is in use and evicted"
        remove_block(index, name, "evicted")
        index.bad.pop(name, None)
    for name in event.states:
        remove_state(index, name)
        index.bad.pop(name + STATE_SUFFIX, None)
    for name in event.tails:
        index.bad.pop(name, None)
    if index.free_bytes is not None:
        index.free_bytes += event.freed_bytes
    if not index.order:
        state.clearing = False


def tier_shrunk(state: SchedulerState, event: events.TierShrunk) -> None:
    for name in event.hashes:
        cool(state.index, name)
    if event.reason == "pressure":
        readings.act(state, "shrink", event.freed_bytes)


def request_deferred(state: SchedulerState, event: events.RequestDeferred) -> None:
    request = state.get(event.request_id)
    enter(request, "request_deferred")
    request.deferred_hash = event.hash
    request.deferred_ns = request.deferred_ns or state.now_ns
    request.deferred_until_ns = event.until_ns
