"""Whatever clients and servers do, every request ends, and those who are followed finish."""

from collections import Counter

import msgspec
import pytest

from journal import events
from scheduler.evolve import evolve, fold
from scheduler.state import SchedulerState
from tests.property.client_stories import tell
from tests.property.test_core_world import carrying
from tests.property.test_hold_world import check_rest
from tests.unit.core_driver import only

NUM_STORIES = 25
WANTED = {
    *("request_joined content", "request_joined key", "request_adopted restart"),
    *("request_adopted client_gone", "request_adopted", "request_rejected key_reused"),
    *("request_cancelled client_gone", "request_cancelled nobody_attached"),
    *("request_cancelled on_restart", "pause_started client_gone", "pause_started drain"),
}
"""What these stories show together."""


def what(event: events.AnyEvent) -> str:
    """The kind of an event, and why."""
    kind = events.kind_of(type(event).__name__)
    match event:
        case events.RequestJoined():
            detail = event.by
        case events.RequestAdopted():
            detail = event.orphaned_by or ""
        case _:
            detail = getattr(event, "reason", "")
    return f"{kind} {detail}".strip()


@pytest.mark.timeout(60)
def test_stories_of_clients_end_and_are_decided_again_without_a_difference() -> None:
    seen: Counter[str] = Counter()
    for seed in range(NUM_STORIES):
        world = tell(seed)
        assert world.driver.divergences() == []
        check_rest(world)
        happened = [record.event for record in world.driver.records]
        received = {event.request_id for event in only(happened, events.RequestReceived)}
        left = {request.request_id for request in world.state.requests.values()}
        assert received - world.ends.keys() == left, f"seed {seed}"
        seen.update(what(event) for event in happened)
    assert seen.keys() >= WANTED


@pytest.mark.parametrize("seed", range(6))
def test_a_state_that_is_carried_or_kept_goes_on_the_same(seed: int) -> None:
    records = tell(seed).driver.records
    whole = SchedulerState()
    fold(whole, records)
    for cut in range(seed, len(records), 97):
        state = SchedulerState()
        fold(state, records[:cut])
        kept = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=SchedulerState)
        begun = SchedulerState()
        evolve(begun, carrying(state))
        for other in (kept, begun):
            fold(other, records[cut:])
            assert msgspec.json.encode(other) == msgspec.json.encode(whole), "also in its order"
