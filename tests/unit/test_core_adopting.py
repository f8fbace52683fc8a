"""A request that is sent again takes the place of the client that was lost, once."""

import msgspec
import pytest

from journal import events
from scheduler.effects import AcceptRequest, JoinRequest, RejectRequest
from scheduler.request import Phase
from scheduler.sensors import MAX_EVENTS, MAX_FACTS
from tests.unit.core_driver import LIMITS, kinds, only
from tests.unit.hold_driver import phases
from tests.unit.kv_driver import ready
from tests.unit.orphan_driver import SECOND, OrphanDriver, orphan_limits
from tests.unit.test_core_orphans import ANOTHER, FEW, SUBJECT, every_phase, orphan_in


def send_again(driver: OrphanDriver, **details: object) -> list[events.Decision]:
    """What was lost as `req_b` is sent once more."""
    return driver.send("xyz", max_tokens=FEW, **details)


def lost(chain: str = "x", **changes: object) -> OrphanDriver:
    """One request, which has lost its client and is held."""
    driver = OrphanDriver(**changes)
    driver.decode_sent(chain, max_tokens=FEW)
    driver.lose("req_a")
    return driver


# By what it asks


@every_phase
def test_the_request_that_is_sent_again_adopts_the_orphan(phase: Phase) -> None:
    driver = orphan_in(phase)
    since_ns = driver.request(SUBJECT).orphaned_ns
    num_output_tokens = driver.request(SUBJECT).num_output_tokens
    decisions = send_again(driver)
    assert decisions[:2] == [
        events.RequestJoined(request_id="req_c", number=3, joined_id=SUBJECT, by="content"),
        events.RequestAdopted(
            request_id=SUBJECT,
            number=2,
            adopter_id="req_c",
            adopter_number=3,
            by="content",
            orphaned_by="client_gone",
            orphaned_ns=driver.now_ns - since_ns,
            num_output_tokens=num_output_tokens,
        ),
    ]
    assert [type(effect) for effect in driver.effects if isinstance(effect, STREAM)] == [
        JoinRequest
    ]
    assert list(driver.state.requests) == [2], "nothing is left of the arrival"
    driver.release(SUBJECT)
    driver.settle()
    assert driver.ends == {"req_a": "length", SUBJECT: "length"}


STREAM = (AcceptRequest, JoinRequest, RejectRequest)


@pytest.mark.parametrize(
    ("phase", "begins"),
    [
        (Phase.WAITING, ["request_admitted", "prefill_chunk_planned"]),
        (Phase.DECODING, ["resume_started"]),
    ],
)
def test_it_goes_on_in_the_very_step_in_which_it_is_adopted(
    phase: Phase, begins: list[str]
) -> None:
    driver = orphan_in(phase)
    assert kinds(send_again(driver)) == ["request_joined", "request_adopted", *begins]


def test_lost_and_sent_again_in_one_step_it_keeps_its_row() -> None:
    driver = OrphanDriver()
    driver.decode_sent("x", max_tokens=FEW)
    decisions = driver.step(events.ClientGone(request_id="req_a"), *driver.sent("x"))
    assert kinds(decisions) == ["request_joined", "request_adopted"]
    assert phases(driver) == {"req_a": "decoding"}


def test_adopted_while_an_operator_holds_it_stays_held() -> None:
    driver = lost()
    driver.hold("req_a")
    assert kinds(driver.send("x")) == ["request_joined", "request_adopted"]
    driver.settle()
    assert phases(driver) == {"req_a": "paused"}
    driver.release("req_a")
    driver.settle()
    assert driver.ends == {"req_a": "length"}


def test_adopted_and_held_in_one_step() -> None:
    driver = OrphanDriver(max_rows=1)
    driver.decode_sent("w", max_tokens=FEW)
    driver.send("x", max_tokens=FEW)
    driver.gone("req_b")
    driver.step(*driver.sent("x"), events.HoldRequested(request_id="req_b"))
    driver.settle()
    assert (phases(driver), driver.joined) == ({"req_b": "paused"}, {"req_c": "req_b"})


