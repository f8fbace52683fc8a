"""Admission: by count, by tokens, by bytes, in the order of arrival, and nobody overtakes."""

import msgspec
import pytest

from journal import events
from journal.events import Limits
from scheduler.admission import MAX_ADMISSIONS
from scheduler.request import Phase
from tests.unit.core_driver import LIMITS, MODEL, CoreDriver, engine_ready, only


def limits(**changes: int | None) -> Limits:
    return msgspec.structs.replace(LIMITS, **changes)


def ready(of: Limits = LIMITS) -> CoreDriver:
    driver = CoreDriver(of)
    driver.start()
    return driver


def admitted(driver: CoreDriver, *facts: events.AnyEvent) -> list[int]:
    """The numbers that this step admits."""
    return [d.number for d in only(driver.step(*facts), events.RequestAdmitted)]


def numbers_of(decisions: list[events.Decision]) -> list[int]:
    return [d.number for d in only(decisions, events.RequestAdmitted)]


def cancel(name: str) -> events.CancelRequested:
    return events.CancelRequested(request_id=name)


def test_admission_carries_its_numbers() -> None:
    driver = ready(limits(ceiling_bytes=3_000_000))
    driver.serve(300, 3)
    first, second = [r.event for r in driver.records if isinstance(r.event, events.RequestAdmitted)]
    assert first == events.RequestAdmitted(
        request_id="a",
        number=1,
        num_known_tokens=300,
        num_cached_tokens=0,
        reserved_bytes=512_000,
        in_use_bytes=0,
        ceiling_bytes=3_000_000,
        num_admitted=0,
        solo=False,
    )
    assert (second.in_use_bytes, second.num_admitted, second.reserved_bytes) == (
        512_000,
        1,
        256_000,
    )
    request = driver.request("a")
    assert (request.phase, request.reserved_bytes) == (Phase.PREFILLING, 512_000)
    assert request.admitted_ns == driver.now_ns
    assert driver.state.reserved_bytes == 768_000
    assert driver.state.reserved_tokens == 310 + 13


def test_nothing_is_admitted_until_the_engine_is_ready() -> None:
    driver = CoreDriver()
    driver.begin_run()
    assert numbers_of(driver.serve(5, 5)) == []
    assert admitted(driver, engine_ready()) == [1, 2]


def test_nothing_is_admitted_while_the_server_stops() -> None:
    driver = ready(limits(max_rows=1))
    driver.serve(5, 5)
    driver.step(events.ServerStopping(reason="SIGTERM"))
    assert admitted(driver, cancel("a")) == []
    assert driver.state.waiting == [2]


def test_rows_are_at_most_max_rows() -> None:
    driver = ready(limits(max_rows=2))
    assert numbers_of(driver.serve(5, 5, 5)) == [1, 2]
    assert admitted(driver, events.ClientGone(request_id="nobody")) == []
    assert admitted(driver, cancel("a")) == [3]


def test_model_that_failed_its_self_test_gets_one_row() -> None:
    driver = CoreDriver()
    driver.begin_run()
    driver.step(engine_ready(one_row_only=True))
    assert numbers_of(driver.serve(5, 5)) == [1]
    assert admitted(driver, cancel("a")) == [2]
    driver.start()
    assert driver.state.one_row_only is False


def test_tokens_stay_within_the_budget() -> None:
    driver = ready(limits(token_budget=200))
    assert numbers_of(driver.serve(90, 90, 1)) == [1, 2]
    assert driver.state.reserved_tokens == 200
    assert admitted(driver, cancel("b")) == [3]


def test_tokens_of_rows_that_are_there_already_count() -> None:
    driver = ready(limits(token_budget=200))
    driver.serve(90)
    assert numbers_of(driver.serve(91)) == []
    assert numbers_of(driver.step(cancel("b"), driver.receive(90, name="c"))) == [3]


def test_request_that_is_alone_may_exceed_the_budget() -> None:
    driver = ready(limits(token_budget=200))
    assert numbers_of(driver.serve(500, 1)) == [1]
    assert admitted(driver, cancel("a")) == [2]


@pytest.mark.parametrize(("room", "expected"), [(512_000, [1, 2]), (511_999, [1])])
def test_bytes_stay_under_the_ceiling(room: int, expected: list[int]) -> None:
    driver = ready(limits(ceiling_bytes=1_005_120 + room))
    assert numbers_of(driver.serve(200, 200)) == expected


