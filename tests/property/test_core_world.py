"""The core in random worlds: what must hold whatever engine, clients and machine do."""

from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from journal import events
from journal.codec import decode_event, encode_event
from journal.events import Record
from scheduler.evolve import evolve, fold
from scheduler.state import STATE_VERSION, SchedulerState
from tests.property.fake_world import ACTIONS, play

bounded = settings(
    max_examples=100,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@bounded
@given(ACTIONS)
def test_every_request_reaches_exactly_one_end(actions: list[tuple[Any, ...]]) -> None:
    world = play(actions)
    world.settle()
    received = {
        r.event.request_id
        for r in world.driver.records
        if isinstance(r.event, events.RequestReceived)
    }
    held = {world.state.requests[number].request_id for number in world.state.held}
    assert received - set(world.ends) == held
    assert set(world.ends) <= received
    assert all(count == 1 for count in world.ends.values())
    assert list(world.state.requests) == sorted(world.state.held)
    assert (world.state.reserved_bytes, world.state.leaving) == (0, {})


@bounded
@given(ACTIONS, st.integers(0, 10_000))
def test_fold_of_all_is_snapshot_and_fold_of_the_rest(
    actions: list[tuple[Any, ...]], where: int
) -> None:
    records = play(actions).driver.records
    cut = where % (len(records) + 1)
    whole, state = SchedulerState(), SchedulerState()
    fold(whole, records)
    fold(state, records[:cut])
    snapshot = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=SchedulerState)
    as_json = msgspec.json.decode(msgspec.json.encode(state), type=SchedulerState)
    carried = SchedulerState()
    evolve(carried, carrying(state))
    for begun in (snapshot, as_json, carried):
        assert begun == state
        fold(begun, records[cut:])
        assert begun == whole


def carrying(state: SchedulerState) -> Record:
    """The record with which a compacted journal begins, as it is read back from there."""
    body = msgspec.to_builtins(state, str_keys=True)
    event = events.StateCarried(state_version=STATE_VERSION, through_seq=state.seq, state=body)
    encoded = encode_event(event)
    again = decode_event(encoded.kind, encoded.request_id, encoded.version, encoded.body)
    return Record(state.seq, state.run_id, state.step, "fact", state.now_ns, again)


@bounded
@given(ACTIONS)
def test_journal_is_decided_again_without_a_difference(actions: list[tuple[Any, ...]]) -> None:
    assert play(actions).driver.divergences() == []
