"""Sensors turn what happened into facts: in order, bounded, and without what is stale."""

from array import array

import pytest

from journal import events
from journal.events import Record
from scheduler.engine.base import (
    BadFile,
    ChunkDone,
    EngineDied,
    EngineLoaded,
    RowFailed,
    RowFreed,
    RowRestored,
    RowTokens,
    StepDone,
    TokenLogprobs,
)
from scheduler.evolve import fold
from scheduler.known import KnownRequests
from scheduler.parameters import RequestParameters, SamplingParameters
from scheduler.sensors import MAX_FACTS, EngineDeath, Sensors
from scheduler.streams import Arrival
from tests.unit.core_driver import CoreDriver


def arrival_of(request_id: str, num_prompt_tokens: int = 3) -> Arrival:
    parameters = RequestParameters(
        route="completions",
        model="fake",
        created=1,
        stream=True,
        sampling=SamplingParameters(seed=5),
    )
    prompt = array("I", range(num_prompt_tokens))
    return Arrival(request_id, "mine", "completions", True, prompt, 9, parameters)


def decoding(*names: str) -> CoreDriver:
    """A state in which these requests decode."""
    core = CoreDriver()
    core.start()
    for name in names:
        core.step(core.receive(1, name=name))  # a prompt of one token: there is nothing to prefill
    assert len(core.state.batch_rows) == len(names)
    return core


class StandingClock:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now_ns = 0

    def wall_ns(self) -> int:
        return self.now_ns

    def monotonic_ns(self) -> int:
        return self.now_ns


def sensors_of() -> Sensors:
    return Sensors(KnownRequests(), max_inbox=4)


def tokens(number: int, *ids: int) -> RowTokens:
    return RowTokens(number, ids, None)


def test_nothing_happened_gives_no_fact() -> None:
    assert sensors_of().collect(CoreDriver().state).facts == []


def test_arrivals_are_numbered_in_order() -> None:
    core = decoding("req_a")
    sensors = sensors_of()
    for name in ("req_b", "req_c"):
        sensors.arrive(arrival_of(name))
    facts = sensors.collect(core.state).facts
    assert [(fact.request_id, fact.number) for fact in facts] == [("req_b", 2), ("req_c", 3)]  # pyright: ignore[reportAttributeAccessIssue]
    fact = facts[0]
    assert isinstance(fact, events.RequestReceived)
    assert (fact.num_prompt_tokens, fact.max_tokens, fact.seed) == (3, 9, 5)
    assert fact.model_fingerprint == core.model.fingerprint
    assert fact.client_request_id == "mine"


def test_a_step_takes_a_bounded_number_and_leaves_the_rest() -> None:
    core = decoding("req_a")
    sensors = sensors_of()
    for i in range(MAX_FACTS + 5):
        sensors.arrive(arrival_of(f"req_{i}"))
    first = sensors.collect(core.state)
    assert len(first.facts) == len(first.arrivals) == MAX_FACTS
    core.step(*first.facts)
    second = sensors.collect(core.state)
    rest = range(MAX_FACTS, MAX_FACTS + 5)
    assert [a.request_id for a in second.arrivals] == [f"req_{i}" for i in rest]
    assert not sensors.inbox


def test_all_kinds_together_are_bounded_too() -> None:
    core = decoding("req_a")
    sensors = sensors_of()
    sensors.known.row_ids[1] = "req_a"
    for i in range(40):
        sensors.deliver(RowFailed(1, "decode", "again"))
        sensors.arrive(arrival_of(f"req_{i}"))
    assert len(sensors.collect(core.state).facts) == MAX_FACTS
    assert len(sensors.collect(core.state).facts) == 80 - MAX_FACTS


def test_a_wish_follows_its_arrival() -> None:
    core = decoding("req_a")
    sensors = sensors_of()
    sensors.arrive(arrival_of("req_b"))
    sensors.wish(events.ClientGone(request_id="req_b"))
    facts = sensors.collect(core.state).facts
    assert [type(fact) for fact in facts] == [events.RequestReceived, events.ClientGone]