def test_an_equal_request_that_has_its_client_is_a_twin() -> None:
    driver = OrphanDriver()
    driver.decode_sent("x", max_tokens=FEW)
    driver.send("x", max_tokens=FEW)
    driver.step(*driver.sent("x", max_tokens=FEW), *driver.sent("x", max_tokens=FEW, more=1))
    driver.settle()
    assert driver.joined == {}
    assert driver.ends == dict.fromkeys(("req_a", "req_b", "req_c", "req_d"), "length")


def test_of_two_that_send_it_again_the_second_is_a_request_of_its_own() -> None:
    driver = lost()
    decisions = driver.step(*driver.sent("x"), *driver.sent("x", more=1))
    assert kinds(decisions)[:3] == ["request_joined", "request_adopted", "request_queued"]
    assert driver.joined == {"req_b": "req_a"}


def test_of_two_orphans_the_older_is_adopted_first() -> None:
    driver = OrphanDriver()
    driver.send("x")
    driver.send("x")
    driver.gone("req_b")
    driver.gone("req_a")
    driver.send("x")
    driver.send("x")
    assert driver.joined == {"req_c": "req_a", "req_d": "req_b"}


def test_adopted_once_it_can_be_lost_and_adopted_again() -> None:
    driver = lost()
    for _ in range(2):
        driver.send("x")
        driver.step(driver.restored("req_a"))
        driver.lose("req_a")
    assert driver.joined == {"req_b": "req_a", "req_c": "req_a"}


def differently(driver: OrphanDriver, what: str) -> list[events.AnyEvent]:
    """The same request but for one thing."""
    [arrival, *named] = driver.sent("y" if what == "content_digest" else "x")
    if what != "content_digest":
        arrival = msgspec.structs.replace(arrival, **{what: "0" * 64})
    return [arrival, *named]


@pytest.mark.parametrize("what", ["content_digest", "session_digest", "model_fingerprint"])
def test_what_is_asked_by_whom_and_of_which_model_must_be_the_same(what: str) -> None:
    driver = lost()
    driver.step(*differently(driver, what))
    assert driver.joined == {}
    assert list(driver.state.lost) == [1]


def test_a_session_may_be_none() -> None:
    driver = OrphanDriver()
    driver.send("x", session="one")
    driver.gone("req_a")
    driver.send("x")
    driver.send("x", session="one")
    assert driver.joined == {"req_c": "req_a"}


def test_without_a_digest_nothing_is_known_of_it() -> None:
    driver = OrphanDriver()
    driver.ask("x", 1)
    driver.gone("req_a")
    driver.ask("x", 1)
    assert driver.joined == {}


def test_it_can_be_switched_off() -> None:
    driver = lost(adopt=False)
    driver.send("x")
    assert driver.joined == {}


@pytest.mark.parametrize("end", ["cancel", "deadline", "age"])
def test_what_ends_in_this_step_is_adopted_by_nobody(end: str) -> None:
    driver = OrphanDriver(orphan_limits(msgspec.structs.replace(LIMITS, max_age_ns=90 * SECOND)))
    driver.decode_sent("x", max_tokens=FEW)
    driver.lose("req_a")
    if end == "age":
        driver.release("req_a")
    driver.pass_ns({"cancel": 0, "deadline": 60, "age": 90}[end] * SECOND)
    cancel = [events.CancelRequested(request_id="req_a")] if end == "cancel" else []
    decisions = driver.step(*cancel, *driver.sent("x"))
    assert len(only(decisions, events.RequestCancelled)) == 1
    assert driver.joined == {}


def test_of_many_that_are_overdue_none_is_adopted() -> None:
    driver = OrphanDriver(max_waiting=40)
    driver.step(*(fact for more in range(20) for fact in driver.sent("x", more=more)))
    driver.gone(*(driver.name_of(number) for number in range(1, 21)))
    driver.pass_ns(60 * SECOND)
    driver.send("x")
    assert len(driver.state.lost) == 12
    assert driver.joined == {}


def test_one_whose_row_fails_in_this_step_is_adopted() -> None:
    driver = OrphanDriver()
    driver.decode_sent("x", max_tokens=FEW)
    lost_again = (driver.failed("req_a"), events.ClientGone(request_id="req_a"))
    decisions = driver.step(*lost_again, *driver.sent("x"))
    assert kinds(decisions)[:3] == ["request_retried", "request_joined", "request_adopted"]
    driver.settle()
    assert driver.ends == {"req_a": "length"}