def test_bytes_that_still_leave_count() -> None:
    driver = ready(limits(ceiling_bytes=1_005_120 + 512_000))
    driver.serve(400, 400)
    assert driver.state.admitted == [1]
    assert admitted(driver, cancel("a")) == []
    assert driver.state.leaving == {1: 512_000}
    assert driver.state.reserved_bytes == 512_000
    assert admitted(driver, driver.freed("a")) == [2]
    assert driver.state.leaving == {}
    assert driver.state.reserved_bytes == 512_000


def test_freed_twice_or_unknown_changes_nothing() -> None:
    driver = ready()
    driver.serve(400, 400)
    driver.step(cancel("a"))
    driver.step(driver.freed("a"), driver.freed("a"))
    driver.step(events.KvFreed(request_id="x", number=77, freed_bytes=9))
    assert driver.state.reserved_bytes == 512_000


def test_small_request_does_not_overtake_the_head_that_does_not_fit() -> None:
    driver = ready(limits(ceiling_bytes=1_005_120 + 768_000))
    assert numbers_of(driver.serve(200, 700, 5)) == [1]
    assert driver.state.waiting == [2, 3]
    assert admitted(driver, driver.receive(5, name="d")) == []
    driver.step(cancel("a"))
    assert admitted(driver, driver.freed("a")) == [2]


def test_cancelled_head_lets_the_next_one_in_at_once() -> None:
    driver = ready(limits(ceiling_bytes=1_005_120 + 768_000))
    driver.serve(200, 700, 5)
    assert admitted(driver, cancel("b")) == [3]


def test_those_that_wait_come_before_those_that_arrive() -> None:
    driver = ready(limits(max_rows=1))
    driver.serve(5, 5)
    assert admitted(driver, driver.receive(5, name="c"), cancel("a")) == [2]
    assert driver.state.waiting == [3]


def test_step_admits_at_most_its_bound_and_the_next_goes_on() -> None:
    driver = CoreDriver(limits(max_rows=100, max_waiting=100))
    driver.begin_run()
    for _ in range(MAX_ADMISSIONS + 3):
        driver.step(driver.receive(5))
    assert admitted(driver, engine_ready()) == list(range(1, MAX_ADMISSIONS + 1))
    assert admitted(driver, driver.chunk_done()) == [33, 34, 35]


def test_held_requests_are_passed_over() -> None:
    driver = CoreDriver()
    driver.begin_run()
    driver.serve(5)
    driver.model = msgspec.structs.replace(MODEL, fingerprint="0" * 64)
    driver.begin_run()
    driver.step(driver.receive(5, name="b"))
    assert admitted(driver, engine_ready(driver.model)) == [2]
    assert driver.state.held == [1]


def test_solo_requests_run_alone() -> None:
    driver = ready()
    driver.serve(5, 5)
    driver.start()
    driver.begin_run()
    driver.step(driver.receive(5, name="c"))
    first = driver.step(engine_ready())
    assert [(d.number, d.solo) for d in only(first, events.RequestAdmitted)] == [(1, True)]
    assert admitted(driver, events.ClientGone(request_id="nobody")) == []
    assert admitted(driver, cancel("a")) == [2]
    assert admitted(driver, cancel("b")) == [3]
    assert only(driver.step(driver.receive(5)), events.RequestAdmitted)[0].solo is False


def test_solo_request_waits_until_the_others_have_left() -> None:
    driver = CoreDriver()
    driver.begin_run()
    driver.serve(700, 5)
    # Too small for the first: the second is in the engine alone, at two deaths.
    driver.limits = limits(ceiling_bytes=1_005_120 + 256_000)
    driver.start()
    driver.start()
    assert (driver.state.held, driver.state.admitted) == ([1], [2])
    driver.limits = LIMITS
    driver.begin_run()
    assert driver.request("b").solo
    assert admitted(driver, engine_ready()) == [1]
    assert admitted(driver, driver.receive(5, name="c")) == []
    assert admitted(driver, cancel("a")) == [2]


def test_retried_request_takes_its_old_place() -> None:
    driver = ready(limits(max_rows=1))
    driver.serve(5, 5)
    assert admitted(driver, driver.failed("a", "prefill")) == [2]
    assert driver.state.waiting == [1]
    driver.step(driver.receive(5, name="c"))
    assert admitted(driver, cancel("b")) == [1]
