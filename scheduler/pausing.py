"""Holding a request: who is asked to, how a pause comes to its end, and what is done when it
cannot be saved.

Helpers of `decide`, and as pure.
"""

from itertools import islice
from typing import Literal

from journal import events
from journal.events import Decision, KvLimits, PauseReason
from scheduler.draft import Draft, model_of
from scheduler.eviction import over_budget
from scheduler.prefix import block_bytes, is_tail, state_bytes
from scheduler.request import Phase, Request
from scheduler.saving import kv_of
from scheduler.state import SchedulerState
from scheduler.usage import row_now_bytes

MAX_ADVANCED = 8
"""Pauses that one step brings to their end at most."""

MAX_DRAINED = 8
"""Rows that one step of a stop begins to hold at most: nobody is admitted or goes on in it."""

DropReason = Literal["disk_full", "io_error", "not_taken", "not_saved", "alone"]


def hold_by_hand(state: SchedulerState, draft: Draft) -> None:
    """What an operator wants held. One that waits keeps its tokens, and has nothing to save; one
    that is being filled again is held as it was before.
    """
    for number in state.holds:
        request = state.requests[number]
        if number in draft.ended or (number in state.arrivals and number not in draft.queued):
            continue
        hold(state, draft, request, "operator")


def hold_orphans(state: SchedulerState, draft: Draft) -> None:
    """Rows whose client is lost, unless it has come back in this very step."""
    for number in state.orphans:
        if not any(number in numbers for numbers in (draft.ended, draft.pausing, draft.adopted)):
            hold(state, draft, state.requests[number], "client_gone")


def hold_drained(state: SchedulerState, draft: Draft) -> None:
    """The server stops, and the time in which rows may go on is over: they go on at the next
    start, from exactly here.
    """
    rows = [state.requests[n] for n in state.admitted if n not in draft.ended]
    left = [
        row for row in rows if row.phase is not Phase.PAUSING and row.number not in draft.pausing
    ]
    for request in left[:MAX_DRAINED]:
        hold(state, draft, request, "drain")


def hold(state: SchedulerState, draft: Draft, request: Request, reason: PauseReason) -> None:
    """One request, whatever its rank: its row is held, and is given up where it was only being
    filled again. One in the queue has nothing to save.
    """
    if request.phase in (Phase.WAITING, Phase.RESUMING):
        draft.queued.pop(request.number, None)
        draft.ended.add(request.number)
        draft.decisions.append(paused(state, draft, request, reason))
    else:
        start_pause(state, draft, request, reason, rank=0, num_candidates=0)


def start_pause(
    state: SchedulerState,
    draft: Draft,
    request: Request,
    reason: PauseReason,
    *,
    rank: int,
    num_candidates: int,
) -> None:
    """The intent: the row leaves the batch, and what disk lacks of it is saved."""
    draft.pausing[request.number] = reason
    draft.decisions.append(
        events.PauseStarted(
            request_id=request.request_id,
            number=request.number,
            reason=reason,
            usage_bytes=state.memory.usage_bytes,
            ceiling_bytes=state.memory.ceiling_bytes,
            rank=rank,
            num_candidates=num_candidates,
            frees_bytes=row_now_bytes(state, request),
            unsaved_bytes=unsaved_bytes(state, request),
            num_cached_tokens=cached_tokens(request, draft),
            num_output_tokens=request.num_output_tokens,
        )
    )


def cached_tokens(request: Request, draft: Draft) -> int:
    """What the row holds, after this step's commits."""
    return draft.committed.get(request.number, request.num_cached_tokens)


