"""A request that has lost its client is held, waits for one, and ends when nobody comes."""

import msgspec
import pytest

from journal import events
from scheduler.leaving import NO_CLIENT
from scheduler.request import OPEN, Phase
from tests.unit.core_driver import MODEL, kinds, only
from tests.unit.hold_driver import EMERGENCY, phases
from tests.unit.orphan_driver import SECOND, OrphanDriver

SUBJECT = "req_b"
ANOTHER = msgspec.structs.replace(MODEL, fingerprint="0" * 64)
FEW = 6
"""Tokens that each of these requests puts out."""


def in_phase(phase: Phase, **changes: object) -> OrphanDriver:
    """A server on which `req_a` decodes and `req_b` is in this phase."""
    rows = {"max_rows": 1 if phase is Phase.WAITING else 2}
    driver = OrphanDriver(**rows | changes)
    driver.decode_sent("w", max_tokens=FEW)
    driver.send("xyz", max_tokens=FEW)
    if phase not in (Phase.WAITING, Phase.PREFILLING):
        driver.feed()
        driver.save_all()
    if phase in (Phase.PAUSING, Phase.PAUSED, Phase.RESUMING):
        driver.hold(SUBJECT)
    if phase in (Phase.PAUSED, Phase.RESUMING):
        driver.come_to_rest(SUBJECT)
    if phase is Phase.RESUMING:
        driver.release(SUBJECT)
    assert driver.request(SUBJECT).phase is phase
    return driver


def orphan_in(phase: Phase, **changes: object) -> OrphanDriver:
    """The client of `req_b` was lost in this phase, and the server has come to rest without it."""
    driver = in_phase(phase, **changes)
    driver.gone(SUBJECT)
    driver.settle()
    return driver


every_phase = pytest.mark.parametrize("phase", OPEN)
HELD = dict.fromkeys(OPEN, "paused") | {Phase.WAITING: "waiting"}
"""Where a request without a client comes to rest."""

# The client is gone


@pytest.mark.parametrize(
    ("phase", "first", "reason"),
    [
        (Phase.WAITING, [], None),
        (Phase.PREFILLING, ["pause_started"], "client_gone"),
        (Phase.DECODING, ["pause_started", "batch_changed", "tail_save_planned"], "client_gone"),
        (Phase.PAUSING, [], "operator"),
        (Phase.PAUSED, [], "operator"),
        (Phase.RESUMING, ["request_paused"], "client_gone"),
    ],
)
def test_lost_client_holds_its_request_at_once(
    phase: Phase, first: list[str], reason: str | None
) -> None:
    driver = in_phase(phase)
    assert kinds(driver.gone(SUBJECT)) == first
    driver.settle()
    assert driver.ends == {"req_a": "length"}, "others go on"
    assert phases(driver) == {SUBJECT: HELD[phase]}, "there is room, and it stays held"
    request = driver.request(SUBJECT)
    assert (request.orphaned_by, request.needs_client) == ("client_gone", True)
    assert request.pause_reason == reason
    assert request.held_reason == (NO_CLIENT if phase is Phase.WAITING else None)


def test_it_is_held_whatever_its_rank() -> None:
    driver = OrphanDriver()
    driver.decode_sent("x", "y")
    [started] = only(driver.gone("req_a"), events.PauseStarted)
    assert (started.rank, started.num_candidates, started.reason) == (0, 0, "client_gone")


def test_a_held_row_is_saved_and_goes_on_without_computing_anything_again() -> None:
    driver = orphan_in(Phase.DECODING)
    num_output_tokens = driver.request(SUBJECT).num_output_tokens
    driver.attached(SUBJECT)
    [resumed] = only(driver.step(driver.restored(SUBJECT)), events.RequestResumed)
    assert (resumed.num_cached_tokens, resumed.num_lost_tokens) == (48 + num_output_tokens, 0)


def test_without_saved_kv_it_keeps_its_tokens() -> None:
    driver = OrphanDriver(kv=None)
    driver.decode_sent("x", max_tokens=FEW)
    decisions = driver.gone("req_a")
    assert kinds(decisions)[-2:] == ["kv_dropped", "request_paused"]
    driver.step(driver.freed("req_a"))
    driver.attached("req_a")
    driver.settle()
    assert driver.ends == {"req_a": "length"}


def test_one_that_arrives_and_loses_its_client_in_one_step_is_put_aside() -> None:
    driver = OrphanDriver()
    decisions = driver.step(*driver.sent("x"), events.ClientGone(request_id="req_a"))
    assert kinds(decisions) == ["request_queued"]
    assert (driver.state.held, driver.request("req_a").held_reason) == ([1], NO_CLIENT)
    driver.attached("req_a")
    driver.settle()
    assert driver.ends == {"req_a": "length"}


def test_one_that_arrives_and_leaves_again_takes_no_row_from_others() -> None:
    driver = OrphanDriver(max_rows=1)
    decisions = driver.step(
        *driver.sent("x"), events.ClientGone(request_id="req_a"), *driver.sent("y", more=1)
    )
    assert [d.number for d in only(decisions, events.RequestAdmitted)] == [2]


def test_gone_twice_is_gone_once() -> None:
    driver = orphan_in(Phase.DECODING)
    until = dict(driver.state.lost)
    driver.pass_ns(10 * SECOND)
    assert driver.gone(SUBJECT) == []
    assert driver.state.lost == until


