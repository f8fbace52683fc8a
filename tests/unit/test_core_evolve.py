"""evolve is total over the closed union, keeps its place, and takes a carried state as its own."""

from typing import Any

import msgspec
import pytest

from journal import events
from journal.codec import decode_event, encode_event
from journal.events import Record
from scheduler.evolve import dispatch, evolve, fold
from scheduler.request import Phase
from scheduler.state import STATE_VERSION, SchedulerState
from tests.unit.core_driver import CoreDriver, kinds, request_in
from tests.unit.hold_lives import busy_with_holds
from tests.unit.kv_driver import busy_with_blocks
from tests.unit.orphan_driver import OrphanDriver
from tests.unit.orphan_lives import busy_with_clients


def carried(state: SchedulerState) -> events.StateCarried:
    """The whole state as an event, through the journal's own JSON."""
    body = msgspec.to_builtins(state, str_keys=True)
    event = events.StateCarried(state_version=STATE_VERSION, through_seq=state.seq, state=body)
    encoded = encode_event(event)
    again = decode_event(encoded.kind, encoded.request_id, encoded.version, encoded.body)
    assert isinstance(again, events.StateCarried)
    return again


def busy() -> CoreDriver:
    """A run in which every kind of event has happened, and every phase has somebody in it."""
    driver = CoreDriver(msgspec.structs.replace(CoreDriver().limits, max_waiting=3))
    driver.start()
    driver.serve(1, 1, 1, 900)
    driver.step(driver.decoded(a="stop"))
    driver.step(driver.freed("a"), events.CancelRequested(request_id="b"))
    for _ in range(3):
        driver.step(driver.failed("c"))
        driver.step(driver.freed("c"))
        driver.step(events.ClientGone(request_id="nobody"))
    driver.serve(1, 1, 2_000, 1, 1)
    driver.step(driver.decoded())
    driver.prefill()
    driver.step(driver.decoded(), driver.receive(9_000))
    driver.step(events.ServerStopping(reason="SIGTERM"))
    return driver


def test_every_kind_is_folded() -> None:
    drivers = (busy(), busy_with_blocks(), *busy_with_holds(), *busy_with_clients())
    seen = {kind for d in drivers for kind in kinds([record.event for record in d.records])}
    assert seen == set(events.KINDS) - {"state_carried"}
    for driver in drivers:
        state = SchedulerState()
        fold(state, driver.records)
        assert state == driver.state
    driver = drivers[0]
    [record] = driver.place("fact", [carried(driver.state)])
    dispatch(SchedulerState(), record)


def test_event_that_is_not_in_the_union_is_refused() -> None:
    class Strange(events.Event, frozen=True, kw_only=True):
        pass

    record = Record(1, 1, 1, "fact", 1, Strange())  # pyright: ignore[reportArgumentType]
    with pytest.raises(AssertionError):
        evolve(SchedulerState(), record)


def test_record_says_where_and_when() -> None:
    state = SchedulerState()
    evolve(state, Record(1, 7, 5, "fact", 99, events.ClientGone(request_id="a")))
    assert (state.seq, state.run_id, state.step, state.now_ns) == (1, 7, 5, 99)
    evolve(state, Record(2, 8, 6, "fact", 99, events.ClientGone(request_id="a")))
    assert (state.seq, state.run_id, state.step, state.now_ns) == (2, 8, 6, 99)


@pytest.mark.parametrize(("seq", "at_ns"), [(1, 100), (3, 100), (2, 98)])
def test_gap_repetition_and_time_that_goes_back_are_refused(seq: int, at_ns: int) -> None:
    state = SchedulerState()
    evolve(state, Record(1, 1, 1, "fact", 99, events.ClientGone(request_id="a")))
    with pytest.raises(AssertionError):
        evolve(state, Record(seq, 1, 1, "fact", at_ns, events.ClientGone(request_id="a")))
    assert (state.seq, state.now_ns) == (1, 99)


def test_decision_that_names_nobody_is_refused() -> None:
    driver = busy()
    [record] = driver.place(
        "decision", [events.RequestQueued(request_id="nobody", max_tokens=1, num_waiting=0)]
    )
    with pytest.raises(AssertionError, match="nobody"):
        evolve(driver.state, record)


