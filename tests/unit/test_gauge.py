"""When memory is read, and which readings become facts."""

from dataclasses import dataclass

import msgspec
import pytest
import structlog.testing

from journal import events
from scheduler.engine.base import MemoryReading
from scheduler.gauge import AGAIN_NS, FACT_NS, IDLE_FACT_NS, IDLE_NS, Gauge
from scheduler.known import KnownRequests
from scheduler.machine import MachineReading, MachineUnreadable
from scheduler.sensors import Sensors
from scheduler.usage import unallocated_bytes
from tests.unit.core_driver import LIMITS, MEMORY, CoreDriver

CEILING = 10_000_000
SAMPLE_NS = 100_000_000
MB = 1_000_000
ALONE = 1.256
"""Usage in MB with the model's weights and the one row; the allocator reads 1 MB of it."""


@dataclass
class Scripted:
    """A clock, an allocator and a machine whose numbers a test sets."""

    now_ns: int = 1_000
    active_bytes: int = 1 * MB
    cached_bytes: int = 0
    available_bytes: int = 100 * MB
    num_readings: int = 0
    broken: bool = False

    def wall_ns(self) -> int:
        return self.now_ns

    def monotonic_ns(self) -> int:
        return self.now_ns

    def read_memory(self) -> MemoryReading:
        self.num_readings += 1
        return MemoryReading(self.active_bytes, self.cached_bytes, 3 * MB)

    def read(self) -> MachineReading:
        if self.broken:
            raise MachineUnreadable("no /proc")
        return MachineReading(7 * MB, self.available_bytes)


