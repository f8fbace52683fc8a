"""Held requests go on: in which order, when there is room, and who gets in meanwhile."""

import msgspec
import pytest

from journal import events
from scheduler.admission import MAX_OVERTAKEN_NS
from scheduler.resuming import MAX_RESUMED
from tests.unit.core_driver import kinds, only
from tests.unit.hold_driver import (
    FINE,
    HoldDriver,
    hold_limits,
    paused,
    phases,
    release_all,
    running,
)
from tests.unit.kv_driver import ready


def begun(decisions: list[events.Decision]) -> list[int]:
    return [d.number for d in only(decisions, events.ResumeStarted)]


def let_in(decisions: list[events.Decision]) -> list[int]:
    return [d.number for d in only(decisions, events.RequestAdmitted)]


# When


def test_held_requests_go_on_in_the_order_of_their_first_admission() -> None:
    driver = paused("x", "y", "z", limits=hold_limits(max_rows=4))
    assert driver.state.paused == [1, 2, 3]
    assert begun(release_all(driver)) == [1, 2]
    assert MAX_RESUMED == 2
    assert begun(driver.step(driver.restored("req_a"))) == [3]


def test_operator_and_capacity_are_passed_over() -> None:
    driver = paused("x", "y", "z")
    driver.release("req_c")
    assert phases(driver) == {"req_a": "paused", "req_b": "paused", "req_c": "resuming"}


def test_only_what_fits_under_the_low_mark_goes_on_beside_others() -> None:
    driver = paused("x")
    driver.decode("y")
    # 1,600,000 less a chunk, less what is in use, is just too little for its 48,000 bytes.
    driver.step(driver.sampled(1_600_000 - 48_000))
    assert begun(driver.release("req_a")) == []
    assert begun(driver.step(driver.sampled(1_500_000))) == [1]


def test_nobody_goes_on_while_usage_is_over_a_mark() -> None:
    driver = HoldDriver()
    driver.decode("x", "y")
    driver.press()
    driver.come_to_rest("req_b")
    assert begun(driver.step(driver.sampled(1_800_000))) == [], "the mark is left below 1,760,000"
    assert driver.state.memory.level == "high"
    assert begun(driver.step(driver.sampled(FINE))) == [2]


def test_nobody_goes_on_until_the_mark_is_left_though_there_is_room() -> None:
    driver = HoldDriver()
    driver.decode("x", "y")
    driver.pause("req_b")
    driver.press(1_300_000, 550_000)
    driver.step(driver.reclaimed(0, 1_300_000))
    assert begun(driver.release("req_b")) == []
    assert (driver.state.memory.level, driver.state.reliefs) == ("high", [])
    assert begun(driver.step(driver.sampled(1_300_000))) == [2]


def test_nobody_goes_on_while_an_action_is_under_way() -> None:
    driver = HoldDriver()
    driver.decode("x", "y", "z")
    driver.pause("req_b")
    driver.press()
    driver.step(driver.sampled(FINE))
    assert (driver.state.memory.level, len(driver.state.reliefs)) == ("", 1)
    assert begun(driver.release("req_b")) == []
    driver.step(driver.tail_saved("req_c"))
    assert begun(driver.step(driver.freed("req_c"))) == [2, 3]


def test_request_that_is_alone_goes_on_under_the_ceiling() -> None:
    driver = HoldDriver(hold_limits(reserve="bound"))
    driver.ask("x" * 0, 840, max_tokens=100)
    driver.feed()
    driver.pause("req_a")
    driver.step(driver.sampled(FINE))
    [started] = only(driver.release("req_a"), events.ResumeStarted)
    assert started.solo
    assert 1_000_000 + 5_120 + started.reserved_bytes > 1_600_000, "it is over the low mark"


def test_alone_means_that_the_row_before_is_gone() -> None:
    driver = HoldDriver()
    driver.ask("", 400, max_tokens=10)
    driver.feed()
    driver.pause("req_a")
    driver.ask("", 400, max_tokens=10)
    driver.feed()
    assert begun(driver.release("req_a")) == [], "both are over the low mark together"
    assert begun(driver.step(driver.decoded(req_b="stop"))) == [], "the row is still there"
    assert begun(driver.step(driver.freed("req_b"))) == [1]


def test_row_that_is_dropped_makes_nobody_alone_before_it_is_gone() -> None:
    driver = paused("x")
    driver.decode("y")
    driver.step(driver.sampled(1_950_000))
    assert begun(driver.release("req_a")) == []
    decisions = driver.press(2_050_000)
    assert kinds(decisions)[:4] == [
        "emergency_declared",
        "pause_started",
        "kv_dropped",
        "request_paused",
    ]
    assert begun(decisions) == []


def test_row_that_still_leaves_is_waited_for() -> None:
    driver = HoldDriver()
    driver.decode("x")
    driver.hold("req_a")
    driver.release("req_a")
    driver.step(driver.tail_saved("req_a"))
    assert phases(driver) == {"req_a": "paused"}
    assert begun(driver.step(driver.freed("req_a"))) == [1]


@pytest.mark.parametrize("why", ["stopping", "loading", "crowded", "tokens"])
def test_nobody_goes_on_while_something_stands_against_it(why: str) -> None:
    limits = hold_limits(max_rows=1, token_budget=150) if why == "crowded" else None
    limits = hold_limits(token_budget=150) if why == "tokens" else limits
    driver = paused("x", limits=limits)
    match why:
        case "stopping":
            driver.step(events.ServerStopping(reason="SIGTERM"))
        case "loading":
            driver.begin_run()
        case _:
            driver.decode("y")
    assert begun(driver.release("req_a")) == []


