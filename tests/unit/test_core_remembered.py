"""What has finished while it had no client is given to the one that asks it again, for a time."""

import pytest

from journal import events
from tests.unit.core_driver import kinds, only
from tests.unit.orphan_driver import SECOND, OrphanDriver
from tests.unit.test_core_orphans import FEW


def found_by_a_start(**changes: object) -> OrphanDriver:
    """One request that a start has found and let run to its end, with nobody there."""
    driver = OrphanDriver(**changes)
    driver.decode_sent("x", max_tokens=FEW)
    driver.start()
    driver.settle()
    assert driver.ends == {"req_a": "length"}
    return driver


def test_what_has_finished_without_a_client_is_given_to_one() -> None:
    driver = found_by_a_start()
    decisions = driver.send("x")
    assert kinds(decisions) == ["request_joined", "request_adopted"]
    [adopted] = only(decisions, events.RequestAdopted)
    assert (adopted.orphaned_by, adopted.num_output_tokens) == ("restart", FEW)
    assert driver.state.remembered == {}
    driver.send("x")
    assert driver.joined == {"req_b": "req_a"}, "once"


def test_finished_and_sent_again_in_one_step() -> None:
    driver = OrphanDriver()
    driver.decode_sent("x", max_tokens=FEW)
    driver.start()
    driver.step(driver.restored("req_a"))
    driver.feed()
    decisions = driver.step(driver.decoded(req_a="stop"), *driver.sent("x"))
    assert kinds(decisions)[:3] == ["request_finished", "request_joined", "request_adopted"]
    assert (driver.state.remembered, driver.joined) == ({}, {"req_b": "req_a"})


def test_finished_lost_and_sent_again_in_one_step() -> None:
    driver = OrphanDriver()
    driver.decode_sent("x", max_tokens=FEW)
    token = driver.decoded(req_a="stop")
    driver.step(token, events.ClientGone(request_id="req_a"), *driver.sent("x"))
    assert (driver.state.remembered, driver.joined) == ({}, {"req_b": "req_a"})


def test_what_has_finished_is_given_away_for_as_long_as_it_might_have_run() -> None:
    driver = found_by_a_start()
    driver.tick(1_801)
    driver.send("x")
    assert driver.joined == {}


def test_what_is_not_kept_is_given_to_nobody() -> None:
    driver = found_by_a_start(retention_ns=10 * SECOND)
    driver.tick(10)
    driver.send("x")
    assert driver.joined == {}


def test_finished_and_sent_again_in_one_step_where_nothing_is_kept() -> None:
    driver = OrphanDriver(retention_ns=0)
    driver.decode_sent("x", max_tokens=FEW)
    token = driver.decoded(req_a="stop")
    driver.step(token, events.ClientGone(request_id="req_a"), *driver.sent("x"))
    assert (driver.state.remembered, driver.joined) == ({}, {"req_b": "req_a"})


def test_what_has_been_read_is_given_to_nobody_else() -> None:
    driver = found_by_a_start()
    driver.attached("req_a")
    driver.send("x")
    assert driver.joined == {}


def test_one_that_had_its_client_at_its_end_is_not_remembered() -> None:
    driver = OrphanDriver()
    driver.decode_sent("x", max_tokens=FEW)
    driver.settle()
    assert (driver.ends, driver.state.remembered) == ({"req_a": "length"}, {})


def test_what_is_remembered_survives_a_start() -> None:
    driver = found_by_a_start()
    driver.start()
    driver.send("x")
    assert driver.joined == {"req_b": "req_a"}


def test_so_many_are_remembered_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler.orphans.MAX_REMEMBERED", 3)
    driver = OrphanDriver()
    for number in range(5):
        driver.send("x", key=str(number), max_tokens=1)
        driver.settle()
    assert list(driver.state.remembered) == ["req_c", "req_d", "req_e"]
    assert list(driver.state.keys) == ["key 2", "key 3", "key 4"]
    driver.tick(3_600)
    driver.send("x", key="5", max_tokens=1)
    driver.settle()
    assert list(driver.state.remembered) == ["req_f"], "those whose time is over make place"
