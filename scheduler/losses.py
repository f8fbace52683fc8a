"""What is no longer on disk, or cannot be read: what it means for those that hold it. Called by
`evolve` and its helpers alone.
"""

from journal import events
from scheduler.leases import holds, leave_unsaved
from scheduler.prefix import STATE_SUFFIX, remove_block, remove_state, remove_tail
from scheduler.state import SchedulerState


def block_corrupt(state: SchedulerState, event: events.BlockCorrupt) -> None:
    if event.part == "state":
        lose_state(state, event.hash, has_file=True)
    else:
        lose_block(state, event.hash, event.reason, has_file=True)


def blocks_lost(state: SchedulerState, event: events.BlocksLost) -> None:
    """What is missing has no file any more; what is damaged has one that must go."""
    has_file = event.reason != "missing"
    for name in event.states:
        lose_state(state, name, has_file=has_file)
    for name in event.hashes:
        lose_block(state, name, event.reason, has_file=has_file)
    for name in event.tails:
        lose_tail(state, name, has_file=has_file)


def lose_block(state: SchedulerState, name: str, reason: str, *, has_file: bool) -> None:
    """The block is gone, whoever holds it; a row that has its tokens saves it again. What the index
    does not know was lost before, or is just being written anew.
    """
    index = state.index
    block = index.blocks.get(name)
    if block is None:
        return
    lose_state(state, name, has_file=True)
    if has_file:
        index.bad[name] = block.domain
    remove_block(index, name, reason)
    for number in state.admitted + state.paused + state.pausing:
        request = state.requests[number]
        request.pins.pop(name, None)
        if name in request.leases:
            del request.leases[name]
            at = request.hashes.index(name)
            if holds(state, request, at):
                leave_unsaved(state, request, at)


def lose_state(state: SchedulerState, name: str, *, has_file: bool) -> None:
    """The state at a block's end is gone, if there was one."""
    index = state.index
    block = index.blocks.get(name)
    if block is not None and block.state_bytes:
        if has_file:
            index.bad[name + STATE_SUFFIX] = block.domain
        remove_state(index, name)


def lose_tail(state: SchedulerState, name: str, *, has_file: bool) -> None:
    """A held request has lost what it had behind its last whole block."""
    index = state.index
    tail = index.tails.get(name)
    if tail is None:
        return
    remove_tail(index, name)
    if has_file:
        index.bad[name] = tail.domain
    request = state.find(name.rpartition("-")[0])
    if request is not None:
        request.tail_bytes = 0