# Solo


def test_solo_request_goes_on_alone() -> None:
    driver = paused("x")
    driver.release("req_a")
    driver.start()
    driver.begin_run()
    assert driver.request("req_a").solo, "its row was being filled at two deaths"
    driver.ask("y", 1)
    decisions = driver.step(ready(driver.model))
    assert (begun(decisions), let_in(decisions)) == ([1], [])
    driver.step(driver.restored("req_a"))
    driver.step(driver.decoded())
    assert driver.state.admitted == [1]
    driver.finish("req_a")
    assert driver.state.admitted == [2]


def test_nobody_goes_on_beside_a_solo_request() -> None:
    driver = paused("x", "y")
    driver.release("req_a")
    driver.start()
    driver.begin_run()
    assert driver.request("req_a").solo
    driver.release("req_b")
    assert begun(driver.step(ready(driver.model))) == [1]


# Newcomers


def short(*, newcomer_tokens: int, active_bytes: int = 1_540_000) -> tuple[HoldDriver, list[int]]:
    """A request is held and does not fit; a smaller one arrives. Who was admitted."""
    driver = HoldDriver(hold_limits())
    driver.ask("", 200, max_tokens=10)
    driver.feed()
    driver.decode("y")
    driver.pause("req_a")
    driver.step(driver.sampled(active_bytes))
    assert begun(driver.release("req_a")) == []
    admitted = let_in(driver.ask("", newcomer_tokens, max_tokens=10))
    return driver, admitted


def test_newcomer_that_fits_with_all_it_may_need_passes_a_held_request() -> None:
    assert short(newcomer_tokens=5)[1] == [3]


def test_newcomer_that_would_take_the_place_of_the_held_one_waits() -> None:
    assert short(newcomer_tokens=60)[1] == []


def test_held_request_is_not_passed_for_ever() -> None:
    driver, _ = short(newcomer_tokens=60)
    driver.pass_ns(MAX_OVERTAKEN_NS)
    assert let_in(driver.ask("", 5, max_tokens=10)) == []


def test_held_request_comes_before_newcomers_when_there_is_room() -> None:
    driver, _ = short(newcomer_tokens=60)
    decisions = driver.step(driver.sampled(1_200_000))
    assert kinds(decisions)[0] == "resume_started"
    assert begun(decisions) == [1]


def test_newcomers_are_passed_in_turn_but_not_for_ever() -> None:
    driver = HoldDriver()
    driver.decode("y")
    driver.step(driver.sampled(1_540_000))
    assert let_in(driver.ask("", 100, max_tokens=10)) == []
    assert let_in(driver.ask("", 5, max_tokens=10)) == [3]
    driver.pass_ns(MAX_OVERTAKEN_NS)
    assert let_in(driver.ask("", 5, max_tokens=10)) == []
    assert driver.state.waiting == [2, 4]


def test_nobody_gets_in_while_usage_is_over_a_mark() -> None:
    driver = HoldDriver()
    driver.decode("x", "y")
    driver.press()
    driver.come_to_rest("req_b")
    assert let_in(driver.ask("", 5, max_tokens=10)) == []
    assert let_in(driver.step(driver.sampled(1_100_000))) == [3]


def test_first_admission_is_when_the_held_one_first_gets_a_row() -> None:
    driver = HoldDriver(hold_limits(max_rows=2))
    driver.step(driver.receive(20, 100, name="req_a"), events.HoldRequested(request_id="req_a"))
    driver.decode("x")
    assert kinds(driver.release("req_a"))[0] == "resume_started"
    first = {r.request_id: r.first_admitted_seq for r in driver.state.requests.values()}
    assert first["req_a"] > first["req_b"] > 0


def test_model_without_marks_goes_on_by_its_reservations() -> None:
    limits = msgspec.structs.replace(hold_limits(), memory=None)
    driver = paused("x", limits=limits)
    driver.decode("y")
    assert begun(driver.release("req_a")) == [1]
    assert driver.state.reserved_bytes == 2 * 128_000


# Those that were in the engine at a death


def test_row_of_a_dead_run_comes_before_a_younger_one_that_was_held() -> None:
    driver = running("x", "y")
    driver.pause("req_b")
    driver.begin_run()
    driver.step(events.ReleaseRequested(request_id="req_b"))
    decisions = driver.step(ready(driver.model))
    assert (let_in(decisions), begun(decisions)) == ([1], [])
    assert begun(driver.step(driver.restored("req_a"))) == [2]


def test_request_that_was_held_needs_what_it_had_also_by_chunks() -> None:
    driver = running("x", "yyyyyyyyyyyy", reserve="chunk", chunk_tokens=16)
    driver.step(events.SavingStopped(reason="disk_full", detail=""))
    driver.hold("req_b")
    driver.step(driver.freed("req_b"))
    driver.step(events.BlocksLost(hashes=("y",), states=(), reason="missing"))
    [started] = only(driver.release("req_b"), events.ResumeStarted)
    assert started.num_cached_tokens == 0
    assert started.reserved_bytes >= 12 * 16 * driver.model.kv_bytes_per_token
