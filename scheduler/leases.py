"""What requests hold of the index of blocks. Called by `evolve` and its helpers alone."""

from bisect import insort

from scheduler.prefix import change, drop_early_state, use
from scheduler.request import Request
from scheduler.state import SchedulerState


def block_tokens_of(state: SchedulerState) -> int:
    """Tokens in a block, or 0 when nothing is saved in this run."""
    kv = state.limits.kv if state.limits is not None else None
    return 0 if kv is None else kv.block_tokens


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
    request.leases = {}
    request.unsaved = []
    request.restoring = False
    state.unsaved.pop(request.number, None)
    drop_lone_states(state)


def disown_output(state: SchedulerState, request: Request) -> None:
    """The request has ended. What holds output that no prompt can repeat goes once it is saved, or
    now, unless somebody else uses it.
    """
    block_tokens = block_tokens_of(state)
    index = state.index
    for number in range(request.num_prompt_tokens // (block_tokens or 1), len(request.hashes)):
        name = request.hashes[number]
        block = index.blocks.get(name)
        if name in index.writing or (block is not None and not block.leases):
            index.unwanted[name] = index.domain


def join_chain(state: SchedulerState, request: Request, num_blocks: int) -> None:
    """At admission: a lease on each block that was found, and word of those to be computed."""
    for name in request.hashes[:num_blocks]:
        take_lease(state, request, name)
    for name in request.hashes[num_blocks:]:
        if name not in state.index.blocks:
            state.index.coming.setdefault(name, request.number)
    request.deferred_hash = ""
    request.deferred_ns = 0
    request.deferred_until_ns = 0


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
        else:
            leave_unsaved(state, request, number)


def leave_unsaved(state: SchedulerState, request: Request, number: int) -> None:
    """The row holds this full block, and disk does not."""
    if number not in request.unsaved:
        insort(request.unsaved, number)
        state.unsaved[request.number] = None


def holds(state: SchedulerState, request: Request, number: int) -> bool:
    """Whether the request has a row whose caches hold this block whole."""
    end = (number + 1) * block_tokens_of(state)
    return request.number in state.admitted and end <= request.num_cached_tokens


def drop_lone_states(state: SchedulerState) -> None:
    """States whose blocks are neither on their way nor still to be saved are of no use."""
    for name in list(state.index.early_states):
        rows = [state.requests[number] for number in state.unsaved]
        unsaved = any(row.hashes[i] == name for row in rows for i in row.unsaved)
        if name not in state.index.writing and not unsaved:
            drop_early_state(state.index, name)
