"""An Idempotency-Key is held by one request, and whoever sends it again gets that one's answer."""

import pytest

from journal import events
from tests.unit.core_driver import kinds, only
from tests.unit.orphan_driver import SECOND, OrphanDriver
from tests.unit.test_core_orphans import FEW


def kept(*, until: str, **changes: object) -> OrphanDriver:
    """A request with a key, somewhere in its life."""
    driver = OrphanDriver(**{"max_rows": 1} | changes)
    if until == "waiting":
        driver.decode_sent("w", max_tokens=FEW)
    driver.send("x", key="k", max_tokens=FEW)
    if until in ("decoding", "paused"):
        driver.feed()
    if until == "paused":
        driver.pause("req_a")
    if until == "finished":
        driver.settle()
    return driver


@pytest.mark.parametrize("until", ["waiting", "prefilling", "decoding", "paused", "finished"])
def test_the_same_key_is_the_same_request(until: str) -> None:
    driver = kept(until=until)
    holder = "req_b" if until == "waiting" else "req_a"
    decisions = driver.send("x", key="k")
    assert kinds(decisions)[:2] == ["request_joined", "request_adopted"]
    adopter = driver.name_of(driver.state.next_number - 1)
    driver.send("x", key="k")
    again = driver.name_of(driver.state.next_number - 1)
    assert driver.joined == {adopter: holder, again: holder}, "as often as it is sent"
    [adopted] = only(decisions, events.RequestAdopted)
    assert (adopted.by, adopted.orphaned_by, adopted.orphaned_ns) == ("key", None, 0)


def test_a_key_is_held_within_the_step_in_which_it_comes() -> None:
    driver = OrphanDriver()
    decisions = driver.step(*driver.sent("x", key="k"), *driver.sent("x", key="k", more=1))
    assert kinds(decisions)[:3] == ["request_queued", "request_joined", "request_adopted"]
    assert driver.joined == {"req_b": "req_a"}


@pytest.mark.parametrize("until", ["waiting", "decoding", "finished"])
def test_a_key_with_another_question_is_refused(until: str) -> None:
    driver = kept(until=until)
    [refused] = only(driver.send("y", key="k"), events.RequestRejected)
    assert (refused.reason, refused.numbers) == ("key_reused", None)
    driver.send("x", key="k")
    assert len(driver.joined) == 1, "the key stays with the first"


def test_another_question_with_the_same_key_in_the_same_step_is_refused() -> None:
    driver = OrphanDriver()
    decisions = driver.step(*driver.sent("x", key="k"), *driver.sent("y", key="k", more=1))
    assert kinds(decisions)[:2] == ["request_queued", "request_rejected"]


def test_a_key_is_held_in_the_step_in_which_its_request_finishes() -> None:
    driver = kept(until="decoding")
    decisions = driver.step(driver.decoded(req_a="stop"), *driver.sent("x", key="k"))
    assert kinds(decisions)[:3] == ["request_finished", "request_joined", "request_adopted"]


def test_a_key_is_held_in_the_step_in_which_the_row_of_its_request_fails() -> None:
    driver = kept(until="decoding")
    driver.step(driver.failed("req_a"), *driver.sent("x", key="k"))
    assert driver.joined == {"req_b": "req_a"}


def test_a_key_is_kept_for_so_long_after_the_end() -> None:
    driver = kept(until="finished", retention_ns=10 * SECOND)
    driver.tick(9)
    driver.send("x", key="k")
    driver.tick(1)
    driver.send("x", key="k", max_tokens=FEW)
    assert driver.joined == {"req_b": "req_a"}
    driver.settle()
    driver.send("x", key="k")
    assert driver.joined["req_d"] == "req_c"


def test_what_has_finished_alone_has_been_without_a_client_until_it_is_read() -> None:
    driver = kept(until="decoding")
    driver.gone("req_a")
    driver.settle()
    adopted = [only(driver.send("x", key="k"), events.RequestAdopted) for _ in range(2)]
    assert [event.orphaned_by for [event] in adopted] == ["client_gone", None]


def test_a_start_may_keep_answers_for_less() -> None:
    driver = kept(until="finished")
    ended_ns = driver.state.remembered["req_a"].ended_ns
    driver.start(retention_ns=10 * SECOND)
    assert driver.state.remembered["req_a"].until_ns == ended_ns + 10 * SECOND
    driver.start(retention_ns=20 * SECOND)
    driver.tick(8)
    driver.send("x", key="k")
    assert driver.joined == {"req_b": "req_a"}
    driver.pass_ns(2 * SECOND)
    driver.start()
    assert (driver.state.remembered, driver.state.keys) == ({}, {})


def test_without_retention_a_key_ends_with_its_request() -> None:
    driver = kept(until="finished", retention_ns=0)
    assert (driver.state.keys, driver.state.remembered) == ({}, {})


@pytest.mark.parametrize("until", ["waiting", "decoding", "paused"])
@pytest.mark.parametrize("together", [False, True])
def test_who_is_cancelled_gives_its_key_up(until: str, *, together: bool) -> None:
    driver = kept(until=until)
    name = "req_b" if until == "waiting" else "req_a"
    cancel = events.CancelRequested(request_id=name)
    if together:
        driver.step(cancel, *driver.sent("y", key="k"))
    else:
        driver.step(cancel)
        driver.send("y", key="k")
    assert driver.joined == {}
    assert driver.state.keys == {"key k": driver.name_of(driver.state.next_number - 1)}


def test_who_is_given_up_gives_its_key_up() -> None:
    driver = kept(until="decoding", max_retries=0)
    driver.step(driver.failed("req_a"))
    assert driver.state.keys == {}


def test_who_is_refused_has_no_key() -> None:
    driver = OrphanDriver(max_waiting=0)
    driver.send("x", key="k")
    assert driver.state.keys == {}


def test_a_key_is_never_adopted_by_what_it_asks() -> None:
    driver = kept(until="decoding")
    driver.gone("req_a")
    driver.send("x")
    assert driver.joined == {}
    driver = kept(until="finished")
    driver.send("x")
    assert driver.joined == {}


def test_a_key_that_a_start_holds_is_not_adopted_by_what_it_asks_either() -> None:
    driver = kept(until="decoding")
    driver.start(on_restart="hold")
    assert list(driver.state.found) == [1]
    driver.send("x")
    assert driver.joined == {}


def test_adopting_switched_off_keys_still_hold() -> None:
    driver = kept(until="decoding", adopt=False)
    driver.send("x", key="k")
    assert driver.joined == {"req_b": "req_a"}


@pytest.mark.parametrize("until", ["decoding", "paused", "finished"])
def test_keys_survive_a_start(until: str) -> None:
    driver = kept(until=until)
    driver.start()
    driver.send("x", key="k")
    assert driver.joined == {"req_b": "req_a"}


def test_a_key_says_how_long_its_request_had_no_client() -> None:
    driver = kept(until="decoding")
    driver.gone("req_a")
    driver.pass_ns(5 * SECOND)
    [adopted] = only(driver.send("x", key="k"), events.RequestAdopted)
    assert (adopted.orphaned_by, adopted.orphaned_ns) == ("client_gone", 5 * SECOND + 1_000)
    assert driver.request("req_a").orphaned_by is None
