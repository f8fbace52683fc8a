"""What people see of the state: plain records, computed between two steps."""

from typing import Literal

import msgspec

from scheduler.request import Phase, Request
from scheduler.state import Relief, SchedulerState
from scheduler.usage import mark_bytes, memory_of, row_now_bytes, usage_bytes
from scheduler.waits import Wait, line_of, wait_of


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One request as people see it. `state` is its phase; `reason` and `detail` say how it ended.

    `num_cached_tokens` of the `num_known_tokens` (prompt and output) are in its row, or were found
    at its admission when it has ended; `num_memory_tokens` and `num_disk_tokens` of its prompt were
    restored. `row_bytes` is what its row takes now, `reserved_bytes` what it may come to.

    `held_reason` says why this server cannot run it at all. `wait` says why it does not go on, and
    what it waits for; null while it is worked on. `hold`: an operator wants it held. While it is
    held `pause_reason` says why, and the KV of its first `num_saved_tokens` tokens is on disk, in
    `num_pinned_blocks` blocks and a tail of `tail_bytes`. It was held `num_pauses` times, and
    `held_ms` in all.

    `orphaned_by` says why it has no client though it is open, and `orphaned_ms` for how long.
    `keyed`: it was sent with an Idempotency-Key. `joined_id` is the request that was sent before
    and answers in its place; `owner_digest` is that of its API key. Nobody is shown these two.

    Times are Unix nanoseconds; `age_ms` runs from arrival to the end, or to now.
    """

    id: str
    route: str
    state: str
    held_reason: str | None
    model_fingerprint: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_known_tokens: int
    num_cached_tokens: int
    num_memory_tokens: int
    num_disk_tokens: int
    max_tokens: int
    row_bytes: int
    reserved_bytes: int
    wait: Wait | None
    hold: bool
    pause_reason: str | None
    num_saved_tokens: int
    num_pinned_blocks: int
    tail_bytes: int
    num_pauses: int
    held_ms: int
    received_at_ns: int
    admitted_at_ns: int | None
    ended_at_ns: int | None
    age_ms: int
    retries: int
    deaths: int
    solo: bool
    reason: str | None
    detail: str | None
    has_client: bool
    orphaned_by: str | None
    orphaned_ms: int
    keyed: bool
    joined_id: str | None
    owner_digest: str


class ReliefView(msgspec.Struct, frozen=True, kw_only=True):
    """An action against pressure that is under way. `request_id` is whose row it gives back;
    `until_ns` is when its bytes stop counting as given back.
    """

    rung: str
    expected_bytes: int
    request_id: str | None
    until_ns: int


class MemoryView(msgspec.Struct, frozen=True, kw_only=True):
    """Memory as the scheduler sees it. Nulls: there is no ceiling, or no reading yet.

    `usage_bytes` is the larger of the reading and the analytic sum, with what is reserved and not
    yet allocated: what the marks are compared with. `level` is the mark that usage is over, after
    two readings, until it is below by the hysteresis. `active_bytes` and `cached_bytes` are the
    allocator's newest reading, which was taken at `sampled_at_ns`.
    """

    ceiling_bytes: int | None
    is_auto: bool
    low_bytes: int | None
    high_bytes: int | None
    emergency_bytes: int | None
    usage_bytes: int
    level: Literal["normal", "high", "emergency"]
    active_bytes: int
    cached_bytes: int
    sampled_at_ns: int | None
    reliefs: list[ReliefView]


NO_MEMORY = MemoryView(
    ceiling_bytes=None,
    is_auto=False,
    low_bytes=None,
    high_bytes=None,
    emergency_bytes=None,
    usage_bytes=0,
    level="normal",
    active_bytes=0,
    cached_bytes=0,
    sampled_at_ns=None,
    reliefs=[],
)
"""Before a run begins."""


class ServerView(msgspec.Struct, frozen=True, kw_only=True):
    """All open requests and what they take, as of one boundary between two steps. `num_unfit` are
    those that this server cannot run.
    """

    run_id: int
    step: int
    now_ns: int
    engine_ready: bool
    stopping: bool
    requests: list[RequestView]
    num_waiting: int
    num_unfit: int
    num_held: int
    num_pausing: int
    num_admitted: int
    batch: int
    batch_rows: int
    reserved_bytes: int
    leaving_bytes: int
    weights_bytes: int
    capacity_bytes: int | None
    max_context_tokens: int
    memory: MemoryView


class CacheView(msgspec.Struct, frozen=True, kw_only=True):
    """Saved KV as of one boundary between two steps.

    `domain` is null until the model is loaded: it follows from what its caches look like.
    `num_used_blocks` must stay: requests hold them, or longer chains go through them.
    `num_other_blocks` belong to other models or settings. `disk_bytes` of files count against
    `max_bytes`; `memory_bytes` are kept in memory beside that, at most `max_memory_bytes`;
    `writing_bytes` are in the writers' hands. `free_bytes` is what the file system had free at the
    last look. `stopped` says why nothing is saved at present.
    """

    enabled: bool
    domain: str | None
    block_tokens: int | None
    num_blocks: int
    num_used_blocks: int
    num_other_blocks: int
    disk_bytes: int
    max_bytes: int | None
    memory_bytes: int
    max_memory_bytes: int | None
    writing_bytes: int
    free_bytes: int | None
    reserve_bytes: int | None
    stopped: str | None
    clearing: bool


def view_cache(state: SchedulerState, clear_is_waiting: bool) -> CacheView:
    """The index of blocks in numbers. A clear that the loop has not taken yet is under way too."""
    index = state.index
    kv = state.limits.kv if state.limits is not None else None
    return CacheView(
        enabled=kv is not None,
        domain=(index.domain or None) if state.engine_ready else None,
        block_tokens=None if kv is None else kv.block_tokens,
        num_blocks=len(index.blocks),
        num_used_blocks=len(index.blocks) - len(index.order),
        num_other_blocks=len(index.blocks) - index.num_ours,
        disk_bytes=index.disk_bytes,
        max_bytes=None if kv is None else kv.max_bytes,
        memory_bytes=index.hot_bytes,
        max_memory_bytes=None if kv is None else kv.memory_bytes,
        writing_bytes=index.writing_bytes,
        free_bytes=index.free_bytes,
        reserve_bytes=None if kv is None else kv.reserve_bytes,
        stopped=index.stopped,
        clearing=state.clearing or clear_is_waiting,
    )


def view_server(state: SchedulerState, now_ns: int) -> ServerView:
    """The state as it is. What has arrived and is not committed yet (the disk may be full) is not
    shown.
    """
    requests = [r for n, r in state.requests.items() if n not in state.arrivals]
    line = line_of(state)
    return ServerView(
        run_id=state.run_id,
        step=state.step,
        now_ns=now_ns,
        engine_ready=state.engine_ready,
        stopping=state.stopping,
        requests=[view_open(state, request, now_ns, line) for request in requests],
        num_waiting=len(state.waiting),
        num_unfit=len(state.held),
        num_held=len(state.paused),
        num_pausing=len(state.pausing),
        num_admitted=len(state.admitted),
        batch=state.batch,
        batch_rows=len(state.batch_rows),
        reserved_bytes=state.reserved_bytes,
        leaving_bytes=sum(state.leaving.values()),
        weights_bytes=0 if state.model is None else state.model.weights_bytes,
        capacity_bytes=None if state.limits is None else state.limits.ceiling_bytes,
        max_context_tokens=state.max_context_tokens,
        memory=view_memory(state),
    )


def view_memory(state: SchedulerState) -> MemoryView:
    """Memory as of now: usage is computed, not that of the last reading."""
    memory, limits = state.memory, memory_of(state)
    if limits is None:
        marks: list[int | None] = [None, None, None]
    else:
        permilles = (limits.low_permille, limits.high_permille, limits.emergency_permille)
        marks = [mark_bytes(state, permille) for permille in permilles]
    return MemoryView(
        ceiling_bytes=memory.ceiling_bytes,
        is_auto=limits is not None and limits.is_auto,
        low_bytes=marks[0],
        high_bytes=marks[1],
        emergency_bytes=marks[2],
        usage_bytes=0 if state.model is None else usage_bytes(state),
        level=level_of(memory.level),
        active_bytes=memory.active_bytes,
        cached_bytes=memory.cached_bytes,
        sampled_at_ns=memory.sampled_ns or None,
        reliefs=[view_relief(state, relief) for relief in state.reliefs],
    )


def level_of(level: str) -> Literal["normal", "high", "emergency"]:
    """The state's word for a level, as people see it."""
    match level:
        case "high" | "emergency":
            return level
        case _:
            return "normal"


