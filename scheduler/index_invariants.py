"""What holds of the index of blocks at each committed boundary, and of what requests hold of it."""

from collections import Counter
from collections.abc import Callable

from scheduler.prefix import BlockIndex, key_of, tail_name
from scheduler.request import Phase, Request
from scheduler.state import SchedulerState

Require = Callable[[bool, str], None]


def check_index(state: SchedulerState, require: Require) -> None:
    """All of them. `require` raises when something that must hold does not."""
    check_sums(state.index, require)
    check_order(state.index, require)
    check_holders(state, require)
    check_memory(state.index, require)
    check_room(state, require)
    for request in state.requests.values():
        check_request(state, request, require)


def check_sums(index: BlockIndex, require: Require) -> None:
    """The sums that are kept are those of the blocks."""
    blocks = index.blocks.values()
    on_disk = sum(block.block_bytes + block.state_bytes for block in blocks)
    on_disk += sum(index.early_states.values())
    on_disk += sum(tail.num_bytes for tail in index.tails.values())
    require(index.disk_bytes == on_disk, "disk_bytes is the sum of the files")
    require(index.hot_bytes == sum(index.hot.values()), "hot_bytes is the sum of memory's blocks")
    writing = [*index.writing.values(), *index.writing_states.values()]
    require(
        index.writing_bytes
        == sum(each.num_bytes for each in writing) + sum(index.writing_tails.values()),
        "writing_bytes is the sum of what is being written",
    )
    ours = sum(block.domain == index.domain for block in blocks)
    require(index.num_ours == ours, "num_ours counts the blocks of the domain")


def check_order(index: BlockIndex, require: Require) -> None:
    """The order of going holds exactly what may go, and counts of children are right."""
    free = [(name, block) for name, block in index.blocks.items() if not block.in_use]
    keys = sorted(key_of(index, name, block) for name, block in free)
    require(index.order == keys, "the order of going holds what may go")
    followers = Counter(block.parent for block in index.blocks.values() if block.parent)
    children = {name: block.children for name, block in index.blocks.items() if block.children}
    require(children | index.orphans == dict(followers), "children and orphans are counted")
    require(not index.orphans.keys() & index.blocks.keys(), "orphans follow what is not there")


def check_holders(state: SchedulerState, require: Require) -> None:
    """Leases are those of requests with a row, and what is to come is theirs too."""
    index = state.index
    rows = [state.requests[number] for number in state.admitted]
    leases = Counter(name for row in rows for name in row.leases)
    held = {name: block.leases for name, block in index.blocks.items() if block.leases}
    require(held == dict(leases), "leases are those of the rows, on blocks that are there")
    pins = Counter(name for request in state.requests.values() for name in request.pins)
    pinned = {name: block.pins for name, block in index.blocks.items() if block.pins}
    require(pinned == dict(pins), "pins are those of held requests, on blocks that are there")
    tails = {
        tail_name(r.request_id, r.saved_tokens) for r in state.requests.values() if r.tail_bytes
    }
    require(index.tails.keys() == tails, "tails are those of held requests")
    for name, number in index.coming.items():
        require(number in state.admitted, f"{name[:8]} is computed by a row")
        require(name not in index.blocks, f"{name[:8]} is to come, and not there")
    unsaved = {row.number for row in rows if row.unsaved}
    require(set(state.unsaved) == unsaved, "unsaved blocks are those of the rows")
    there = index.writing.keys() & index.blocks.keys()
    require(not there, "what is being written is not there")
    there = index.blocks.keys() | index.tails.keys()
    require(not index.bad.keys() & there, "what cannot be read is not there")
    for name in index.unwanted:
        block = index.blocks.get(name)
        is_there = block is not None or name in index.writing
        require(is_there, f"{name[:8]} is unwanted, and there or on its way")
        require(block is None or not block.leases, f"{name[:8]} is unwanted, and nobody uses it")


def check_memory(index: BlockIndex, require: Require) -> None:
    """Memory holds blocks, and states, that are on disk too."""
    states = {f"{name}.state" for name, block in index.blocks.items() if block.state_bytes}
    require(index.hot.keys() <= index.blocks.keys() | states, "memory holds what is on disk")


def check_room(state: SchedulerState, require: Require) -> None:
    """What is in the writers' hands keeps its bound, but for one state and for tails."""
    kv = state.limits.kv if state.limits is not None else None
    index = state.index
    if kv is None or not index.writing_bytes:
        return
    more = max((each.num_bytes for each in index.writing_states.values()), default=0)
    more += sum(index.writing_tails.values())
    require(index.writing_bytes <= kv.writing_bytes + more, "writers hold what they may")


def check_request(state: SchedulerState, request: Request, require: Require) -> None:
    """What a request holds of the index fits its row."""
    where = f"request {request.number} ({request.phase.value})"
    has_row = request.number in state.admitted
    holds = request.leases or request.unsaved or request.restoring
    require(has_row or not holds, f"{where} holds nothing without a row")
    require(request.unsaved == sorted(set(request.unsaved)), f"{where} lists unsaved blocks once")
    block_tokens = state.limits.kv.block_tokens if state.limits and state.limits.kv else 0
    for number in request.unsaved:
        full = (number + 1) * block_tokens <= request.num_cached_tokens
        require(full, f"{where} saves what it has")
        name = request.hashes[number]
        require(name not in state.index.blocks, f"{where} saves what is not there")
    require(request.leases.keys() <= set(request.hashes), f"{where} leases its own chain")
    held = request.pins or request.tail_bytes
    phases = (Phase.PAUSED, Phase.RESUMING)
    saved = request.phase is Phase.PAUSING and request.saved_tokens >= 0
    require(not held or request.phase in phases or saved, f"{where} holds files while it is held")
    restored = request.num_memory_tokens + request.num_disk_tokens
    cached = request.num_cached_tokens
    if request.phase in phases:
        cached = request.resuming_tokens
    most = min(cached, request.num_prompt_tokens)
    require(0 <= restored <= most, f"{where} has restored some of its prompt")
    if request.restoring:
        require(request.num_cached_tokens == 0, f"{where} is empty until it is restored")
