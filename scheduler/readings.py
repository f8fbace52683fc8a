"""What readings of memory come to, and actions against pressure. Called by `evolve` alone."""

from journal import events
from journal.events import Limits
from scheduler.state import Relief, SchedulerState
from scheduler.usage import (
    fixed_bytes,
    mark_bytes,
    memory_of,
    passing_bytes,
    rows_bytes,
    usage_bytes,
)


def memory_sampled(state: SchedulerState, event: events.MemorySampled) -> None:
    """A reading, and the mark that it is over. One alone changes no level."""
    memory = state.memory
    memory.active_bytes = event.active_bytes
    memory.cached_bytes = event.cached_bytes
    memory.sampled_ns = state.now_ns
    if state.limits is not None:
        memory.ceiling_bytes = ceiling_after(state.limits, event)
    limits = memory_of(state)
    if limits is None or state.model is None:
        return
    if any(relief.rung == "shrink" for relief in state.reliefs):
        memory.reclaimed = False  # what left memory is with the allocator now
    end_reliefs(state, ("shrink",))
    memory.usage_bytes = usage_bytes(state)
    memory.passing_bytes = passing_bytes(state)
    needed = fixed_bytes(state) + rows_bytes(state)
    memory.tier_bytes = max(0, mark_bytes(state, limits.low_permille) - needed)
    over_high = memory.usage_bytes >= mark_bytes(state, limits.high_permille)
    over_emergency = memory.usage_bytes >= mark_bytes(state, limits.emergency_permille)
    memory.num_high = memory.num_high + 1 if over_high else 0
    memory.num_emergency = memory.num_emergency + 1 if over_emergency else 0
    set_level(state)


def set_level(state: SchedulerState) -> None:
    """The level after a reading: entered by two over the mark, left below it by the hysteresis."""
    limits, memory = memory_of(state), state.memory
    assert limits is not None
    left = limits.hysteresis_permille
    if memory.num_emergency >= 2:
        memory.level = "emergency"
        return
    below_emergency = mark_bytes(state, limits.emergency_permille - left)
    if memory.level == "emergency" and memory.usage_bytes < below_emergency:
        memory.level = "high"
        memory.declared = False
    if memory.level == "" and memory.num_high >= 2:
        memory.level = "high"
    if memory.level == "high" and memory.usage_bytes < mark_bytes(
        state, limits.high_permille - left
    ):
        memory.level = ""
        memory.reclaimed = False


def ceiling_after(limits: Limits, event: events.MemorySampled) -> int | None:
    """The ceiling that holds after a reading. An `auto` one is what this process has and what the
    machine still has, less the reserve, and at most what it was at the start.
    """
    ceiling = limits.ceiling_bytes
    if ceiling is None or limits.memory is None or not limits.memory.is_auto:
        return ceiling
    ours = event.active_bytes + event.cached_bytes
    theirs = event.available_bytes - limits.memory.machine_reserve_bytes
    return max(1, min(ceiling, ours + theirs))


def memory_reclaimed(state: SchedulerState, event: events.MemoryReclaimed) -> None:
    """The allocator gave back what it kept. It is not asked again until something else was done, or
    pressure has ended: what it keeps comes back while it works.
    """
    memory = state.memory
    memory.active_bytes = event.active_bytes
    memory.cached_bytes = event.cached_bytes
    memory.reclaimed = True
    end_reliefs(state, ("reclaim",))


def reclaim_started(state: SchedulerState, event: events.ReclaimStarted) -> None:
    act(state, "reclaim", event.expected_bytes)


def row_left(state: SchedulerState, number: int, freed_bytes: int) -> None:
    """The engine let a row go. A negative measurement is recorded, and not believed."""
    freed = max(0, freed_bytes)
    state.memory.active_bytes = max(0, state.memory.active_bytes - freed)
    state.memory.cached_bytes += freed
    state.memory.passing_bytes = max(0, state.memory.passing_bytes - freed)
    state.memory.reclaimed = False
    if any(relief.number == number for relief in state.reliefs):
        state.reliefs = [relief for relief in state.reliefs if relief.number != number]
        begin_anew(state)


def act(state: SchedulerState, rung: str, expected_bytes: int, number: int = 0) -> None:
    """An action begins: until its effect is measured or its time is over, its bytes count as given
    back.
    """
    assert state.limits is not None
    limit_ns = state.limits.memory.act_limit_ns if state.limits.memory is not None else 0
    state.reliefs.append(Relief(rung, expected_bytes, state.now_ns + limit_ns, number))
    begin_anew(state)


def end_reliefs(state: SchedulerState, rungs: tuple[str, ...]) -> None:
    """The effect of these is measured now; those whose time is over count no longer."""
    kept = [r for r in state.reliefs if r.rung not in rungs and r.until_ns > state.now_ns]
    if len(kept) < len(state.reliefs):
        state.reliefs = kept
        begin_anew(state)


def begin_anew(state: SchedulerState) -> None:
    """After an action it takes two new readings to act again."""
    state.memory.num_high = 0
    state.memory.num_emergency = 0