def test_a_row_that_finishes_in_the_step_in_which_its_client_leaves_finishes() -> None:
    driver = in_phase(Phase.DECODING)
    token = driver.decoded(req_b="stop")
    decisions = driver.step(token, events.ClientGone(request_id=SUBJECT))
    assert kinds(decisions)[0] == "request_finished"
    assert driver.state.orphans == []
    assert list(driver.state.remembered) == [SUBJECT]


def test_a_row_that_fails_in_the_step_in_which_its_client_leaves_is_put_aside() -> None:
    driver = in_phase(Phase.DECODING)
    driver.step(driver.failed(SUBJECT), events.ClientGone(request_id=SUBJECT))
    assert (driver.state.held, driver.state.orphans) == ([2], [])
    driver.attached(SUBJECT)
    driver.settle()
    assert driver.ends == {"req_a": "length", SUBJECT: "length"}


@every_phase
def test_row_of_an_orphan_that_fails_leaves_it_aside(phase: Phase) -> None:
    driver = in_phase(phase)
    driver.gone(SUBJECT)
    driver.step(driver.failed(SUBJECT))
    driver.settle()
    assert driver.ends == {"req_a": "length"}
    assert driver.request(SUBJECT).stays_held


def test_a_cancel_ends_it_at_once() -> None:
    for phase in OPEN:
        driver = in_phase(phase)
        driver.step(
            events.ClientGone(request_id=SUBJECT), events.CancelRequested(request_id=SUBJECT)
        )
        assert driver.ends == {SUBJECT: "cancel_requested"}
        assert (driver.state.lost, driver.state.orphans) == ({}, [])


def test_pressure_holds_somebody_else_while_it_is_on_its_way_out() -> None:
    driver = OrphanDriver()
    driver.decode_sent("x", "y", "z")
    driver.gone("req_c")
    assert [d.number for d in only(driver.press(EMERGENCY), events.PauseStarted)] == [2]
    driver.come_to_rest("req_b")
    driver.come_to_rest("req_c")
    assert phases(driver) == {"req_a": "decoding", "req_b": "paused", "req_c": "paused"}


def test_one_that_pressure_holds_stays_held_when_memory_is_free_again() -> None:
    driver = OrphanDriver()
    driver.decode_sent("x", "y", max_tokens=FEW)
    driver.press()
    driver.gone("req_b")
    driver.come_to_rest("req_b")
    driver.settle()
    assert phases(driver) == {"req_b": "paused"}
    driver.attached("req_b")
    driver.step(driver.sampled(0))
    driver.settle()
    assert driver.ends == {"req_a": "length", "req_b": "length"}


def test_held_orphans_stand_in_nobodys_way() -> None:
    driver = OrphanDriver(max_rows=1)
    driver.decode_sent("x", max_tokens=FEW)
    driver.lose("req_a")
    driver.decode_sent("y", max_tokens=FEW)
    driver.pause("req_b")
    driver.release("req_b")
    driver.settle()
    assert driver.ends == {"req_b": "length"}


def test_with_a_key_it_runs_on() -> None:
    driver = OrphanDriver()
    driver.send("x", key="k", max_tokens=FEW)
    assert driver.gone("req_a") == []
    assert driver.request("req_a").orphaned_by == "client_gone"
    driver.settle()
    assert driver.ends == {"req_a": "length"}


@pytest.mark.parametrize(("key", "end"), [("", "client_gone"), ("k", "length")])
def test_without_a_grace_it_ends_at_once_unless_it_has_a_key(key: str, end: str) -> None:
    driver = OrphanDriver(grace_ns=0)
    driver.send("x", key=key, max_tokens=FEW)
    driver.gone("req_a")
    driver.settle()
    assert driver.ends == {"req_a": end}


def test_without_these_settings_it_ends_at_once() -> None:
    driver = OrphanDriver(orphans=None)
    driver.decode_sent("x")
    driver.gone("req_a")
    assert driver.ends == {"req_a": "client_gone"}


# Somebody is there again


@every_phase
def test_whoever_attaches_lets_it_go_on(phase: Phase) -> None:
    driver = orphan_in(phase)
    driver.attached(SUBJECT)
    request = driver.request(SUBJECT)
    assert (request.orphaned_by, request.orphaned_ns, request.needs_client) == (None, 0, False)
    assert (driver.state.lost, driver.state.found) == ({}, {})
    driver.settle()
    if request.hold:
        assert driver.request(SUBJECT).phase is Phase.PAUSED, "an operator's wish stands"
        driver.release(SUBJECT)
        driver.settle()
    assert driver.ends == {"req_a": "length", SUBJECT: "length"}


@every_phase
def test_gone_and_back_within_one_step_changes_nothing(phase: Phase) -> None:
    driver = in_phase(phase)
    back = (events.ClientGone(request_id=SUBJECT), events.ClientAttached(request_id=SUBJECT))
    assert driver.step(*back) == []
    assert driver.request(SUBJECT).phase is phase
    assert (driver.state.lost, driver.state.orphans) == ({}, [])


@every_phase
def test_back_before_the_row_has_come_to_rest(phase: Phase) -> None:
    driver = in_phase(phase)
    driver.gone(SUBJECT)
    driver.attached(SUBJECT)
    driver.release(SUBJECT)
    driver.settle()
    assert driver.ends == {"req_a": "length", SUBJECT: "length"}


def test_lost_again_it_has_its_time_anew() -> None:
    driver = orphan_in(Phase.WAITING)
    driver.pass_ns(59 * SECOND)
    driver.attached(SUBJECT)
    driver.gone(SUBJECT)
    driver.settle()
    assert driver.tick(59) == []
    assert kinds(driver.tick(1)) == ["chain_unpinned", "request_cancelled"]