def test_a_wish_waits_once_and_only_for_open_requests() -> None:
    core = decoding("req_a")
    sensors = sensors_of()
    for _ in range(3):
        sensors.wish(events.CancelRequested(request_id="req_a"))
        sensors.wish(events.CancelRequested(request_id="req_gone"))
    assert sensors.collect(core.state).facts == [events.CancelRequested(request_id="req_a")]
    sensors.wish(events.CancelRequested(request_id="req_a"))
    assert len(sensors.collect(core.state).facts) == 1, "a later wish is another one"


def test_of_a_hold_and_a_release_the_last_counts() -> None:
    core = decoding("req_a", "req_b")
    sensors = sensors_of()
    for name in ("req_a", "req_b"):
        sensors.wish(events.HoldRequested(request_id=name))
        sensors.wish(events.ReleaseRequested(request_id=name))
    sensors.wish(events.HoldRequested(request_id="req_b"))
    sensors.wish(events.HoldRequested(request_id="req_gone"))
    sensors.wish(events.ReleaseRequested(request_id="req_gone"))
    assert sensors.collect(core.state).facts == [
        events.ReleaseRequested(request_id="req_a"),
        events.HoldRequested(request_id="req_b"),
    ]
    assert sensors.wishes == {}


def test_wishes_for_nobody_hold_nobody_up() -> None:
    core = decoding("req_a")
    sensors = sensors_of()
    for i in range(3 * MAX_FACTS):
        sensors.wish(events.CancelRequested(request_id=f"req_gone_{i}"))
    sensors.arrive(arrival_of("req_b"))
    assert len(sensors.collect(core.state).facts) == 1
    assert not sensors.inbox


def test_tokens_of_a_row_that_no_longer_decodes_do_not_count() -> None:
    core = decoding("req_a", "req_b")
    core.step(events.CancelRequested(request_id="req_a"))
    sensors = sensors_of()
    values = (TokenLogprobs(-0.5, ((8, -0.5),)),)
    sensors.deliver(
        StepDone(2, (tokens(1, 7), RowTokens(2, (8,), "length", values), tokens(9, 3)), 10)
    )
    collected = sensors.collect(core.state)
    assert collected.facts == [
        events.TokensDecoded(
            batch=2,
            numbers=(1, 2, 9),
            counts=(0, 1, 0),
            ended=(events.RowEnd(number=2, reason="length"),),
            duration_ns=10,
        )
    ]
    step = collected.side_rows(frozenset()).tokens[0]
    assert step.ids == array("I", [8]).tobytes()
    assert step.logprobs is not None
    assert [row is None for row in step.logprobs] == [True, False, True]


def test_tokens_of_a_batch_before_the_row_joined_are_stale() -> None:
    core = decoding("req_a")
    stale_batch = core.state.batch
    core.step(events.EngineFailed(request_id="req_a", number=1, during="decode", error="lost"))
    core.step(events.KvFreed(request_id="req_a", number=1, freed_bytes=0))
    assert core.state.requests[1].joined_batch > stale_batch
    sensors = sensors_of()
    sensors.deliver(StepDone(stale_batch, (tokens(1, 7),), 10))
    fact = sensors.collect(core.state).facts[0]
    assert isinstance(fact, events.TokensDecoded)
    assert fact.counts == (0,)


def test_a_step_that_brought_no_token_has_no_side_row() -> None:
    core = decoding("req_a")
    core.step(events.CancelRequested(request_id="req_a"))
    sensors = sensors_of()
    sensors.deliver(StepDone(1, (tokens(1, 7),), 10))
    collected = sensors.collect(core.state)
    assert len(collected.facts) == 1
    assert collected.side_rows(frozenset()).tokens == {}


def test_a_refused_request_leaves_no_rows() -> None:
    core = decoding("req_a")
    sensors = sensors_of()
    sensors.arrive(arrival_of("req_b"))
    sensors.arrive(arrival_of("req_c", num_prompt_tokens=2))
    side = sensors.collect(core.state).side_rows(frozenset(("req_b",)))
    assert side.prompts == [("req_c", array("I", [0, 1]).tobytes())]
    assert [name for name, _ in side.parameters] == ["req_c"]


