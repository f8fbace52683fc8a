"""What becomes at a start of requests whose clients the end of the server before has cut off."""

import pytest

from journal import events
from scheduler.deadlines import deadline_ns
from scheduler.evolve import fold
from scheduler.leaving import NO_CLIENT
from scheduler.policy import MAX_OVERDUE
from scheduler.request import Phase
from tests.unit.core_driver import kinds, only
from tests.unit.hold_driver import phases
from tests.unit.kv_driver import ready
from tests.unit.orphan_driver import SECOND, OrphanDriver, orphan_limits
from tests.unit.test_core_orphans import ANOTHER, FEW, SUBJECT, every_phase, in_phase, orphan_in

BOTH = {"req_a": "length", SUBJECT: "length"}


def started(phase: Phase, *, orphan: bool = False, **changes: object) -> OrphanDriver:
    """The server died while `req_b` was in this phase, and is started with these changes."""
    driver = orphan_in(phase) if orphan else in_phase(phase)
    rows = {"max_rows": 1 if phase is Phase.WAITING else 2}
    driver.start(**rows | changes)
    return driver


# They go on


@every_phase
def test_they_run_on_without_anybody(phase: Phase) -> None:
    driver = started(phase)
    since_ns = driver.now_ns - 1_000
    for request in driver.state.requests.values():
        assert (request.orphaned_by, request.orphaned_ns) == ("restart", since_ns)
        assert not request.needs_client
    assert driver.state.found == dict.fromkeys((1, 2), since_ns + 1_800 * SECOND)
    driver.release(SUBJECT)
    driver.settle()
    assert driver.ends == BOTH


@every_phase
def test_whoever_attaches_ends_their_time(phase: Phase) -> None:
    driver = started(phase)
    driver.attached(SUBJECT)
    driver.release(SUBJECT)
    assert (list(driver.state.found), driver.request(SUBJECT).orphaned_by) == ([1], None)
    driver.tick(1_800)
    driver.settle()
    assert driver.ends == {"req_a": "nobody_attached", SUBJECT: "length"}


def test_one_that_has_a_key_runs_on_for_ever() -> None:
    driver = OrphanDriver()
    driver.send("x", key="k")
    driver.start()
    assert (driver.state.found, deadline_ns(driver.state)) == ({}, None)
    driver.tick(1_800)
    assert driver.ends == {}


def test_their_time_begins_anew_at_each_start() -> None:
    driver = started(Phase.WAITING)
    driver.pass_ns(1_700 * SECOND)
    driver.start(max_rows=1)
    driver.tick(1_700)
    assert driver.ends == {}
    assert driver.request(SUBJECT).orphaned_ns < driver.now_ns - 3_000 * SECOND


def test_a_client_that_is_lost_after_the_start_is_a_lost_client() -> None:
    driver = started(Phase.DECODING)
    driver.attached(SUBJECT)
    driver.gone(SUBJECT)
    driver.settle()
    assert list(driver.state.lost) == [2]
    assert driver.request(SUBJECT).orphaned_by == "client_gone"


# One that had lost its client before


@pytest.mark.parametrize("on_restart", ["resume", "hold", "cancel"])
@every_phase
def test_one_that_was_held_for_its_client_stays_held(phase: Phase, on_restart: str) -> None:
    driver = started(phase, orphan=True, on_restart=on_restart)
    since_ns = driver.now_ns - 1_000
    driver.settle()
    assert driver.request(SUBJECT).stays_held
    assert driver.request(SUBJECT).orphaned_by == "client_gone"
    assert driver.state.lost == {2: since_ns + 60 * SECOND}, "nobody could come meanwhile"
    driver.attached(SUBJECT)
    driver.release(SUBJECT)
    driver.settle()
    assert driver.ends == BOTH


@every_phase
def test_it_dies_on_its_way_out_and_waits_for_its_client(phase: Phase) -> None:
    driver = in_phase(phase)
    driver.gone(SUBJECT)
    driver.start()
    driver.settle()
    assert driver.ends == {"req_a": "length"}
    assert driver.request(SUBJECT).needs_client
    driver.release(SUBJECT)
    driver.settle()
    assert driver.ends == BOTH


