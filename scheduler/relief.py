"""What is done when memory is short, one rung at a time: give back what the allocator keeps, shrink
the memory tier, hold one request, drop its KV, and only then give one up.

Helpers of `decide`, and as pure. The numbers that explain a choice are in its event.
"""

from dataclasses import dataclass
from itertools import islice

from journal import events
from journal.events import MemoryLimits, PauseReason
from scheduler.draft import Draft, model_of
from scheduler.memory import row_bytes, size_text
from scheduler.pausing import drop, start_pause, unpinned, unsaved_bytes
from scheduler.request import Phase, Request, order_of
from scheduler.saving import kv_of
from scheduler.state import SchedulerState
from scheduler.usage import (
    lasting_bytes,
    mark_bytes,
    memory_of,
    row_hold_bytes,
    row_now_bytes,
    rows_bytes,
    transient_bytes_per_token,
    usage_with,
)

MAX_COOLED = 64
"""Blocks that leave memory in one step at most."""

MIN_CHUNK_TOKENS = 16
"""A chunk is not cut shorter for want of memory."""

MAX_RELIEFS = 2
"""Actions under way at most: the second only at the emergency mark."""


def relieve(state: SchedulerState, draft: Draft) -> None:
    """The next rung, when two readings since the last action are over the mark, and what is under
    way does not suffice.
    """
    limits, memory = memory_of(state), state.memory
    if limits is None or not memory.level or not state.engine_ready:
        return
    if memory.level == "emergency" and not memory.declared:
        declare(state, draft, limits)
    is_emergency = memory.num_emergency >= 2
    if not is_emergency and memory.num_high < 2:
        return
    if state.reliefs and not (is_emergency and may_add(state, limits)):
        return
    if not (reclaim(state, draft) or shrink(state, draft, limits)):
        hold_one(state, draft, limits, "emergency" if is_emergency else "high")


def declare(state: SchedulerState, draft: Draft, limits: MemoryLimits) -> None:
    """Says once that usage is over the emergency mark, also without what the allocator keeps."""
    assert state.memory.ceiling_bytes is not None
    if usage_with(state, state.memory.active_bytes) < mark_bytes(state, limits.emergency_permille):
        return
    draft.decisions.append(
        events.EmergencyDeclared(
            usage_bytes=state.memory.usage_bytes,
            ceiling_bytes=state.memory.ceiling_bytes,
            num_admitted=len(state.admitted),
        )
    )


def may_add(state: SchedulerState, limits: MemoryLimits) -> bool:
    """Whether memory is over the emergency mark though what is under way counts as given back."""
    given = sum(relief.expected_bytes for relief in state.reliefs)
    over = state.memory.usage_bytes - given >= mark_bytes(state, limits.emergency_permille)
    return over and len(state.reliefs) < MAX_RELIEFS


def is_under_way(state: SchedulerState, rung: str) -> bool:
    """Whether such an action has begun and not ended."""
    return any(relief.rung == rung for relief in state.reliefs)


def reclaim(state: SchedulerState, draft: Draft) -> bool:
    """The allocator gives back what it keeps, if that is a hundredth of the ceiling or more."""
    memory = state.memory
    assert memory.ceiling_bytes is not None
    too_little = memory.cached_bytes * 100 < memory.ceiling_bytes
    if too_little or memory.reclaimed or is_under_way(state, "reclaim"):
        return False
    draft.decisions.append(
        events.ReclaimStarted(
            usage_bytes=memory.usage_bytes,
            ceiling_bytes=memory.ceiling_bytes,
            expected_bytes=memory.cached_bytes,
            num_admitted=len(state.admitted),
        )
    )
    return True


def shrink(state: SchedulerState, draft: Draft, limits: MemoryLimits) -> bool:
    """Blocks in memory go, the least recently used first, until usage is below the mark."""
    index = state.index
    if not index.hot or is_under_way(state, "shrink"):
        return False
    target = mark_bytes(state, limits.high_permille - limits.hysteresis_permille)
    names: list[str] = []
    freed_bytes = 0
    for name, num_bytes in islice(index.hot.items(), MAX_COOLED):
        if state.memory.usage_bytes - freed_bytes < target:
            break
        names.append(name)
        freed_bytes += num_bytes
    draft.decisions.append(
        events.TierShrunk(
            hashes=tuple(names),
            freed_bytes=freed_bytes,
            reason="pressure",
            usage_bytes=state.memory.usage_bytes,
        )
    )
    return True


# Victims


@dataclass(frozen=True, slots=True)
class Victim:
    """The row that is held, its place in the ranking, and how many were ranked."""

    request: Request
    rank: int
    num_candidates: int


def hold_one(
    state: SchedulerState, draft: Draft, limits: MemoryLimits, reason: PauseReason
) -> None:
    """One request is held; a row that is alone only at the emergency mark."""
    rows = running(state, draft)
    if not rows:
        return
    is_emergency = reason == "emergency"
    if len(rows) == 1 and len(state.admitted) == 1:
        if is_emergency:
            hold_alone(state, draft, limits, rows[0])
        return
    if not limits.pause:
        if is_emergency:
            give_up(state, draft, max(rows, key=order_of))
        return
    victim = choose(state, rows, even_protected=is_emergency)
    if victim is None:
        return
    hold(state, draft, victim, reason)


def hold(state: SchedulerState, draft: Draft, victim: Victim, reason: PauseReason) -> None:
    """The victim pauses. Where nothing can be saved, or writing takes more than it frees, its KV is
    dropped at once.
    """
    request = victim.request
    start_pause(
        state, draft, request, reason, rank=victim.rank, num_candidates=victim.num_candidates
    )
    stopped = state.index.stopped
    if kv_of(state) is None:
        drop(state, draft, request, "not_saved", reason)
    elif stopped is not None:
        drop(state, draft, request, "disk_full" if stopped == "disk_full" else "io_error", reason)
    elif not is_worth_it(state, request):
        drop(state, draft, request, "not_saved", reason)


