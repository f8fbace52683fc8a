"""How events change the index of blocks, and what requests hold of it. Called by `evolve` alone."""

from typing import assert_never

from journal import events
from scheduler.prefix import (
    Writing,
    add_block,
    add_state,
    block_bytes,
    change,
    cool,
    heat,
    remove_block,
    remove_state,
    state_bytes,
    use,
)
from scheduler.request import Request, enter
from scheduler.state import SchedulerState

STATE_SUFFIX = ".state"
"""Behind a block's hash: the name of the state at its end, where blocks and states share a table.
"""


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
            block_corrupt(state, event)
        case events.BlocksLost():
            blocks_lost(state, event)
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


def block_tokens_of(state: SchedulerState) -> int:
    """Tokens in a block, or 0 when nothing is saved in this run."""
    kv = state.limits.kv if state.limits is not None else None
    return 0 if kv is None else kv.block_tokens


# What requests hold


def blocks_named(state: SchedulerState, event: events.BlocksNamed) -> None:
    request = state.find(event.request_id)
    if request is not None and len(request.hashes) == event.first:
        request.hashes.extend(event.hashes)


def take_lease(state: SchedulerState, request: Request, name: str) -> None:
    """The block stays on disk as long as the request is in the engine."""
    use(state.index, name, state.now_ns)
    if name not in request.leases:
        request.leases[name] = None
        change(state.index, name, leases=1)
        state.index.unwanted.pop(name, None)


def release_chain(state: SchedulerState, request: Request) -> None:
    """The request is no longer in the engine: its blocks may go, and nobody waits for what it
    would have computed.
    """
    index = state.index
    for name in request.leases:
        use(index, name, state.now_ns)
        change(index, name, leases=-1)
    for name in request.hashes:
        if index.coming.get(name) == request.number:
            del index.coming[name]
    if not request.keep_output:
        disown_output(state, request)
    request.leases = {}
    request.unsaved = []
    request.restoring = False
    state.unsaved.pop(request.number, None)


def disown_output(state: SchedulerState, request: Request) -> None:
    """What holds output that no prompt can repeat goes once it is saved, or now."""
    block_tokens = block_tokens_of(state)
    for number, name in enumerate(request.hashes):
        is_output = (number + 1) * block_tokens > request.num_prompt_tokens
        if is_output and (name in state.index.blocks or name in state.index.writing):
            state.index.unwanted[name] = state.index.domain


def join_chain(state: SchedulerState, request: Request, num_blocks: int) -> None:
    """At admission: a lease on each block that was found, and word of those to be computed."""
    for name in request.hashes[:num_blocks]:
        take_lease(state, request, name)
    for name in request.hashes[num_blocks:]:
        state.index.coming.setdefault(name, request.number)


def grow(state: SchedulerState, request: Request, num_before: int) -> None:
    """The row holds more tokens than before: each block that became full is leased, or is to be
    saved.
    """
    block_tokens = block_tokens_of(state)
    if not block_tokens:
        return
    end = min(request.num_cached_tokens // block_tokens, len(request.hashes))
    for number in range(num_before // block_tokens, end):
        name = request.hashes[number]
        if name in state.index.blocks:
            take_lease(state, request, name)
        elif number not in request.unsaved:
            request.unsaved.append(number)
            state.unsaved[request.number] = None


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
    """A block that its row still holds is tried again, unless a folder stands in its place."""
    index = state.index
    is_block = event.part == "block"
    writing = (index.writing if is_block else index.writing_states).pop(event.hash, None)
    if writing is None:
        return
    index.writing_bytes -= writing.num_bytes
    index.unwanted.pop(event.hash, None)
    owner = state.requests.get(writing.number)
    if not is_block or event.reason in ("obstructed", "not_taken"):
        return
    if owner is not None and owner.number in state.admitted and event.hash in owner.hashes:
        owner.unsaved.append(owner.hashes.index(event.hash))
        state.unsaved[owner.number] = None


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
    prompt = request.num_prompt_tokens
    request.num_memory_tokens, request.num_disk_tokens = event.of_prompt(prompt)
    block_tokens = block_tokens_of(state)
    for name in request.hashes[: -(-event.num_tokens // block_tokens)]:
        if name in state.index.blocks:
            warm(state, name, state.index.blocks[name].block_bytes)
    grow(state, request, event.num_tokens)


def block_corrupt(state: SchedulerState, event: events.BlockCorrupt) -> None:
    if event.part == "state":
        forget_state(state, event.hash)
        state.index.bad[event.hash + STATE_SUFFIX] = state.index.domain
    else:
        forget_block(state, event.hash, event.reason)
        state.index.bad[event.hash] = state.index.domain


def blocks_lost(state: SchedulerState, event: events.BlocksLost) -> None:
    for name in event.hashes:
        forget_block(state, name, event.reason)
    for name in event.states:
        forget_state(state, name)


def forget_block(state: SchedulerState, name: str, reason: str) -> None:
    """The block is gone, whoever holds it. A row that has its tokens may save it again."""
    remove_block(state.index, name, reason)
    cool(state.index, name + STATE_SUFFIX)
    for number in state.admitted:
        state.requests[number].leases.pop(name, None)


def forget_state(state: SchedulerState, name: str) -> None:
    remove_state(state.index, name)
    cool(state.index, name + STATE_SUFFIX)


# Space


def store_measured(state: SchedulerState, event: events.StoreMeasured) -> None:
    state.index.free_bytes = event.free_bytes


def clear_requested(state: SchedulerState) -> None:
    state.clearing = bool(state.index.order)


def blocks_evicted(state: SchedulerState, event: events.BlocksEvicted) -> None:
    """What is unlinked after this commit is no longer there from now on."""
    index = state.index
    for name in event.hashes:
        remove_block(index, name, "evicted")
        cool(index, name + STATE_SUFFIX)
        index.unwanted.pop(name, None)
        index.bad.pop(name, None)
    for name in event.states:
        forget_state(state, name)
        index.bad.pop(name + STATE_SUFFIX, None)
    if index.free_bytes is not None:
        index.free_bytes += event.freed_bytes
    if not index.order:
        state.clearing = False


def tier_shrunk(state: SchedulerState, event: events.TierShrunk) -> None:
    for name in event.hashes:
        cool(state.index, name)


def request_deferred(state: SchedulerState, event: events.RequestDeferred) -> None:
    request = state.get(event.request_id)
    enter(request, "request_deferred")
    request.deferred_hash = event.hash
    request.deferred_ns = state.now_ns
    request.deferred_until_ns = event.until_ns