def test_engine_results_name_their_request() -> None:
    core = decoding("req_a")
    sensors = sensors_of()
    sensors.known.row_ids[1] = "req_a"
    sensors.deliver(EngineLoaded(core.model, False, "fine", 3))
    sensors.deliver(ChunkDone(1, 4, 0, 2, 5, 6, 7))
    sensors.deliver(RowFailed(1, "prefill", "broken"))
    sensors.deliver(RowFreed(1, -8))
    assert sensors.collect(core.state).facts == [
        events.EngineReady(model=core.model, one_row_only=False, note="fine", load_ns=3),
        events.PrefillChunkDone(
            request_id="req_a",
            chunk=4,
            start=0,
            length=2,
            duration_ns=5,
            peak_bytes=6,
            active_bytes=7,
        ),
        events.EngineFailed(request_id="req_a", number=1, during="prefill", error="broken"),
        events.KvFreed(request_id="req_a", number=1, freed_bytes=-8),
    ]
    assert sensors.known.row_ids == {1: "req_a"}, "the request is open and may get a row again"


def test_the_id_of_an_ended_requests_row_is_forgotten_when_it_is_freed() -> None:
    core = decoding("req_a")
    core.step(events.CancelRequested(request_id="req_a"))
    sensors = sensors_of()
    sensors.known.row_ids[1] = "req_a"
    sensors.deliver(RowFreed(1, 8))
    assert len(sensors.collect(core.state).facts) == 1
    assert sensors.known.row_ids == {}


def test_a_stop_becomes_one_fact() -> None:
    core = decoding("req_a")
    sensors = sensors_of()
    sensors.stop("asked to")
    facts = sensors.collect(core.state).facts
    assert facts == [events.ServerStopping(reason="asked to")]
    fold(
        core.state,
        [Record(core.state.seq + 1, 1, core.state.step + 1, "fact", core.now_ns, facts[0])],
    )
    assert sensors.collect(core.state).facts == []


@pytest.mark.parametrize("while_loading", [True, False])
def test_the_engines_death_is_no_fact(while_loading: bool) -> None:
    sensors = sensors_of()
    sensors.deliver(EngineDied("out of luck", while_loading))
    with pytest.raises(EngineDeath, match="out of luck") as raised:
        sensors.collect(CoreDriver().state)
    assert raised.value.while_loading is while_loading


def test_everything_that_comes_in_wakes_the_loop() -> None:
    sensors = sensors_of()
    for wake in (
        lambda: sensors.arrive(arrival_of("req_a")),
        lambda: sensors.wish(events.ClientGone(request_id="req_a")),
        lambda: sensors.deliver(RowFreed(1, 0)),
        lambda: sensors.stop("asked to"),
    ):
        sensors.wake.clear()
        wake()
        assert sensors.wake.is_set()


def test_an_arrival_waits_since_the_given_clocks_time() -> None:
    clock = StandingClock()
    sensors = Sensors(KnownRequests(), max_inbox=4, clock=clock)
    for at_ns in (7, 9):
        clock.now_ns = at_ns
        sensors.arrive(arrival_of(f"req_{at_ns}"))
    assert sensors.waits_since_ns == 7


def test_what_a_restore_found_lost_is_one_fact_for_each_reason() -> None:
    core = decoding("req_a")
    sensors = sensors_of()
    sensors.known.row_ids[1] = "req_a"
    lost = (
        BadFile("y", "block", "missing", ""),
        BadFile("z", "block", "corrupt", ""),
        BadFile("x", "state", "missing", ""),
        BadFile("req_a-9", "tail", "missing", ""),
    )
    bad = (BadFile("x", "block", "corrupt", "short"),)
    sensors.deliver(RowRestored(1, 0, 0, 0, 0, 5, bad, lost))
    *found, restored = sensors.collect(core.state).facts
    assert found == [
        events.BlockCorrupt(hash="x", part="block", reason="corrupt", detail="short"),
        events.BlocksLost(hashes=("y",), states=("x",), tails=("req_a-9",), reason="missing"),
        events.BlocksLost(hashes=("z",), states=(), reason="corrupt"),
    ]
    assert isinstance(restored, events.ChainRestored)
