"""The life of a request is a table, and what the table does not list changes nothing."""

from itertools import product

import msgspec
import pytest

from journal import events
from scheduler.evolve import evolve
from scheduler.request import ENDS, OPEN, TRANSITIONS, IllegalTransition, Phase, enter
from tests.unit.core_driver import CoreDriver, engine_ready, request_in

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
    }


def in_phase(phase: Phase) -> CoreDriver:
    """A run with the request `a`, number 1, in this open phase."""
    driver = CoreDriver()
    driver.begin_run()
    driver.step(driver.receive(3, name="a"))
    if phase is not Phase.WAITING:
        driver.step(engine_ready())
    if phase is Phase.DECODING:
        driver.prefill()
    assert driver.request("a").phase is phase
    return driver


DECISIONS: list[events.AnyEvent] = [
    events.RequestQueued(request_id="a", max_tokens=10, num_waiting=0),
    events.RequestRejected(request_id="a", reason="queue_full", numbers=None, num_waiting=0),
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
]
ABOUT_BLOCKS = (events.BlockSavePlanned, events.BlocksEvicted, events.TierShrunk)
"""Decisions that leave every request in its phase."""


def test_list_of_decisions_is_whole() -> None:
    about_requests = [kind for kind in events.DECISIONS if kind not in ABOUT_BLOCKS]
    assert [type(decision) for decision in DECISIONS] == about_requests


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