def num_full_blocks(state: SchedulerState, request: Request, num_tokens: int) -> int:
    """Whole blocks among the first tokens of a request, as far as they have names."""
    kv = kv_of(state)
    return 0 if kv is None else min(num_tokens // kv.block_tokens, len(request.hashes))


def unsaved_bytes(state: SchedulerState, request: Request) -> int:
    """What a pause would have to write: whole blocks that disk lacks, the positions behind them,
    and the state.
    """
    kv, model = kv_of(state), model_of(state)
    if kv is None:
        return row_now_bytes(state, request)
    cached = request.num_cached_tokens
    tail = cached - num_full_blocks(state, request, cached) * kv.block_tokens
    blocks = len(request.unsaved) * block_bytes(model, kv)
    return blocks + tail * model.kv_bytes_per_token + state_bytes(model)


# Towards the end of a pause


def advance_pauses(state: SchedulerState, draft: Draft) -> None:
    """Each pause goes one stage on: the tail is saved once all whole blocks are on their way, and
    the chain pinned once all of it is durable.
    """
    reasons: dict[int, PauseReason] = {n: reason_of(state.requests[n]) for n in state.pausing}
    for number, because in islice((reasons | draft.pausing).items(), MAX_ADVANCED):
        if number not in draft.ended:
            advance(state, draft, state.requests[number], because)


def advance(state: SchedulerState, draft: Draft, request: Request, because: PauseReason) -> None:
    """The next stage of one pause, if it can be taken now."""
    if is_at_work(state, draft, request):
        return
    reason = why_not_saved(state, draft, request)
    if reason is not None:
        drop(state, draft, request, reason, because)
    elif request.tail_planned:
        pin(state, draft, request)
    elif not missing(state, draft, request) and not has_old_tail(state, request):
        plan_tail(state, draft, request)


def is_at_work(state: SchedulerState, draft: Draft, request: Request) -> bool:
    """Whether the engine is still feeding a chunk to the row, or filling it."""
    chunk = state.chunk
    feeds = chunk is not None and chunk.number == request.number
    return request.restoring or (feeds and request.number not in draft.committed)


def missing(state: SchedulerState, draft: Draft, request: Request) -> list[str]:
    """The whole blocks before its tail that are neither on disk nor on their way there."""
    index = state.index
    num_blocks = request.chain_blocks
    if not request.tail_planned:
        num_blocks = num_full_blocks(state, request, cached_tokens(request, draft))
    there = (index.blocks, index.writing, draft.saving)
    return [
        name for name in request.hashes[:num_blocks] if not any(name in names for names in there)
    ]


def has_old_tail(state: SchedulerState, request: Request) -> bool:
    """Whether an earlier tail is still being written, or its file to be unlinked: its name may come
    again.
    """
    if request.number in state.index.writing_tails:
        return True
    return any(is_tail(name) and name.startswith(request.request_id) for name in state.index.bad)


def why_not_saved(state: SchedulerState, draft: Draft, request: Request) -> DropReason | None:
    """Why the row's KV cannot come to disk; null while it can."""
    kv, index = kv_of(state), state.index
    if kv is None and request.saved_tokens < 0:
        return "not_saved"
    if request.save_failure is not None:
        return save_failure(request)
    names = missing(state, draft, request)
    if index.stopped is not None and (names or not request.tail_planned):
        return "disk_full" if index.stopped == "disk_full" else "io_error"
    unsaved = {request.hashes[number] for number in request.unsaved}
    if request.number not in draft.committed and any(name not in unsaved for name in names):
        return "not_saved"
    if names and (kv is None or not is_moving(state, draft, kv)):
        return "not_saved"
    return None


def is_moving(state: SchedulerState, draft: Draft, kv: KvLimits) -> bool:
    """Whether something is being written or removed, so that there may be room for more."""
    index = state.index
    is_removing = bool(index.bad) or (bool(index.order) and over_budget(state, kv)[0] > 0)
    return index.writing_bytes > 0 or draft.saving_bytes > 0 or is_removing


def save_failure(request: Request) -> DropReason:
    """The failure of its tail, as the reason of a drop."""
    match request.save_failure:
        case "disk_full" | "io_error" | "not_taken" as reason:
            return reason
        case _:
            raise AssertionError(f"{request.request_id} failed to be saved: {request.save_failure}")


def plan_tail(state: SchedulerState, draft: Draft, request: Request) -> None:
    """All whole blocks are saved or on their way: what is behind them follows."""
    kv = kv_of(state)
    assert kv is not None, "without saved KV a row is dropped"
    num_blocks = num_full_blocks(state, request, cached_tokens(request, draft))
    draft.decisions.append(
        events.TailSavePlanned(
            request_id=request.request_id,
            number=request.number,
            tail_start=num_blocks * kv.block_tokens,
        )
    )


def pin(state: SchedulerState, draft: Draft, request: Request) -> None:
    """The chain is pinned in the step that ends the row, once every part of it is durable."""
    if request.saved_tokens != request.num_cached_tokens:
        return  # the tail, or the token of the step that was under way, is still to come
    names = request.hashes[: request.chain_blocks]
    if not all(name in state.index.blocks for name in names):
        return  # the rest is on its way
    draft.pinned = True
    draft.decisions.append(
        events.ChainPinned(
            request_id=request.request_id,
            number=request.number,
            num_blocks=len(names),
            last_hash=names[-1] if names else "",
            tail_bytes=request.tail_bytes,
            num_tokens=request.saved_tokens,
        )
    )
    draft.decisions.append(paused(state, draft, request, reason_of(request)))
    draft.ended.add(request.number)


def drop(
    state: SchedulerState, draft: Draft, request: Request, reason: DropReason, because: PauseReason
) -> None:
    """The request is held with its tokens only: `because` is why it is held."""
    draft.decisions += unpinned(request, "lost")
    draft.decisions.append(
        events.KvDropped(
            request_id=request.request_id,
            number=request.number,
            reason=reason,
            num_cached_tokens=cached_tokens(request, draft),
        )
    )
    draft.decisions.append(paused(state, draft, request, because))
    draft.ended.add(request.number)


def reason_of(request: Request) -> PauseReason:
    """Why a request is pausing or paused."""
    match request.pause_reason:
        case "high" | "emergency" | "no_room" | "operator" | "client_gone" | "drain" as reason:
            return reason
        case _:
            raise AssertionError(f"{request.request_id} is held for {request.pause_reason}")


def paused(state: SchedulerState, draft: Draft, request: Request, reason: PauseReason) -> Decision:
    """The end of a pause. `had_row` tells the engine to let the row go."""
    return events.RequestPaused(
        request_id=request.request_id,
        number=request.number,
        reason=reason,
        had_row=request.number in state.admitted,
        num_cached_tokens=cached_tokens(request, draft),
        num_output_tokens=request.num_output_tokens,
    )


def held_without_row(request: Request) -> Decision:
    """An operator's wish stands though the row is gone: the request is held with its tokens."""
    return events.RequestPaused(
        request_id=request.request_id,
        number=request.number,
        reason="operator",
        had_row=False,
        num_cached_tokens=0,
        num_output_tokens=request.num_output_tokens,
    )


def unpinned(request: Request, reason: Literal["resumed", "ended", "lost"]) -> list[Decision]:
    """What the request holds on disk may go, if it holds anything."""
    if not request.pins and not request.tail_bytes:
        return []
    return [
        events.ChainUnpinned(
            request_id=request.request_id,
            number=request.number,
            domain=request.pin_domain,
            num_blocks=len(request.pins),
            last_hash=next(reversed(request.pins), ""),
            num_tokens=request.saved_tokens,
            tail_bytes=request.tail_bytes,
            reason=reason,
        )
    ]
