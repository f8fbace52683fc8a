"""A what-if of a bundle, or of a journal that was shortened: what was open where it begins."""

from itertools import pairwise

import msgspec
import pytest

from journal import events
from journal.events import AnyEvent, Record
from journal.rows import RunRow
from scheduler.evolve import fold
from scheduler.request import Phase, Request
from scheduler.simulation.clients import Asked
from scheduler.simulation.world import World
from scheduler.state import STATE_VERSION, SchedulerState
from scheduler.whatif.carried import NothingRecorded, open_requests, state_of
from scheduler.whatif.configuration import settings_of
from scheduler.whatif.fitting import gather
from scheduler.whatif.recorded import incident_of, recorded_of
from scheduler.whatif.rerun import hardware_of, rerun_of, sizes_of
from scheduler.whatif.totals import Totals, totals_of
from tests.property.test_whatif import SIZES, idle_world

MIDDLE_NS = 150 * 10**9


@pytest.fixture(scope="module")
def world() -> World:
    """Some have come to an end in the middle, one decodes, one has just come."""
    world = idle_world("40GB")
    for number in range(4):
        world.ask(Asked(20_000, 400 + 1_200 * number, at_ns=number * 30 * 10**9))
    world.run(10**14)
    return world


@pytest.fixture(scope="module")
def whole(world: World) -> list[Record]:
    return list(world.journal.read())


def part_of(whole: list[Record], begin_ns: int) -> list[Record]:
    """What comes after a moment, behind the state by then."""
    began_ns = whole[0].at_ns
    last = next(
        n
        for n, (one, other) in enumerate(pairwise(whole))
        if other.step != one.step and other.at_ns > began_ns + begin_ns
    )
    state = SchedulerState()
    fold(state, whole[: last + 1])
    event = events.StateCarried(
        state_version=STATE_VERSION,
        through_seq=whole[last].seq,
        state=msgspec.to_builtins(state, str_keys=True),
    )
    first = msgspec.structs.replace(whole[last], source="fact", event=event)
    return [first, *whole[last + 1 :]]


@pytest.fixture(scope="module")
def part(whole: list[Record]) -> list[Record]:
    return part_of(whole, MIDDLE_NS)


@pytest.fixture(scope="module")
def run(world: World) -> RunRow:
    return world.journal.runs[1]


def cancelled(request_id: str) -> events.RequestCancelled:
    return events.RequestCancelled(
        request_id=request_id, number=1, reason="cancel_requested", num_output_tokens=1
    )


def with_state(
    event: AnyEvent, state: SchedulerState, request: Request, **changed: object
) -> AnyEvent:
    """The carried state with another request in it."""
    state.requests[request.number] = msgspec.structs.replace(request, **changed)
    return msgspec.structs.replace(event, state=msgspec.to_builtins(state, str_keys=True))


def carried_of(part: list[Record]) -> SchedulerState:
    event = part[0].event
    assert isinstance(event, events.StateCarried)
    return state_of(event)


def test_settings_model_and_what_was_open_come_from_the_state(
    whole: list[Record], part: list[Record], run: RunRow
) -> None:
    incident, all_of_it = incident_of(part, run), incident_of(whole)
    assert incident.model == all_of_it.model
    assert incident.limits == all_of_it.limits
    assert incident.configuration == all_of_it.configuration
    assert incident.policy_version == all_of_it.policy_version
    assert len(incident.lives) == 1
    ended = len(all_of_it.requests) - len(incident.requests)
    assert ended > 0
    assert [request.at_ns for request in incident.requests] == [0] * len(incident.requests)
    lengths = {request.request_id: request for request in all_of_it.requests}
    assert any(incident.carried.values())
    for request in incident.requests:
        before = lengths[request.request_id]
        put_out = request.num_prompt_tokens - before.num_prompt_tokens
        assert (put_out > 0) == incident.carried[request.request_id]
        assert request.num_output_tokens == before.num_output_tokens - put_out
        assert request.max_tokens == (before.max_tokens or 0) - put_out
        assert request.hashes == before.hashes != ()


def simulated(records: list[Record], run: RunRow) -> Totals:
    incident = incident_of(records, run)
    facts = gather(records, sizes_of(incident))
    again = rerun_of(incident, settings_of(incident, {}), hardware_of(incident, facts))
    again.run()
    return again.totals()


