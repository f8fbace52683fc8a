"""What readings of memory come to: marks with hysteresis, actions under way, an `auto` ceiling."""

import msgspec
import pytest

from journal import events
from scheduler.state import Relief
from tests.unit.core_driver import kinds
from tests.unit.hold_driver import CEILING, EMERGENCY, FINE, HIGH, HoldDriver, hold_limits
from tests.unit.kv_driver import ready


def levels(driver: HoldDriver, *active_bytes: int) -> list[str]:
    """The level after each of these readings, with nobody in the engine."""
    found: list[str] = []
    for each in active_bytes:
        driver.step(driver.sampled(each))
        found.append(driver.state.memory.level)
    return found


def test_one_reading_over_a_mark_is_nothing() -> None:
    driver = HoldDriver()
    assert levels(driver, HIGH, FINE, EMERGENCY, FINE, HIGH, FINE) == [""] * 6


def test_two_readings_over_a_mark_make_its_level() -> None:
    assert levels(HoldDriver(), HIGH, HIGH) == ["", "high"]
    assert levels(HoldDriver(), EMERGENCY, EMERGENCY) == ["", "emergency"]
    assert levels(HoldDriver(), HIGH, EMERGENCY, EMERGENCY) == ["", "high", "emergency"]


@pytest.mark.parametrize(
    ("active_bytes", "level"), [(1_839_999, ""), (1_840_000, "high"), (2_000_000, "emergency")]
)
def test_mark_is_reached_by_what_is_not_below_it(active_bytes: int, level: str) -> None:
    assert levels(HoldDriver(), active_bytes, active_bytes)[-1] == level


@pytest.mark.parametrize(("active_bytes", "level"), [(1_760_000, "high"), (1_759_999, "")])
def test_high_mark_is_left_below_the_hysteresis(active_bytes: int, level: str) -> None:
    assert levels(HoldDriver(), HIGH, HIGH, active_bytes)[-1] == level


@pytest.mark.parametrize(
    ("active_bytes", "level"),
    [(1_920_000, "emergency"), (1_919_999, "high"), (1_760_000, "high"), (1_759_999, "")],
)
def test_emergency_mark_is_left_below_the_hysteresis(active_bytes: int, level: str) -> None:
    assert levels(HoldDriver(), EMERGENCY, EMERGENCY, active_bytes)[-1] == level


def test_usage_is_the_larger_of_reading_and_sum_with_what_is_reserved() -> None:
    driver = HoldDriver(hold_limits(memory_bytes=1_000_000))
    driver.decode("x")
    request = driver.request("req_a")
    assert (request.num_cached_tokens, request.reserved_bytes) == (17, 48_000)
    driver.step(driver.sampled(500_000, 9_000))
    # The weights, a row of two steps, a block in memory; 16,000 of the row are not allocated.
    assert driver.state.memory.usage_bytes == 1_000_000 + 32_000 + 16_000 + 16_000
    driver.step(driver.sampled(1_500_000, 9_000))
    assert driver.state.memory.usage_bytes == 1_500_000 + 9_000 + 16_000


def test_writers_leaving_rows_and_the_chunk_count() -> None:
    driver = HoldDriver()
    driver.ask("x", 50)
    driver.step(driver.sampled(0))
    reserved = driver.request("req_a").reserved_bytes
    assert driver.state.memory.usage_bytes == 1_000_000 + reserved + 65 * 10
    driver.feed()
    assert driver.state.index.writing_bytes == 16_000
    driver.step(driver.decoded(req_a="stop"))
    driver.step(driver.sampled(0))
    left = driver.state.leaving[1]
    assert driver.state.memory.usage_bytes == 1_000_000 + left + 16_000


def test_row_that_is_gone_is_taken_from_the_reading() -> None:
    driver = HoldDriver()
    driver.decode("x")
    driver.step(driver.sampled(FINE), events.CancelRequested(request_id="req_a"))
    driver.step(events.KvFreed(request_id="req_a", number=1, freed_bytes=32_000))
    memory = driver.state.memory
    assert (memory.active_bytes, memory.cached_bytes) == (FINE - 32_000, 32_000)


