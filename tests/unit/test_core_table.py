"""The life of a request is a table, and what the table does not list changes nothing."""

from collections.abc import Iterator
from itertools import product

import msgspec
import pytest

from journal import events
from journal.events import Record
from scheduler.evolve import evolve
from scheduler.request import ENDS, OPEN, TRANSITIONS, IllegalTransition, Phase, Request, enter
from scheduler.runs import is_whole
from scheduler.state import SchedulerState
from tests.unit.core_driver import LIMITS, CoreDriver, engine_ready, request_in
from tests.unit.hold_driver import hold_limits
from tests.unit.hold_lives import busy_with_holds
from tests.unit.kv_driver import busy_with_blocks, ready
from tests.unit.orphan_lives import busy_with_clients

WITHOUT_A_MOVE = (
    events.BlockSavePlanned,
    events.BlocksEvicted,
    events.TierShrunk,
    events.ReclaimStarted,
    events.EmergencyDeclared,
    events.ChainPinned,
    events.KvDropped,
    events.ChainUnpinned,
    events.RequestAdopted,
)
"""Decisions about blocks, memory and clients, which leave every request in its phase."""
PAIRS = sorted(product(Phase, events.KINDS), key=str)


@pytest.mark.parametrize(("phase", "kind"), PAIRS)
def test_pair_is_listed_or_illegal(phase: Phase, kind: str) -> None:
    request = request_in(phase)
    if (phase, kind) in TRANSITIONS:
        enter(request, kind)
        assert request == request_in(TRANSITIONS[phase, kind])
        return
    with pytest.raises(IllegalTransition) as caught:
        enter(request, kind)
    assert request == request_in(phase)
    assert (caught.value.request_id, caught.value.phase, caught.value.kind) == ("a", phase, kind)
    assert str(caught.value) == f"a is {phase.value}, where {kind} cannot happen"


def test_nothing_leads_out_of_an_end() -> None:
    assert not [phase for phase, _ in TRANSITIONS if phase in ENDS]
    assert set(OPEN) | set(ENDS) == set(Phase)
    assert not set(OPEN) & set(ENDS)


def test_every_phase_is_reached_and_every_kind_exists() -> None:
    assert set(TRANSITIONS.values()) == set(Phase)
    assert {kind for _, kind in TRANSITIONS} <= set(events.KINDS)


def test_every_end_has_one_kind_of_its_own() -> None:
    ends = {kind: phase for (_, kind), phase in TRANSITIONS.items() if phase in ENDS}
    assert ends == {
        "request_finished": Phase.FINISHED,
        "request_cancelled": Phase.CANCELLED,
        "request_aborted": Phase.ABORTED,
        "request_rejected": Phase.REJECTED,
        "request_joined": Phase.JOINED,
    }


def lives_of(size: int) -> list[list[Record]]:
    """What can happen to a request that prefills (or, with one token, decodes) beside one that
    waits.
    """
    drivers = [CoreDriver(msgspec.structs.replace(LIMITS, max_rows=1)) for _ in range(4)]
    for driver in drivers:
        driver.start()
        driver.serve(size, 600, 9_000)
    cancelled, failed, died, finished = drivers
    for name in "ba":
        cancelled.step(events.CancelRequested(request_id=name))
    failed.step(events.CancelRequested(request_id="b"))
    for _ in range(3):
        failed.step(failed.failed("a"), failed.freed("a"))
        failed.step(failed.freed("a"))
    for _ in range(3):
        died.start()
    finished.prefill()
    finished.step(finished.decoded())
    finished.step(finished.decoded(a="stop"))
    return [driver.records for driver in drivers]


def moves(records: list[Record]) -> Iterator[tuple[Phase, str, Phase]]:
    """In which phase each event found the request that it is about, and where that was then."""
    state = SchedulerState()
    for record in records:
        before = {number: request.phase for number, request in state.requests.items()}
        touched = about(state, record.event)
        evolve(state, record)
        for number in touched:
            request = state.requests.get(number)
            after = request.phase if request else Phase(kind(record.event).split("_")[1])
            yield before[number], kind(record.event), after


def begins_anew(state: SchedulerState, request: Request) -> bool:
    """Whether a start changes something of it: what is held, or all but held, stays as it is."""
    is_held = request.phase is Phase.PAUSED
    return not is_held and not (request.phase is Phase.PAUSING and is_whole(state, request))


def about(state: SchedulerState, event: events.AnyEvent) -> list[int]:
    """The open requests whose life this event is part of."""
    match event:
        case events.ServerStarted():
            return [n for n, request in state.requests.items() if begins_anew(state, request)]
        case events.BatchChanged():
            return list(event.joined)
        case events.TokensDecoded():
            return [n for n, count in zip(event.numbers, event.counts, strict=True) if count]
        case events.ChainRestored():
            return [event.number] if event.number in state.requests else []
        case _ if isinstance(event, WITHOUT_A_MOVE):
            return []
        case _ if type(event) in events.DECISIONS:
            return [state.numbers[getattr(event, "request_id", "")]]
        case _:
            return []


def test_table_lists_what_happens_and_nothing_else() -> None:
    lives = [*lives_of(1), *lives_of(600), busy_with_blocks().records]
    lives += [driver.records for driver in (*busy_with_holds(), *busy_with_clients())]
    seen = {move for life in lives for move in moves(life)}
    assert seen == {(phase, kind, after) for (phase, kind), after in TRANSITIONS.items()}