@pytest.mark.parametrize("name", ["a", "z"])
def test_arrival_must_be_new(name: str) -> None:
    driver = CoreDriver()
    driver.start()
    driver.serve(20)
    arrival = driver.receive(20, name=name)
    number = arrival.number if name == "a" else arrival.number + 1
    [record] = driver.place("fact", [msgspec.structs.replace(arrival, number=number)])
    with pytest.raises(AssertionError):
        evolve(driver.state, record)
    assert list(driver.state.requests) == [1]


def test_second_chunk_at_a_time_is_refused() -> None:
    driver = CoreDriver()
    driver.start()
    driver.serve(20, 20)
    planned = events.PrefillChunkPlanned(request_id="b", number=2, chunk=2, start=0, length=1)
    [record] = driver.place("decision", [planned])
    with pytest.raises(AssertionError):
        evolve(driver.state, record)


def test_state_survives_its_codec() -> None:
    busy_with_requests = [*busy_with_holds(), *busy_with_clients()]
    states = [busy().state, busy_with_blocks().state, *(d.state for d in busy_with_requests)]
    for state in states:
        assert msgspec.json.decode(msgspec.json.encode(state), type=SchedulerState) == state
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=SchedulerState) == state


def test_carried_state_takes_the_place_of_what_came_before() -> None:
    driver = busy()
    events_after = [driver.receive(5, name="z"), events.ClientGone(request_id="f")]
    event = carried(driver.state)
    state = SchedulerState()
    evolve(state, Record(event.through_seq, 9, 77, "fact", driver.now_ns, event))
    assert state == driver.state
    rest = driver.place("fact", events_after)
    fold(state, rest)
    fold(driver.state, rest)
    assert state == driver.state
    assert "z" in state.numbers


def test_carried_state_keeps_its_order() -> None:
    driver = OrphanDriver(max_waiting=20, max_rows=1)
    for _ in range(12):
        driver.send("x")
    driver.gone(*(driver.name_of(number) for number in (11, 2, 9)))
    event = carried(driver.state)
    state = SchedulerState()
    evolve(state, Record(event.through_seq, 1, driver.state.step, "fact", driver.now_ns, event))
    assert list(state.lost) == [11, 2, 9]
    assert msgspec.json.encode(state) == msgspec.json.encode(driver.state)


ABOUT_CLIENTS = ("lost", "found", "orphans", "keys", "remembered", "drained")
ABOUT_A_CLIENT = (
    *("content_digest", "session_digest", "key_digest", "owner_digest"),
    *("orphaned_by", "orphaned_ns", "needs_client"),
)


def test_carried_state_of_a_time_before_clients_were_looked_after_is_taken() -> None:
    driver = CoreDriver()
    driver.start()
    driver.serve(20, 20)
    event = carried(driver.state)
    body = msgspec.convert(event.state, dict[str, Any])
    for name in ABOUT_CLIENTS:
        del body[name]
    for request in body["requests"].values():
        for name in ABOUT_A_CLIENT:
            del request[name]
    old = msgspec.structs.replace(event, state=body)
    state = SchedulerState()
    evolve(state, Record(event.through_seq, 1, driver.state.step, "fact", driver.now_ns, old))
    assert state == driver.state


def test_carried_state_of_another_version_is_refused() -> None:
    event = msgspec.structs.replace(carried(SchedulerState()), state_version=STATE_VERSION + 1)
    with pytest.raises(AssertionError, match=str(STATE_VERSION + 1)):
        evolve(SchedulerState(), Record(1, 1, 1, "fact", 1, event))


@pytest.mark.parametrize(
    "change",
    [
        {"waiting": "none"},
        {"unheard_of": 1},
        {"chunk": {"number": 1, "chunk": 1, "start": 0, "length": 1, "unheard_of": 1}},
        {"requests": {"1": {"number": 1}}},
        {"requests": {"1": {**msgspec.to_builtins(request_in(Phase.WAITING)), "unheard_of": 1}}},
    ],
)
def test_carried_state_that_is_not_ours_is_refused(change: dict[str, object]) -> None:
    event = carried(SchedulerState())
    strange = msgspec.structs.replace(event, state={**event.state, **change})
    with pytest.raises(msgspec.ValidationError):
        evolve(SchedulerState(), Record(1, 1, 1, "fact", 1, strange))


def test_states_share_nothing() -> None:
    first, second = SchedulerState(), SchedulerState()
    first.waiting.append(1)
    first.leaving[1] = 1
    assert (second.waiting, second.leaving) == ([], {})
