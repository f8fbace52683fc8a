"""What people see of the state: plain records, computed between two steps."""

import msgspec

from scheduler.request import Request
from scheduler.state import SchedulerState


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One request as people see it. `state` is its phase; `reason` and `detail` say how it ended.

    `num_cached_tokens` are in its row, or were found at its admission when it has ended;
    `num_memory_tokens` and `num_disk_tokens` of its prompt were restored. Times are Unix
    nanoseconds; `age_ms` runs from arrival to the end, or to now.
    """

    id: str
    route: str
    state: str
    held_reason: str | None
    model_fingerprint: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    num_memory_tokens: int
    num_disk_tokens: int
    max_tokens: int
    reserved_bytes: int
    received_at_ns: int
    admitted_at_ns: int | None
    ended_at_ns: int | None
    age_ms: int
    retries: int
    deaths: int
    solo: bool
    reason: str | None
    detail: str | None


class ServerView(msgspec.Struct, frozen=True, kw_only=True):
    """All open requests and what they take, as of one boundary between two steps."""

    run_id: int
    step: int
    now_ns: int
    engine_ready: bool
    stopping: bool
    requests: list[RequestView]
    num_waiting: int
    num_held: int
    num_admitted: int
    batch: int
    batch_rows: int
    reserved_bytes: int
    leaving_bytes: int
    weights_bytes: int
    ceiling_bytes: int | None


class CacheView(msgspec.Struct, frozen=True, kw_only=True):
    """Saved KV as of one boundary between two steps.

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
        domain=index.domain or None,
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
    return ServerView(
        run_id=state.run_id,
        step=state.step,
        now_ns=now_ns,
        engine_ready=state.engine_ready,
        stopping=state.stopping,
        requests=[view_open(request, now_ns) for request in requests],
        num_waiting=len(state.waiting),
        num_held=len(state.held),
        num_admitted=len(state.admitted),
        batch=state.batch,
        batch_rows=len(state.batch_rows),
        reserved_bytes=state.reserved_bytes,
        leaving_bytes=sum(state.leaving.values()),
        weights_bytes=0 if state.model is None else state.model.weights_bytes,
        ceiling_bytes=None if state.limits is None else state.limits.ceiling_bytes,
    )


def view_open(request: Request, now_ns: int) -> RequestView:
    """An open request as it is at `now_ns`."""
    return RequestView(
        id=request.request_id,
        route=request.route,
        state=request.phase.value,
        held_reason=request.held_reason,
        model_fingerprint=request.model_fingerprint,
        num_prompt_tokens=request.num_prompt_tokens,
        num_output_tokens=request.num_output_tokens,
        num_cached_tokens=request.num_cached_tokens,
        num_memory_tokens=request.num_memory_tokens,
        num_disk_tokens=request.num_disk_tokens,
        max_tokens=request.max_tokens,
        reserved_bytes=request.reserved_bytes,
        received_at_ns=request.received_ns,
        admitted_at_ns=request.admitted_ns or None,
        ended_at_ns=None,
        age_ms=max(0, now_ns - request.received_ns) // 1_000_000,
        retries=request.retries,
        deaths=request.deaths,
        solo=request.solo,
        reason=None,
        detail=None,
    )