def test_what_is_simulated_counts_what_was_recorded(part: list[Record], run: RunRow) -> None:
    recorded, again = totals_of(part), simulated(part, run)
    assert (again.requests, again.finished) == (recorded.requests, recorded.finished)
    assert again.output_tokens == recorded.output_tokens > 0
    assert again.hit_tokens == recorded.hit_tokens == 0
    assert again.prefilled_tokens == recorded.prefilled_tokens == 0


def test_a_first_token_is_none_where_there_were_others_before(part: list[Record]) -> None:
    begun = [r.request_id for r in open_requests(carried_of(part)) if r.num_output_tokens]
    assert begun
    assert totals_of(part, frozenset(begun)).first_token_p50_ms is None
    assert totals_of(part, frozenset(begun)).requests == len(begun)


def test_steps_are_fitted_with_all_positions_of_the_rows(
    whole: list[Record], part: list[Record]
) -> None:
    assert gather(part, SIZES).steps[-1] == gather(whole, SIZES).steps[-1]


def test_nothing_is_taken_while_a_row_is_filled_from_before(part: list[Record]) -> None:
    state = carried_of(part)
    request = open_requests(state)[0]
    event = part[0].event
    restoring = [event, with_state(event, state, request, restoring=True)]
    counts = [
        len(gather([msgspec.structs.replace(part[0], event=each), *part[1:]], SIZES).steps)
        for each in restoring
    ]
    assert counts[0] > counts[1]


def test_what_was_wanted_of_a_request_is_wanted_again(part: list[Record]) -> None:
    request = open_requests(carried_of(part))[0]
    request.hold = True
    held = recorded_of(request, has_client=True)
    assert held.wishes == [(0, events.HoldRequested(request_id=request.request_id))]
    request.hold = False
    lost = recorded_of(request, has_client=False)
    assert lost.wishes == [(0, events.ClientGone(request_id=request.request_id))]
    assert recorded_of(request, has_client=True).wishes == []


def test_they_come_in_the_order_in_which_they_would_get_a_row(part: list[Record]) -> None:
    state = carried_of(part)
    one = open_requests(state)[0]
    state.requests.clear()
    for number in range(11, 15):
        state.requests[number] = msgspec.structs.replace(one, number=number)
    state.admitted, state.paused, state.waiting = [14], [12], [13, 11]
    assert [request.number for request in open_requests(state)] == [14, 12, 13, 11]
    state.requests[12].held_reason = "other_model"
    assert [request.number for request in open_requests(state)] == [14, 13, 11]


def test_without_its_run_or_its_version_nothing_is_made_of_it(
    part: list[Record], run: RunRow
) -> None:
    with pytest.raises(NothingRecorded, match="no start of a server"):
        incident_of(part)
    event = msgspec.structs.replace(part[0].event, state_version=STATE_VERSION + 1)
    with pytest.raises(NothingRecorded, match=f"version {STATE_VERSION + 1}"):
        incident_of([msgspec.structs.replace(part[0], event=event)], run)


def test_a_request_that_was_held_there_is_held_from_there_on(part: list[Record]) -> None:
    state = carried_of(part)
    request = open_requests(state)[0]
    event = with_state(part[0].event, state, request, phase=Phase.PAUSED)
    first = msgspec.structs.replace(part[0], event=event)
    later_ns = first.at_ns + 5 * 10**9
    last = msgspec.structs.replace(part[0], at_ns=later_ns, event=cancelled(request.request_id))
    assert totals_of([first, last]).held_ms == 5_000


def test_what_has_not_ended_is_counted(part: list[Record], run: RunRow) -> None:
    assert incident_of(part, run).num_open == 0
    cut = [r for r in part if not isinstance(r.event, events.RequestFinished)]
    incident = incident_of(cut, run)
    assert incident.num_open == len(incident.requests) > 0
    assert all(request.tells_length for request in incident.requests)


def test_an_end_from_outside_does_not_tell_how_long_it_would_have_been(
    part: list[Record], run: RunRow
) -> None:
    cut = [r for r in part if not isinstance(r.event, events.RequestFinished)]
    name = open_requests(carried_of(part))[0].request_id
    incident = incident_of([*cut, msgspec.structs.replace(part[-1], event=cancelled(name))], run)
    tells = {request.request_id: request.tells_length for request in incident.requests}
    assert not tells.pop(name)
    assert all(tells.values())