class Driver:
    """A core and a gauge. The first reading, which is a fact, has been folded."""

    def __init__(self, *, is_auto: bool = False, busy: bool = True) -> None:
        memory = msgspec.structs.replace(MEMORY, is_auto=is_auto)
        limits = msgspec.structs.replace(LIMITS, ceiling_bytes=CEILING, memory=memory)
        self.core = CoreDriver(limits)
        self.core.start()
        if busy:
            self.core.step(self.core.receive(1))
            assert self.core.state.batch_rows
        self.world = Scripted()
        world = self.world
        self.gauge = Gauge(SAMPLE_NS // MB, world, world.read_memory, world)
        assert self.take() is not None

    def take(self) -> events.MemorySampled | None:
        """A reading if one is due now, folded if it is a fact."""
        fact = self.gauge.take(self.core.state)
        if fact is not None:
            self.core.step(fact)
        return fact

    def read(self, usage_mb: float) -> bool:
        """Lets the time of one reading pass; whether it is a fact that usage is this."""
        self.world.now_ns += self.gauge.interval_ns(self.core.state)
        self.world.active_bytes = int(usage_mb * MB) - unallocated_bytes(self.core.state)
        before = self.world.num_readings
        is_fact = self.take() is not None
        assert self.world.num_readings == before + 1
        return is_fact

    @property
    def level(self) -> str:
        return self.core.state.memory.level


def test_a_fact_has_the_numbers_as_they_are_read() -> None:
    driver = Driver()
    driver.world.now_ns += SAMPLE_NS
    driver.world.active_bytes, driver.world.cached_bytes = 3 * MB, 2 * MB
    assert driver.take() == events.MemorySampled(
        active_bytes=3 * MB,
        cached_bytes=2 * MB,
        peak_bytes=3 * MB,
        process_bytes=7 * MB,
        available_bytes=100 * MB,
        age_ns=0,
    )


def test_nothing_is_read_before_it_is_due() -> None:
    driver = Driver()
    driver.world.now_ns += SAMPLE_NS - 1
    driver.world.active_bytes = 9 * MB
    assert driver.take() is None
    assert driver.world.num_readings == 1
    assert driver.gauge.wait_ns(driver.core.state) == 1
    driver.world.now_ns += 1
    assert driver.take() is not None


def test_an_idle_server_is_read_seldom() -> None:
    driver = Driver(busy=False)
    assert driver.gauge.wait_ns(driver.core.state) == IDLE_NS
    driver.core.step(driver.core.receive(1))
    assert driver.gauge.wait_ns(driver.core.state) == SAMPLE_NS


def test_a_request_that_an_operator_holds_is_no_load() -> None:
    driver = Driver()
    driver.core.step(events.HoldRequested(request_id="req_1"))
    driver.core.step(driver.core.freed("req_1"))
    assert driver.core.state.paused
    assert driver.gauge.interval_ns(driver.core.state) == IDLE_NS


def test_without_a_ceiling_nothing_is_read() -> None:
    core = CoreDriver()
    core.start()
    core.step(core.receive(1))
    world = Scripted()
    gauge = Gauge(1, world, world.read_memory, world)
    assert gauge.wait_ns(core.state) is None
    assert gauge.take(core.state) is None
    assert world.num_readings == 0


def test_nothing_is_read_before_the_model_is_loaded() -> None:
    limits = msgspec.structs.replace(LIMITS, ceiling_bytes=CEILING, memory=MEMORY)
    core = CoreDriver(limits)
    core.begin_run()
    world = Scripted()
    assert Gauge(1, world, world.read_memory, world).take(core.state) is None


def test_a_small_change_is_no_fact_and_a_hundredth_of_the_ceiling_is() -> None:
    driver = Driver()
    assert driver.read(2.0)
    assert not driver.read(2.09)
    assert not driver.read(1.91)
    assert driver.read(2.1)
    assert driver.read(2.0)


def test_small_changes_add_up() -> None:
    driver = Driver()
    assert driver.read(2.0)
    assert [driver.read(2.0 + 0.04 * i) for i in (1, 2, 3)] == [False, False, True]


@pytest.mark.parametrize("mark_mb", [8.0, 10.0])
def test_a_mark_that_is_crossed_is_a_fact_either_way(mark_mb: float) -> None:
    driver = Driver()
    driver.read(mark_mb - 0.01)
    assert driver.read(mark_mb)
    assert driver.read(mark_mb - 0.01)


def test_every_reading_over_the_high_mark_is_a_fact_and_the_first_below() -> None:
    driver = Driver()
    assert all(driver.read(9.2) for _ in range(3))
    assert driver.level == "high"
    assert all(driver.read(9.0) for _ in range(3)), "the level stands until 4% below its mark"
    assert driver.level == "high"
    assert driver.read(8.79)
    assert driver.level == ""
    assert not driver.read(8.79)


def test_one_reading_over_the_mark_is_followed_by_one_that_takes_it_back() -> None:
    driver = Driver()
    driver.read(9.15)
    assert driver.read(9.2)
    assert driver.core.state.memory.num_high == 1
    assert driver.read(9.15)
    assert (driver.core.state.memory.num_high, driver.level) == (0, "")


def test_a_reading_over_the_emergency_mark_is_confirmed_at_once_and_only_once() -> None:
    driver = Driver()
    assert driver.read(10.0)
    assert driver.gauge.wait_ns(driver.core.state) == AGAIN_NS
    assert driver.read(10.0)
    assert driver.level == "emergency"
    assert driver.gauge.wait_ns(driver.core.state) == SAMPLE_NS


@pytest.mark.parametrize(("busy", "fact_ns"), [(True, FACT_NS), (False, IDLE_FACT_NS)])
def test_what_says_nothing_new_is_a_fact_now_and_then(busy: bool, fact_ns: int) -> None:
    driver = Driver(busy=busy)
    begun_ns = driver.world.now_ns
    while not driver.read(1.0):
        assert driver.world.now_ns < begun_ns + fact_ns
    assert driver.world.now_ns == begun_ns + fact_ns


def test_a_quiet_server_over_its_mark_writes_few_facts() -> None:
    driver = Driver(busy=False)
    for _ in range(3):
        driver.read(9.3)
    assert driver.level == "high"
    assert driver.gauge.interval_ns(driver.core.state) == IDLE_NS


def test_an_automatic_ceiling_that_moves_is_a_fact() -> None:
    driver = Driver(is_auto=True)
    driver.world.available_bytes = 8 * MB
    assert driver.read(ALONE)
    assert driver.core.state.memory.ceiling_bytes == 9 * MB
    driver.world.available_bytes = 8 * MB - 80_000
    assert not driver.read(ALONE)
    driver.world.available_bytes = 8 * MB - 90_000
    assert driver.read(ALONE)


def test_with_a_ceiling_of_its_own_other_programs_are_nothing_to_it() -> None:
    driver = Driver()
    driver.world.available_bytes = 0
    assert not driver.read(1.0)
    assert driver.core.state.memory.ceiling_bytes == CEILING


def test_a_negative_reading_is_recorded_and_not_believed() -> None:
    driver = Driver()
    usage_bytes = driver.core.state.memory.usage_bytes
    begun_ns = driver.world.now_ns
    while not driver.read(-1_000):
        pass
    assert driver.world.now_ns == begun_ns + FACT_NS
    assert driver.core.state.memory.active_bytes < 0
    assert driver.core.state.memory.usage_bytes == usage_bytes


def test_an_absurd_reading_is_recorded_and_makes_nobody_busy() -> None:
    driver = Driver()
    driver.read(10**12)
    begun_ns = driver.world.now_ns
    assert all(driver.read(10**12) for _ in range(10))
    assert driver.core.state.memory.usage_bytes == 10**12 * MB
    assert driver.world.now_ns - begun_ns >= 8 * SAMPLE_NS, "hardly ever is it read at once again"


def test_while_the_machine_says_nothing_its_last_numbers_stand() -> None:
    driver = Driver(is_auto=True)
    driver.world.broken = True
    with structlog.testing.capture_logs() as logs:
        assert driver.read(2.0)
        assert driver.read(3.0)
    assert len(logs) == 1
    assert driver.core.state.memory.ceiling_bytes == CEILING
    driver.world.broken, driver.world.available_bytes = False, 4 * MB
    assert driver.read(2 + ALONE)
    assert driver.core.state.memory.ceiling_bytes == 7 * MB


def test_whatever_held_the_loop_up_it_goes_on_with_a_new_reading() -> None:
    driver = Driver()
    driver.read(9.2)
    driver.read(9.2)
    assert driver.level == "high"
    sensors = Sensors(KnownRequests(), max_inbox=4, clock=driver.world)
    sensors.gauge = driver.gauge
    driver.world.now_ns += 60 * SAMPLE_NS
    driver.world.active_bytes = 1 * MB
    sensors.wish(events.CancelRequested(request_id="req_1"))
    facts = sensors.collect(driver.core.state).facts
    assert [type(fact) for fact in facts] == [events.CancelRequested, events.MemorySampled]
    driver.core.step(*facts)
    assert driver.level == ""