def test_released_by_hand_before_it_is_one_of_those_that_run_on() -> None:
    driver = orphan_in(Phase.DECODING)
    driver.release(SUBJECT)
    driver.start()
    assert (driver.state.lost, list(driver.state.found)) == ({}, [2])
    driver.settle()
    assert driver.ends == BOTH


def test_those_who_wait_end_in_the_order_of_their_times() -> None:
    driver = OrphanDriver(max_rows=1)
    for chain in "xyzw":
        driver.send(chain)
    for name in ("req_d", "req_b", "req_c"):
        driver.gone(name)
    driver.start(grace_ns=2_000 * SECOND, max_rows=1)
    assert (list(driver.state.lost), list(driver.state.found)) == ([2, 3, 4], [1])
    ends = [event.number for event in only(driver.tick(1_800), events.RequestCancelled)]
    ends += [event.number for event in only(driver.tick(200), events.RequestCancelled)]
    assert ends == [1, 2, 3, 4]


# They are held


@every_phase
def test_they_wait_until_somebody_attaches(phase: Phase) -> None:
    driver = started(phase, on_restart="hold")
    driver.settle()
    assert driver.ends == {}
    assert all(request.stays_held for request in driver.state.requests.values())
    assert list(driver.state.found) == [1, 2]
    for name in ("req_a", SUBJECT):
        driver.attached(name)
    driver.release(SUBJECT)
    driver.settle()
    assert driver.ends == BOTH


@pytest.mark.parametrize("key", ["", "k"])
def test_held_they_end_when_nobody_comes(key: str) -> None:
    driver = OrphanDriver()
    driver.send("x", key=key)
    driver.start(on_restart="hold")
    assert driver.request("req_a").held_reason == NO_CLIENT
    driver.tick(1_799)
    assert driver.ends == {}
    driver.tick(1)
    assert driver.ends == {"req_a": "nobody_attached"}


@pytest.mark.parametrize(("key", "ends"), [("", {"req_a": "nobody_attached"}), ("k", {})])
def test_released_by_hand_one_with_a_key_has_no_time(key: str, ends: dict[str, str]) -> None:
    driver = OrphanDriver()
    driver.send("x", key=key)
    driver.start(on_restart="hold")
    driver.release("req_a")
    driver.tick(1_800)
    assert driver.ends == ends


def test_lost_before_a_start_that_holds_one_with_a_key_has_the_time_of_starts() -> None:
    driver = OrphanDriver()
    driver.send("x", key="k")
    driver.gone("req_a")
    driver.start(on_restart="hold")
    driver.start(on_restart="hold")
    assert driver.state.lost == {}
    driver.tick(1_799)
    assert driver.ends == {}
    driver.tick(1)
    assert driver.ends == {"req_a": "nobody_attached"}


def test_held_one_is_adopted_by_who_sends_it_again() -> None:
    driver = OrphanDriver()
    driver.send("x", max_tokens=FEW)
    driver.send("y", key="k", max_tokens=FEW)
    driver.start(on_restart="hold")
    driver.send("x")
    driver.send("y", key="k")
    assert driver.joined == {"req_c": "req_a", "req_d": "req_b"}
    driver.settle()
    assert driver.ends == BOTH


def test_two_that_send_its_key_in_one_step_let_it_go_on_once() -> None:
    driver = OrphanDriver()
    driver.send("x", key="k", max_tokens=FEW)
    driver.start(on_restart="hold")
    decisions = driver.step(*driver.sent("x", key="k"), *driver.sent("x", key="k", more=1))
    assert [d.orphaned_by for d in only(decisions, events.RequestAdopted)] == ["restart", None]
    assert [d.number for d in only(decisions, events.RequestAdmitted)] == [1]
    driver.settle()
    assert driver.ends == {"req_a": "length"}


def test_what_one_start_holds_the_next_may_let_go_on() -> None:
    driver = OrphanDriver()
    driver.send("x", max_tokens=FEW)
    driver.start(on_restart="hold")
    driver.settle()
    assert driver.request("req_a").held_reason == NO_CLIENT
    driver.start(on_restart="resume")
    driver.settle()
    assert driver.ends == {"req_a": "length"}


