"""A stop in time: rows go on for a while, and what is left of them is held for the next start."""

import pytest

from journal import events
from scheduler.deadlines import deadline_ns
from scheduler.pausing import MAX_DRAINED
from scheduler.request import Phase
from tests.unit.core_driver import LIMITS, kinds, only
from tests.unit.hold_driver import phases
from tests.unit.orphan_driver import OrphanDriver, orphan_limits
from tests.unit.test_core_orphans import FEW, SUBJECT, every_phase, in_phase

STOP = events.ServerStopping(reason="SIGTERM")
BOTH = {"req_a": "length", SUBJECT: "length"}


def drained(phase: Phase) -> OrphanDriver:
    """The time for rows is over while `req_b` is in this phase."""
    driver = in_phase(phase)
    driver.step(STOP)
    driver.step(events.DrainEnded())
    return driver


def at_rest(driver: OrphanDriver) -> bool:
    """Whether a stop has nothing more to wait for."""
    return not driver.state.admitted and not driver.state.index.writing_bytes


@every_phase
def test_rows_go_on_until_the_drain_is_over(phase: Phase) -> None:
    driver = in_phase(phase)
    assert only(driver.step(STOP), events.PauseStarted) == []
    before = driver.request("req_a").num_output_tokens
    driver.step(driver.decoded())
    assert driver.request("req_a").num_output_tokens == before + 1
    driver.settle()
    ends = {"req_a"} | ({SUBJECT} if phase in (Phase.PREFILLING, Phase.DECODING) else set())
    assert driver.ends.keys() >= ends
    assert at_rest(driver)


@pytest.mark.parametrize(
    ("phase", "first"),
    [
        (Phase.WAITING, []),
        (Phase.PREFILLING, ["pause_started"]),
        (Phase.DECODING, ["pause_started"]),
        (Phase.PAUSING, []),
        (Phase.PAUSED, []),
        (Phase.RESUMING, ["request_paused"]),
    ],
)
def test_then_every_row_is_held(phase: Phase, first: list[str]) -> None:
    driver = in_phase(phase)
    driver.step(STOP)
    decisions = driver.step(events.DrainEnded())
    assert kinds(decisions)[: 1 + len(first)] == ["pause_started", *first]
    assert {d.reason for d in only(decisions, events.PauseStarted)} == {"drain"}
    driver.settle()
    assert at_rest(driver)
    held = "waiting" if phase is Phase.WAITING else "paused"
    assert phases(driver) == {"req_a": "paused", SUBJECT: held}
    assert driver.ends == {}
    assert deadline_ns(driver.state) is None


@every_phase
def test_the_next_start_goes_on_from_there(phase: Phase) -> None:
    driver = drained(phase)
    driver.settle()
    outputs = {r.request_id: r.num_output_tokens for r in driver.state.requests.values()}
    pinned = [r.request_id for r in driver.state.requests.values() if r.pins]
    assert "req_a" in pinned
    first = len(driver.records)
    driver.start(max_rows=2)
    assert [request.deaths for request in driver.state.requests.values()] == [0, 0]
    driver.release(SUBJECT)
    driver.settle()
    assert driver.ends == BOTH
    events_after = [record.event for record in driver.records[first:]]
    for resumed in only(events_after, events.RequestResumed):
        assert resumed.num_lost_tokens == 0
    finished = {e.request_id: e for e in only(events_after, events.RequestFinished)}
    assert all(e.num_output_tokens == FEW for e in finished.values())
    assert all(outputs[name] < FEW for name in outputs)


def test_one_that_finishes_in_the_step_in_which_the_drain_ends_finishes() -> None:
    driver = in_phase(Phase.DECODING)
    driver.step(STOP)
    decisions = driver.step(driver.decoded(req_b="stop"), events.DrainEnded())
    assert kinds(decisions)[0] == "request_finished"
    assert [d.number for d in only(decisions, events.PauseStarted)] == [1]


def test_one_whose_client_leaves_meanwhile_is_held_for_that() -> None:
    driver = in_phase(Phase.DECODING)
    driver.step(STOP)
    decisions = driver.step(events.DrainEnded(), events.ClientGone(request_id=SUBJECT))
    reasons = {d.request_id: d.reason for d in only(decisions, events.PauseStarted)}
    assert reasons == {SUBJECT: "client_gone", "req_a": "drain"}
    driver.settle()
    assert at_rest(driver)


def test_one_that_is_held_by_hand_meanwhile_is_held_for_that() -> None:
    driver = drained(Phase.RESUMING)
    driver.hold("req_a")
    driver.settle()
    driver.start()
    driver.release(SUBJECT)
    driver.settle()
    assert driver.ends == {SUBJECT: "length"}
    driver.release("req_a")
    driver.settle()
    assert driver.ends == BOTH


def test_a_row_that_fails_on_its_way_out_waits() -> None:
    driver = drained(Phase.DECODING)
    driver.step(driver.failed(SUBJECT))
    driver.settle()
    assert at_rest(driver)
    driver.start()
    driver.settle()
    assert driver.ends == BOTH


def test_without_saved_kv_rows_keep_their_tokens() -> None:
    driver = OrphanDriver(kv=None)
    driver.decode_sent("x", "y", max_tokens=FEW)
    driver.step(STOP)
    driver.step(events.DrainEnded())
    driver.settle()
    assert at_rest(driver)
    driver.start(kv=None)
    driver.settle()
    assert driver.ends == BOTH


def test_nobody_gets_in_or_goes_on_while_the_server_stops() -> None:
    driver = in_phase(Phase.PAUSED)
    driver.send("v")
    driver.step(STOP)
    begun = driver.release(SUBJECT) + driver.send("u")
    assert kinds(begun) == ["request_rejected"]
    driver.settle()
    assert phases(driver)[SUBJECT] == "paused"


def test_many_rows_are_held_a_few_in_each_step() -> None:
    driver = OrphanDriver(orphan_limits(LIMITS, max_rows=20, max_waiting=20))
    for _ in range(20):
        driver.send("", max_tokens=FEW)
    assert len(driver.state.batch_rows) == 20
    driver.step(STOP)
    counts = [len(only(driver.step(events.DrainEnded()), events.PauseStarted))]
    while deadline_ns(driver.state) == driver.state.now_ns and counts[-1]:
        counts.append(len(only(driver.tick(), events.PauseStarted)))
    assert counts[:3] == [MAX_DRAINED, MAX_DRAINED, 4]
    driver.settle()
    assert at_rest(driver)
    assert set(phases(driver).values()) == {"paused"}


def test_a_drain_that_ends_before_anybody_runs_changes_nothing() -> None:
    driver = OrphanDriver()
    driver.step(STOP)
    assert driver.step(events.DrainEnded()) == []
    driver.start()
    assert not driver.state.drained