def test_one_whose_row_fails_for_the_last_time_is_not() -> None:
    driver = OrphanDriver(max_retries=0)
    driver.decode_sent("x", max_tokens=FEW)
    lost_again = (driver.failed("req_a"), events.ClientGone(request_id="req_a"))
    driver.step(*lost_again, *driver.sent("x"))
    assert (driver.ends, driver.joined) == ({"req_a": "engine_failed"}, {})


def test_what_this_server_cannot_run_is_not_adopted() -> None:
    driver = OrphanDriver(max_rows=1)
    driver.decode_sent("w")
    driver.send("x")
    driver.gone("req_b")
    driver.step(ready(ANOTHER))
    driver.send("x")
    assert driver.joined == {}


def test_what_is_adopted_may_be_as_long_as_it_was_when_the_queue_is_full() -> None:
    driver = OrphanDriver(max_waiting=1, max_rows=1)
    driver.decode_sent("w")
    driver.send("x")
    driver.gone("req_b")
    assert kinds(driver.send("x")) == ["request_joined", "request_adopted"]


def test_a_client_that_left_as_it_arrived_takes_nobodys_place() -> None:
    driver = lost()
    driver.step(*driver.sent("x"), events.ClientGone(request_id="req_b"))
    assert driver.joined == {}
    assert list(driver.state.lost) == [1, 2]


def test_arrived_left_and_sent_again_in_one_step() -> None:
    driver = OrphanDriver()
    first = driver.sent("x", max_tokens=FEW)
    driver.step(*first, events.ClientGone(request_id="req_a"), *driver.sent("x", more=1))
    assert driver.joined == {"req_b": "req_a"}
    driver.settle()
    assert driver.ends == {"req_a": "length"}


def test_arrived_left_refused_and_sent_again_in_one_step() -> None:
    driver = OrphanDriver(max_waiting=0)
    first = driver.sent("x")
    decisions = driver.step(
        *first, events.ClientGone(request_id="req_a"), *driver.sent("x", more=1)
    )
    assert kinds(decisions) == ["request_rejected", "request_rejected"]


def test_while_the_server_stops_nothing_is_adopted() -> None:
    for key in ("", "k"):
        driver = OrphanDriver()
        driver.send("x", key=key)
        driver.gone("req_a")
        decisions = driver.step(events.ServerStopping(reason="SIGTERM"), *driver.sent("x", key=key))
        assert [d.reason for d in only(decisions, events.RequestRejected)] == ["server_stopping"]


def test_one_that_runs_solo_goes_on_alone() -> None:
    driver = OrphanDriver(max_deaths=1)
    driver.decode_sent("x")
    driver.start()
    driver.step(driver.restored("req_a"))
    driver.feed()
    assert driver.request("req_a").solo
    driver.attached("req_a")
    driver.gone("req_a")
    driver.settle()
    driver.decode_sent("y", max_tokens=FEW)
    driver.send("x")
    assert phases(driver) == {"req_a": "paused", "req_b": "decoding"}
    driver.settle()
    assert driver.ends == {"req_b": "length", "req_a": "length"}


# Bounds


@pytest.mark.parametrize("by", ["content", "key"])
def test_a_step_full_of_arrivals_that_adopt_keeps_its_bound(by: str) -> None:
    limits = msgspec.structs.replace(LIMITS, max_waiting=100, max_rows=64)
    driver = OrphanDriver(orphan_limits(limits, chunk_tokens=1_024))
    key = "k" if by == "key" else ""
    for _ in range(MAX_FACTS):
        driver.send("", max_tokens=1, key=key)
    if by == "content":
        driver.gone(*(driver.name_of(number) for number in range(1, MAX_FACTS + 1)))
        assert len(driver.state.lost) == MAX_FACTS
    facts = [fact for more in range(MAX_FACTS) for fact in driver.sent("", more=more, key=key)]
    assert len(facts) == MAX_FACTS
    decisions = driver.step(*facts)
    assert len(only(decisions, events.RequestJoined)) == MAX_FACTS
    assert len(facts) + len(decisions) <= MAX_EVENTS