# They end


@every_phase
def test_they_end_at_the_start(phase: Phase) -> None:
    driver = started(phase, on_restart="cancel")
    assert driver.ends == {"req_a": "on_restart", SUBJECT: "on_restart"}
    assert driver.state.requests == {}


def test_many_end_a_few_in_each_step() -> None:
    driver = OrphanDriver(max_waiting=50, max_rows=1)
    for _ in range(20):
        driver.send("x", key="" if driver.state.next_number % 2 else str(driver.now_ns))
    driver.start(on_restart="cancel", max_waiting=50)
    counts = [20 - len(driver.state.requests)]
    while driver.state.requests:
        assert deadline_ns(driver.state) == driver.state.found[min(driver.state.found)]
        counts.append(len(only(driver.tick(), events.RequestCancelled)))
    assert counts == [2 * MAX_OVERDUE, 4]
    assert set(driver.ends.values()) == {"on_restart"}


def test_one_that_is_let_go_by_hand_in_time_ends_for_its_own_reason() -> None:
    driver = OrphanDriver(max_waiting=50, max_rows=1)
    for _ in range(20):
        driver.send("x")
    driver.start(on_restart="cancel", max_waiting=50, max_rows=1)
    driver.release("req_t")
    driver.tick()
    assert list(driver.state.requests) == [20]
    driver.tick(1_800)
    assert driver.ends["req_t"] == "nobody_attached"


# Without these settings, and with another model


@every_phase
def test_without_these_settings_everybody_runs_on(phase: Phase) -> None:
    driver = started(phase, orphan=True, orphans=None)
    assert (driver.state.lost, driver.state.found) == ({}, {})
    driver.release(SUBJECT)
    driver.settle()
    assert driver.ends == BOTH


@pytest.mark.parametrize("on_restart", ["resume", "hold"])
def test_with_another_model_they_wait_for_theirs(on_restart: str) -> None:
    driver = OrphanDriver()
    driver.decode_sent("x", max_tokens=FEW)
    driver.pause("req_a")
    driver.send("y", max_tokens=FEW)
    model, driver.model = driver.model, ANOTHER
    driver.begin_run()
    driver.step(ready(ANOTHER))
    reasons = [request.held_reason for request in driver.state.requests.values()]
    assert reasons == ["other_model", "other_model"]
    driver.model = model
    driver.start(on_restart=on_restart)
    aside = None if on_restart == "resume" else NO_CLIENT
    assert [driver.request(name).held_reason for name in ("req_a", "req_b")] == [None, aside]
    for name in ("req_a", "req_b"):
        driver.attached(name)
        driver.release(name)
    driver.settle()
    assert driver.ends == BOTH


def test_deaths_are_counted_as_before() -> None:
    driver = OrphanDriver(max_deaths=0)
    driver.decode_sent("x")
    driver.start(on_restart="hold", max_deaths=0)
    assert driver.ends == {"req_a": "server_deaths"}
    assert (driver.state.found, driver.state.keys) == ({}, {})


@pytest.mark.parametrize(
    ("on_restart", "first"),
    [
        ("resume", ["chain_pinned", "request_paused"]),
        ("hold", ["chain_pinned", "request_paused"]),
        ("cancel", ["request_cancelled", "chain_unpinned", "request_cancelled"]),
    ],
)
def test_a_pause_that_was_all_but_over(on_restart: str, first: list[str]) -> None:
    driver = in_phase(Phase.PAUSING)
    driver.release(SUBJECT)
    fold(driver.state, driver.place("fact", [driver.tail_saved(SUBJECT)]))
    driver.limits = orphan_limits(on_restart=on_restart)
    assert kinds(driver.begin_run()) == first
    driver.step(ready(driver.model))
    driver.settle()
    assert driver.ends.get(SUBJECT) == {"resume": "length", "cancel": "on_restart"}.get(on_restart)
    held = {"req_a": "waiting", SUBJECT: "paused"}
    assert phases(driver) == (held if on_restart == "hold" else {})