def in_phase(phase: Phase) -> CoreDriver:
    """A run with the request `a`, number 1, in this open phase."""
    driver = CoreDriver(hold_limits()) if phase in HELD else CoreDriver()
    driver.begin_run()
    driver.step(driver.receive(20, name="a"), blocks_named("a"))
    if phase is not Phase.WAITING:
        driver.step(ready() if phase in HELD else engine_ready())
    if phase is Phase.DECODING or phase in HELD:
        driver.prefill()
    if phase in HELD:
        come_into(driver, phase)
    assert driver.request("a").phase is phase
    return driver


HELD = (Phase.PAUSING, Phase.PAUSED, Phase.RESUMING)


def blocks_named(name: str) -> events.BlocksNamed:
    return events.BlocksNamed(request_id=name, first=0, hashes=("x",))


def come_into(driver: CoreDriver, phase: Phase) -> None:
    """From the batch into a pause, and out of it again."""
    driver.step(events.BlockSaved(hash="x", part="block", saved_bytes=16_000, duration_ns=1))
    driver.step(events.HoldRequested(request_id="a"))
    if phase is not Phase.PAUSING:
        saved = events.ChainSaved(
            request_id="a", number=1, tail_start=16, num_tokens=19, tail_bytes=1, duration_ns=1
        )
        driver.step(saved)
        driver.step(driver.freed("a"))
    if phase is Phase.RESUMING:
        driver.step(events.ReleaseRequested(request_id="a"))


DECISIONS: list[events.AnyEvent] = [
    events.RequestQueued(request_id="a", max_tokens=10, num_waiting=0),
    events.RequestRejected(request_id="a", reason="queue_full", numbers=None, num_waiting=0),
    events.RequestJoined(request_id="a", number=1, joined_id="b", by="content"),
    events.RequestAdmitted(
        request_id="a",
        number=1,
        num_known_tokens=3,
        num_cached_tokens=0,
        reserved_bytes=1,
        in_use_bytes=0,
        ceiling_bytes=None,
        num_admitted=0,
        solo=False,
    ),
    events.PrefillChunkPlanned(request_id="a", number=1, chunk=2, start=0, length=1),
    events.PrefillChunkCommitted(request_id="a", num_cached_tokens=1),
    events.BatchChanged(batch=9, numbers=(1,), joined=(1,), left=()),
    events.RequestRetried(request_id="a", number=1, retry=1),
    events.RequestFinished(
        request_id="a", number=1, reason="stop", num_prompt_tokens=3, num_output_tokens=0
    ),
    events.RequestCancelled(request_id="a", number=1, reason="client_gone", num_output_tokens=0),
    events.RequestAborted(
        request_id="a", number=1, reason="engine_failed", detail="", num_output_tokens=0
    ),
    events.RequestDeferred(request_id="a", number=1, hash="h", computed_by=2, until_ns=9),
    events.PauseStarted(
        request_id="a",
        number=1,
        reason="operator",
        usage_bytes=0,
        ceiling_bytes=None,
        rank=0,
        num_candidates=0,
        frees_bytes=0,
        unsaved_bytes=0,
        num_cached_tokens=0,
        num_output_tokens=0,
    ),
    events.TailSavePlanned(request_id="a", number=1, tail_start=0),
    events.RequestPaused(
        request_id="a",
        number=1,
        reason="operator",
        had_row=False,
        num_cached_tokens=0,
        num_output_tokens=0,
    ),
    events.ResumeStarted(
        request_id="a",
        number=1,
        num_known_tokens=20,
        num_cached_tokens=0,
        reserved_bytes=1,
        in_use_bytes=0,
        ceiling_bytes=None,
        num_admitted=0,
        solo=False,
        num_blocks=0,
        has_tail=False,
        num_memory_tokens=0,
        num_disk_tokens=0,
        parted_because="",
        held_ns=0,
    ),
    events.RequestResumed(request_id="a", number=1, num_cached_tokens=0, num_lost_tokens=0),
]


def test_list_of_decisions_is_whole() -> None:
    about_requests = [kind for kind in events.DECISIONS if kind not in WITHOUT_A_MOVE]
    assert {type(decision) for decision in DECISIONS} == set(about_requests)
    assert len(DECISIONS) == len(about_requests)


def kind(decision: events.AnyEvent) -> str:
    return events.kind_of(type(decision).__name__)


ILLEGAL = [(p, d) for p, d in product(OPEN, DECISIONS) if (p, kind(d)) not in TRANSITIONS]


@pytest.mark.parametrize(("phase", "decision"), ILLEGAL, ids=lambda v: str(v).partition("(")[0])
def test_illegal_decision_changes_nothing(phase: Phase, decision: events.AnyEvent) -> None:
    driver = in_phase(phase)
    [record] = driver.place("decision", [decision])
    before = msgspec.to_builtins(driver.state, str_keys=True)
    with pytest.raises(IllegalTransition):
        evolve(driver.state, record)
    after = msgspec.to_builtins(driver.state, str_keys=True)
    assert after == {**before, "seq": record.seq, "step": record.step}
