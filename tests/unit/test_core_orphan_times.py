"""How long a request may be without its client, and what comes between: an operator, or a server
that cannot run it.
"""

import msgspec
import pytest

from journal import events
from scheduler.adopting import MAX_LOOKED_AT
from scheduler.deadlines import deadline_ns
from scheduler.leaving import NO_CLIENT
from scheduler.policy import MAX_OVERDUE
from scheduler.request import Phase
from tests.unit.core_driver import LIMITS, kinds, only
from tests.unit.kv_driver import ready
from tests.unit.orphan_driver import SECOND, OrphanDriver, orphan_limits
from tests.unit.test_core_orphans import ANOTHER, FEW, SUBJECT, every_phase, in_phase, orphan_in

# An operator


@every_phase
def test_an_operator_lets_it_go_on_without_a_client(phase: Phase) -> None:
    driver = orphan_in(phase)
    driver.release(SUBJECT)
    assert (driver.state.lost, list(driver.state.found)) == ({}, [2])
    assert driver.request(SUBJECT).orphaned_by == "client_gone"
    driver.settle()
    assert driver.ends == {"req_a": "length", SUBJECT: "length"}


def test_released_it_is_given_the_time_of_one_that_a_start_has_found() -> None:
    driver = OrphanDriver(max_rows=1)
    driver.decode_sent("x")
    driver.lose("req_a")
    driver.decode_sent("y")
    driver.release("req_a")
    driver.tick(1_799)
    assert driver.ends == {}
    driver.tick(1)
    assert driver.ends == {"req_a": "nobody_attached"}


@every_phase
def test_held_by_hand_and_without_a_client_it_needs_both(phase: Phase) -> None:
    driver = in_phase(phase)
    driver.step(events.ClientGone(request_id=SUBJECT), events.HoldRequested(request_id=SUBJECT))
    driver.settle()
    assert driver.request(SUBJECT).phase is Phase.PAUSED
    driver.attached(SUBJECT)
    driver.settle()
    assert driver.request(SUBJECT).phase is Phase.PAUSED
    driver.release(SUBJECT)
    driver.settle()
    assert driver.ends == {"req_a": "length", SUBJECT: "length"}


def test_one_that_is_put_aside_can_be_held_by_hand() -> None:
    driver = orphan_in(Phase.WAITING)
    assert kinds(driver.hold(SUBJECT)) == ["request_paused"]
    assert (driver.state.held, driver.state.paused) == ([], [2])
    assert driver.request(SUBJECT).held_reason is None


# Nobody comes


@every_phase
def test_when_its_time_is_over_it_ends(phase: Phase) -> None:
    driver = in_phase(phase)
    driver.gone(SUBJECT)
    until_ns = driver.now_ns + 60 * SECOND
    driver.settle()
    assert deadline_ns(driver.state) == until_ns
    driver.now_ns = until_ns - 2_000
    driver.step(events.ClockTicked())
    assert SUBJECT in driver.state.numbers
    driver.step(events.ClockTicked())
    assert driver.ends == {"req_a": "length", SUBJECT: "client_gone"}
    driver.settle()
    assert (driver.state.index.tails, driver.state.lost) == ({}, {})
    assert not any(block.pins for block in driver.state.index.blocks.values())
    assert deadline_ns(driver.state) is None


def test_its_time_may_be_over_before_its_row_has_come_to_rest() -> None:
    driver = OrphanDriver()
    driver.decode_sent("x")
    driver.gone("req_a")
    [end] = only(driver.tick(60), events.RequestCancelled)
    assert (end.reason, end.had_row) == ("client_gone", True)


def test_many_end_a_few_in_each_step() -> None:
    driver = OrphanDriver(max_waiting=100, max_rows=1)
    num_lost = MAX_LOOKED_AT + MAX_OVERDUE
    names = [driver.name_of(number) for number in range(1, num_lost + 1)]
    for more in range(num_lost):
        driver.send("x" if more else "y")
    driver.gone(*names)
    driver.settle()
    counts = [len(only(driver.tick(60), events.RequestCancelled))]
    while driver.state.requests:
        assert deadline_ns(driver.state) == driver.state.lost[min(driver.state.lost)]
        counts.append(len(only(driver.tick(), events.RequestCancelled)))
    assert counts == [MAX_OVERDUE] * (num_lost // MAX_OVERDUE)
    assert deadline_ns(driver.state) is None


def test_of_too_many_those_end_that_have_waited_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("adopting", "deadlines"):
        monkeypatch.setattr(f"scheduler.{module}.MAX_LOST", 3)
    driver = OrphanDriver(max_waiting=100, max_rows=1)
    for _ in range(16):
        driver.send("x")
    driver.gone("req_b", "req_c", "req_d")
    assert deadline_ns(driver.state) == driver.state.lost[2]
    driver.gone("req_a")
    assert driver.ends == {"req_b": "client_gone"}
    driver.gone(*(driver.name_of(number) for number in range(5, 17)))
    assert len(driver.ends) == 1 + MAX_OVERDUE
    assert deadline_ns(driver.state) == driver.state.now_ns
    driver.settle()
    assert list(driver.state.lost) == [14, 15, 16]


def test_deadlines_of_all_kinds_share_one_bound() -> None:
    aged = msgspec.structs.replace(LIMITS, max_age_ns=60 * SECOND)
    driver = OrphanDriver(orphan_limits(aged, max_waiting=100, max_rows=1))
    for _ in range(12):
        driver.send("x")
    driver.step(*(events.ClientGone(request_id=driver.name_of(n)) for n in range(3, 9)))
    ends = [only(driver.tick(60), events.RequestCancelled)]
    ends.append(only(driver.tick(), events.RequestCancelled))
    assert [len(some) for some in ends] == [MAX_OVERDUE, 4]
    assert {end.reason for some in ends for end in some} == {"deadline"}


# What this server cannot run


def test_one_that_this_server_cannot_run_waits_for_that_first() -> None:
    driver = OrphanDriver(max_rows=1)
    driver.decode_sent("w", max_tokens=FEW)
    driver.send("x", max_tokens=FEW)
    driver.step(ready(ANOTHER))
    driver.gone("req_b")
    assert driver.request("req_b").held_reason == "other_model"
    driver.step(ready(driver.model))
    assert driver.request("req_b").held_reason == NO_CLIENT
    driver.attached("req_b")
    assert driver.state.waiting == [2]


def test_a_client_that_comes_back_changes_no_other_reason() -> None:
    driver = OrphanDriver(max_rows=1)
    driver.decode_sent("w")
    driver.send("x")
    driver.gone("req_b")
    driver.step(ready(ANOTHER))
    assert driver.request("req_b").held_reason == "other_model"
    driver.attached("req_b")
    assert (driver.state.held, driver.state.waiting) == ([2], [])