def view_relief(state: SchedulerState, relief: Relief) -> ReliefView:
    """An action under way."""
    request = state.requests.get(relief.number)
    return ReliefView(
        rung=relief.rung,
        expected_bytes=relief.expected_bytes,
        request_id=None if request is None else request.request_id,
        until_ns=relief.until_ns,
    )


def view_open(
    state: SchedulerState, request: Request, now_ns: int, line: dict[int, int]
) -> RequestView:
    """An open request as it is at `now_ns`; `line` says how many stand before each that waits."""
    has_row = request.number in state.admitted
    return RequestView(
        id=request.request_id,
        route=request.route,
        state=request.phase.value,
        held_reason=request.held_reason,
        model_fingerprint=request.model_fingerprint,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_known_tokens=request.num_known_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_memory_tokens=request.num_memory_tokens,
        num_disk_tokens=request.num_disk_tokens,
        max_tokens=request.max_tokens,
        row_bytes=row_now_bytes(state, request) if has_row else 0,
        reserved_bytes=request.reserved_bytes,
        wait=wait_of(state, request, line),
        hold=request.hold,
        pause_reason=request.pause_reason,
        num_saved_tokens=max(0, request.saved_tokens),
        num_pinned_blocks=len(request.pins),
        tail_bytes=request.tail_bytes,
        num_pauses=request.num_pauses,
        held_ms=held_ns(request, now_ns) // 1_000_000,
        received_at_ns=request.received_ns,
        admitted_at_ns=request.admitted_ns or None,
        ended_at_ns=None,
        age_ms=max(0, now_ns - request.received_ns) // 1_000_000,
        retries=request.retries,
        deaths=request.deaths,
        solo=request.solo,
        reason=None,
        detail=None,
        has_client=request.orphaned_by is None,
        orphaned_by=request.orphaned_by,
        orphaned_ms=orphaned_ns(request, now_ns) // 1_000_000,
        keyed=bool(request.key_digest),
        joined_id=None,
        owner_digest=request.owner_digest,
    )


def orphaned_ns(request: Request, now_ns: int) -> int:
    """How long the request has been without a client."""
    return 0 if request.orphaned_by is None else max(0, now_ns - request.orphaned_ns)


def held_ns(request: Request, now_ns: int) -> int:
    """How long the request was held in all, what is under way included."""
    if request.phase is not Phase.PAUSED:
        return request.held_ns
    return request.held_ns + max(0, now_ns - request.paused_ns)
