"""When memory is read, and which readings become facts.

The loop's thread reads, between two steps and at once, so a reading is as old as the step that
takes it: whatever held the loop up, the first step after it begins with a new one, and nothing is
destroyed on the strength of an old one.

A reading is a fact when it may change a decision: a mark is crossed, usage is over the high mark,
something is being done against it, or usage or the ceiling has changed by a hundredth of the
ceiling; and else now and then. Without a ceiling nothing is read: no decision would depend on it.
"""

from collections.abc import Callable

import structlog

from journal.events import MemorySampled
from scheduler.clock import Clock
from scheduler.engine.base import MemoryReading
from scheduler.machine import Machine, MachineReading, MachineUnreadable
from scheduler.readings import ceiling_after
from scheduler.state import SchedulerState
from scheduler.usage import memory_of, usage_with

IDLE_NS = 5_000_000_000
"""Between two readings while nothing is to be done."""

AGAIN_NS = 5_000_000
"""After one reading over the emergency mark, the one that confirms it or does not."""

FACT_NS = 5_000_000_000
IDLE_FACT_NS = 60_000_000_000
"""A reading that says nothing new is a fact after so long: under load, and without."""

log = structlog.get_logger(__name__)


class Gauge:
    """See the module's text. Used by the loop's thread only; `read_memory` is the engine's."""

    def __init__(
        self,
        sample_ms: int,
        clock: Clock,
        read_memory: Callable[[], MemoryReading],
        machine: Machine,
    ) -> None:
        self.sample_ns = sample_ms * 1_000_000
        self.clock = clock
        self.read_memory = read_memory
        self.machine = machine
        self.read_ns: int | None = None
        self.fact_ns: int | None = None
        self.of_machine = MachineReading(0, 0)
        self.is_readable = True

    def wait_ns(self, state: SchedulerState) -> int | None:
        """How long until the next reading; null while nothing is to be read."""
        if not state.engine_ready or memory_of(state) is None:
            return None
        if self.read_ns is None:
            return 0
        return max(0, self.read_ns + self.interval_ns(state) - self.clock.monotonic_ns())

    def interval_ns(self, state: SchedulerState) -> int:
        """From one reading to the next."""
        if state.memory.num_emergency == 1:
            return AGAIN_NS
        return self.sample_ns if is_busy(state) else IDLE_NS

    def take(self, state: SchedulerState) -> MemorySampled | None:
        """A reading, if one is due and is to be a fact."""
        if self.wait_ns(state) != 0:
            return None
        reading = self.read()
        if not (self.is_time(state) or says_something(state, reading)):
            return None
        self.fact_ns = self.clock.monotonic_ns()
        return reading

    def read(self) -> MemorySampled:
        """The numbers now, as they are: also those that cannot be true."""
        self.read_ns = self.clock.monotonic_ns()
        allocator = self.read_memory()
        self.read_machine()
        return MemorySampled(
            active_bytes=allocator.active_bytes,
            cached_bytes=allocator.cached_bytes,
            peak_bytes=allocator.peak_bytes,
            process_bytes=self.of_machine.process_bytes,
            available_bytes=self.of_machine.available_bytes,
            age_ns=self.clock.monotonic_ns() - self.read_ns,
        )

    def read_machine(self) -> None:
        """What the system says. While it says nothing the numbers stay what they were."""
        try:
            self.of_machine = self.machine.read()
        except MachineUnreadable as error:
            if self.is_readable:
                log.warning("the last numbers of the machine's memory are used", why=str(error))
            self.is_readable = False
        else:
            self.is_readable = True

    def is_time(self, state: SchedulerState) -> bool:
        """Whether a fact is due, whatever it says."""
        if self.fact_ns is None:
            return True
        limit_ns = FACT_NS if is_busy(state) else IDLE_FACT_NS
        return self.clock.monotonic_ns() - self.fact_ns >= limit_ns


def is_busy(state: SchedulerState) -> bool:
    """Whether memory can change by our doing, or somebody waits for it. With nothing to do and
    nobody to serve, even usage over a mark is no reason for ten facts a second.
    """
    return bool(
        state.admitted
        or state.waiting
        or state.leaving
        or state.reliefs
        or state.index.writing_bytes
        or any(not state.requests[number].stays_held for number in state.paused)
    )


def says_something(state: SchedulerState, reading: MemorySampled) -> bool:
    """Whether the reading may change a decision."""
    memory, limits = state.memory, memory_of(state)
    assert state.limits is not None
    assert limits is not None
    if memory.level or state.reliefs:
        return True
    was, ceiling_was = memory.usage_bytes, memory.ceiling_bytes
    usage, ceiling = (
        usage_with(state, reading.active_bytes + reading.cached_bytes),
        ceiling_after(state.limits, reading),
    )
    assert ceiling_was is not None
    assert ceiling is not None
    if usage >= ceiling * limits.high_permille // 1000:
        return True
    marks = (limits.low_permille, limits.high_permille, limits.emergency_permille)
    crossed = any(
        (usage >= ceiling * mark // 1000) != (was >= ceiling_was * mark // 1000) for mark in marks
    )
    change = max(abs(usage - was), abs(ceiling - ceiling_was))
    return crossed or change * 100 >= ceiling_was