def running(state: SchedulerState, draft: Draft) -> list[Request]:
    """The rows that go on: those that are on their way out are not among them."""
    rows = [state.requests[n] for n in state.admitted if n not in draft.ended]
    return [r for r in rows if r.phase is not Phase.PAUSING and r.number not in draft.pausing]


def choose(state: SchedulerState, rows: list[Request], *, even_protected: bool) -> Victim | None:
    """The victim among these rows: never the oldest, so that something always finishes; the
    youngest admission first, then the fewest bytes to be written, then the number.

    A row that has just gone on is left alone until it has made some progress, and one whose pause
    writes more than it frees is not worth it. At the emergency mark both count last, and not never.
    """
    oldest = min(rows, key=order_of)
    others = [r for r in rows if r is not oldest and r.phase is not Phase.RESUMING]
    free = [r for r in others if not is_protected(state, r) and is_worth_it(state, r)]
    ranked = free or (others if even_protected else [])
    if not ranked:
        return None
    request = min(ranked, key=lambda r: (-order_of(r)[0], unsaved_bytes(state, r), r.number))
    return Victim(request, rank=1, num_candidates=len(ranked))


def is_worth_it(state: SchedulerState, request: Request) -> bool:
    """Whether a pause frees more than it has to write."""
    return row_now_bytes(state, request) > unsaved_bytes(state, request)


def is_protected(state: SchedulerState, request: Request) -> bool:
    """Whether it has gone on a moment ago, and made too little progress since: against thrash."""
    limits = state.limits.memory if state.limits is not None else None
    if limits is None or request.resumed_tokens is None:
        return False
    return request.num_cached_tokens - request.resumed_tokens < limits.min_progress_tokens


# Alone at the emergency mark


def hold_alone(state: SchedulerState, draft: Draft, limits: MemoryLimits, request: Request) -> None:
    """Nothing else can be given back. Once its KV is dropped and computed anew; after that there is
    no way to serve it.
    """
    emergency_bytes = mark_bytes(state, limits.emergency_permille)
    goes_on = request.phase is Phase.RESUMING or request.restoring
    if goes_on or lasting_bytes(state) < emergency_bytes:
        return
    if request.dropped_alone or not limits.pause:
        give_up(state, draft, request)
        return
    start_pause(state, draft, request, "emergency", rank=1, num_candidates=1)
    drop(state, draft, request, "alone", "emergency")


def give_up(state: SchedulerState, draft: Draft, request: Request) -> None:
    """The request is aborted, with the numbers."""
    ceiling_bytes = state.memory.ceiling_bytes
    assert ceiling_bytes is not None
    draft.ended.add(request.number)
    draft.decisions += unpinned(request, "ended")
    draft.decisions.append(
        events.RequestAborted(
            request_id=request.request_id,
            number=request.number,
            reason="memory",
            detail=(
                f"memory in use {size_text(state.memory.usage_bytes)}, ceiling "
                f"{size_text(ceiling_bytes)}, of which this request has "
                f"{size_text(row_now_bytes(state, request))}"
            ),
            num_output_tokens=request.num_output_tokens,
            had_row=True,
            num_memory_tokens=request.num_memory_tokens,
            num_disk_tokens=request.num_disk_tokens,
            num_prefilled_tokens=request.num_prefilled_tokens,
        )
    )


# A chunk that has no room


def chunk_fits(
    state: SchedulerState, request: Request, start: int, length: int, *, passing_bytes: int = 0
) -> bool:
    """Whether the row may grow by this chunk: under the ceiling with all the others, or alone; once
    so many bytes have gone by themselves.
    """
    limits = memory_of(state)
    if limits is None:
        return True
    others = sum(number != request.number for number in state.admitted)
    if others == 0 and not state.leaving:
        return True
    model = model_of(state)
    grows = max(0, row_bytes(model, start + length) - row_hold_bytes(state, request))
    transient = transient_bytes_per_token(state) * length
    total = model.weights_bytes + rows_bytes(state) + grows + transient
    return total - passing_bytes <= mark_bytes(state, limits.emergency_permille)


def tokens_with_room(state: SchedulerState, request: Request, most: int) -> int:
    """The longest chunk that stays below the high mark while it is computed, or below the ceiling
    when nobody else could be held for it, but not less than a short one. Of a row that was dropped
    though it was alone it is half: what the chunk before has shown was too little.
    """
    limits, each = memory_of(state), transient_bytes_per_token(state)
    if limits is None or each == 0:
        return most
    is_alone = len(state.admitted) == 1 and not state.leaving
    mark = limits.emergency_permille if is_alone else limits.high_permille
    room = mark_bytes(state, mark) - model_of(state).weights_bytes
    num_tokens = (room - rows_bytes(state)) // each
    if request.dropped_alone:
        num_tokens //= 2
    return max(min(most, MIN_CHUNK_TOKENS), min(most, num_tokens))


def make_place(state: SchedulerState, draft: Draft) -> None:
    """The next chunk has no room, and nobody else would make some: one request is held, which may
    be the one whose chunk it is.
    """
    limits = memory_of(state)
    assert limits is not None
    if state.pausing or draft.pausing or state.leaving or state.reliefs:
        return
    rows = running(state, draft)
    victim = choose(state, rows, even_protected=True) if limits.pause and len(rows) > 1 else None
    if victim is not None:
        hold(state, draft, victim, "no_room")
