"""A what-if of a journal that ends while requests are held."""

from functools import partial

import msgspec
import pytest

from journal import events
from journal.events import Record
from scheduler.simulation.clients import Asked
from scheduler.simulation.models import workstation
from scheduler.simulation.world import Stuck, World
from scheduler.whatif.configuration import settings_of
from scheduler.whatif.fitting import gather
from scheduler.whatif.recorded import incident_of
from scheduler.whatif.rerun import Rerun, hardware_of, rerun_of, sizes_of
from scheduler.whatif.totals import Totals, totals_of
from tests.loop_driver import settings_of as small_server

SECOND_NS = 10**9
LAST_NS = 200 * SECOND_NS


def held(at_s: int, leaves_s: int | None = None, grace_s: int = 60) -> list[Record]:
    """One request decodes, and another one comes after it, is held so long after the start, and
    has no client from then on.
    """
    settings = small_server(
        memory__ceiling="40GB", kv__memory_bytes=0, requests__orphan_grace_s=grace_s
    )
    world = World(settings, workstation(), seed=3, checks=False)
    world.ask(Asked(20_000, 1_500))
    name = world.ask(Asked(20_000, 5_000, at_ns=SECOND_NS))
    hold, gone = events.HoldRequested(request_id=name), events.ClientGone(request_id=name)
    world.plan(at_s * SECOND_NS, partial(world.wish, hold))
    if leaves_s is not None:
        world.plan(leaves_s * SECOND_NS, partial(world.wish, gone))
    try:
        world.run(LAST_NS)
    except Stuck:
        assert world.state.requests
    began_ns = next(world.journal.read()).at_ns
    return [record for record in world.journal.read() if record.at_ns <= began_ns + LAST_NS]


def planned(records: list[Record], **changes: object) -> Rerun:
    incident = incident_of(records)
    settings = settings_of(incident, {name.replace("__", "."): v for name, v in changes.items()})
    facts = gather(records, sizes_of(incident))
    return rerun_of(incident, settings, hardware_of(incident, facts))


def rerun(records: list[Record], **changes: object) -> Rerun:
    again = planned(records, **changes)
    again.run()
    return again


@pytest.fixture(scope="module")
def early() -> list[Record]:
    """It had put out nothing."""
    return held(2)


@pytest.fixture(scope="module")
def late() -> list[Record]:
    """It had put out something."""
    return held(120)


def outcome(totals: Totals) -> tuple[int, int, int]:
    return totals.requests, totals.finished, totals.pauses


def test_one_that_had_put_out_nothing_stays_held(early: list[Record]) -> None:
    again = rerun(early)
    assert outcome(again.totals()) == outcome(totals_of(early)) == (2, 1, 1)
    assert again.world.timeline.now_ns < LAST_NS + 60 * SECOND_NS


def test_one_that_had_put_out_something_stays_held_too(late: list[Record]) -> None:
    request = incident_of(late).requests[1]
    assert request.num_output_tokens > 0
    assert request.left_held
    recorded, again = totals_of(late), rerun(late).totals()
    assert outcome(again) == outcome(recorded) == (2, 1, 1)
    assert again.output_tokens == pytest.approx(recorded.output_tokens, rel=0.01)


def test_a_pause_that_is_not_over_counts_up_to_the_end_of_the_journal(early: list[Record]) -> None:
    paused = next(r.at_ns for r in early if isinstance(r.event, events.RequestPaused))
    recorded, again = totals_of(early), rerun(early)
    assert recorded.held_ms == (early[-1].at_ns - paused) // 10**6 > 100_000
    assert again.totals().held_ms == pytest.approx(recorded.held_ms, abs=500)
    narrow = rerun(early, scheduler__max_rows=1).totals()
    since_hold_ms = (early[-1].at_ns - early[0].at_ns) // 10**6 - 2_000
    assert narrow.held_ms == since_hold_ms, "without a row it is held at once"


def test_what_takes_longer_than_the_journal_adds_nothing_to_a_pause(early: list[Record]) -> None:
    cut = [r for r in early if r.at_ns <= early[0].at_ns + 20 * SECOND_NS]
    recorded, again = totals_of(cut), rerun(cut)
    assert again.totals().total_ms > 40_000
    assert again.totals().held_ms == pytest.approx(recorded.held_ms, abs=500)
    assert 5_000 < recorded.held_ms < 20_000


def test_held_requests_are_no_trouble_when_another_one_never_gets_there(
    early: list[Record],
) -> None:
    again = planned(early)
    again.num_expected += 1
    again.run()
    assert outcome(again.totals()) == (2, 1, 1)


def test_without_a_journal_one_that_is_held_for_ever_is_stuck(early: list[Record]) -> None:
    again = planned(early)
    again.end = None
    with pytest.raises(Stuck, match="2 paused"):
        again.run()


def test_one_that_was_let_go_ends(early: list[Record]) -> None:
    hold = next(r for r in early if isinstance(r.event, events.HoldRequested))
    assert isinstance(hold.event, events.HoldRequested)
    release = events.ReleaseRequested(request_id=hold.event.request_id)
    incident = incident_of([*early, msgspec.structs.replace(early[-1], event=release)])
    assert not incident.requests[1].left_held
    assert incident.requests[1].known_length == 0
    assert incident_of(early).requests[1].known_length is None


def test_one_that_was_cancelled_for_want_of_a_client_is_waited_for() -> None:
    records = held(2, leaves_s=100, grace_s=60)
    recorded, again = totals_of(records), rerun(records, requests__orphan_grace_s=110).totals()
    assert (recorded.cancelled, again.cancelled) == (1, 1)
    assert again.held_ms == pytest.approx(recorded.held_ms + 50_000, abs=500)


def test_one_that_was_not_cancelled_yet_is_not_waited_for() -> None:
    records = held(2, leaves_s=100, grace_s=500)
    recorded, again = totals_of(records), rerun(records).totals()
    assert outcome(again) == outcome(recorded) == (2, 1, 1)
    assert (recorded.cancelled, again.cancelled) == (0, 0)
    assert again.held_ms == pytest.approx(recorded.held_ms, abs=500)