@pytest.mark.parametrize("freed_bytes", [-51_000_000_000, 51_000_000_000])
def test_measurement_that_cannot_be_is_not_believed(freed_bytes: int) -> None:
    driver = HoldDriver()
    driver.decode("x")
    driver.step(driver.sampled(FINE), events.CancelRequested(request_id="req_a"))
    driver.step(events.KvFreed(request_id="req_a", number=1, freed_bytes=freed_bytes))
    memory = driver.state.memory
    assert 0 <= memory.active_bytes <= FINE
    assert memory.cached_bytes >= 0
    assert driver.step(driver.sampled(FINE)) == []


def test_without_marks_a_reading_is_remembered_and_nothing_else() -> None:
    driver = HoldDriver(msgspec.structs.replace(hold_limits(), memory=None))
    driver.decode("x", "y")
    for _ in range(3):
        assert driver.step(driver.sampled(9 * CEILING, 5)) == []
    memory = driver.state.memory
    assert (memory.active_bytes, memory.cached_bytes, memory.level) == (9 * CEILING, 5, "")
    assert memory.sampled_ns == driver.state.now_ns


# Actions under way


def test_action_is_under_way_until_its_effect_is_measured() -> None:
    driver = HoldDriver()
    driver.decode("x", "y")
    driver.press()
    now_ns = driver.state.now_ns
    assert driver.state.reliefs == [Relief("pause", 32_000, now_ns + 2_000_000_000, 2)]
    driver.step(driver.tail_saved("req_b"))
    assert len(driver.state.reliefs) == 1
    driver.step(driver.freed("req_b"))
    assert driver.state.reliefs == []


def test_action_counts_no_longer_when_its_time_is_over() -> None:
    driver = HoldDriver()
    driver.decode("x", "y", "z")
    driver.press()
    driver.pass_ns(2_000_000_000 - 2_000)
    assert driver.step(driver.sampled(HIGH)) == []
    assert len(driver.state.reliefs) == 1
    assert driver.step(driver.sampled(HIGH)) == []
    assert driver.state.reliefs == []
    assert kinds(driver.step(driver.sampled(HIGH)))[0] == "pause_started"


def test_after_an_action_it_takes_two_new_readings() -> None:
    driver = HoldDriver()
    driver.decode("x", "y", "z")
    driver.press()
    driver.step(driver.tail_saved("req_c"))
    driver.step(driver.freed("req_c"))
    assert driver.step(driver.sampled(HIGH)) == []
    assert kinds(driver.step(driver.sampled(HIGH)))[0] == "pause_started"


# An `auto` ceiling


def auto(active_bytes: int, cached_bytes: int, available_bytes: int) -> int | None:
    driver = HoldDriver(hold_limits(is_auto=True, machine_reserve_bytes=300_000))
    driver.step(driver.sampled(active_bytes, cached_bytes, available_bytes))
    return driver.state.memory.ceiling_bytes


def test_auto_ceiling_follows_what_other_programs_leave() -> None:
    assert auto(1_000_000, 100_000, 700_000) == 1_000_000 + 100_000 + 400_000
    assert auto(1_000_000, 100_000, 100_000_000) == CEILING, "never more than at the start"
    assert auto(0, 0, 100_000) == 1, "and never nothing"


def test_explicit_ceiling_stays() -> None:
    driver = HoldDriver(hold_limits(machine_reserve_bytes=300_000))
    driver.step(driver.sampled(1_000_000, 0, 5))
    assert driver.state.memory.ceiling_bytes == CEILING


def test_other_programs_that_take_memory_lead_to_a_pause() -> None:
    driver = HoldDriver(hold_limits(is_auto=True))
    driver.decode("x", "y")
    assert driver.step(driver.sampled(1_300_000, 0, 50_000)) == []
    decisions = driver.step(driver.sampled(1_300_000, 0, 50_000))
    assert kinds(decisions)[0] == "pause_started"


def test_run_begins_with_no_readings() -> None:
    driver = HoldDriver()
    driver.decode("x", "y")
    driver.press()
    driver.begin_run()
    memory = driver.state.memory
    assert (memory.level, memory.num_high, memory.usage_bytes) == ("", 0, 0)
    assert (memory.ceiling_bytes, driver.state.reliefs) == (CEILING, [])
    driver.step(ready(driver.model))
