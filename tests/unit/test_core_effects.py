"""What the world is told of a step, in which order, and because of which event."""

import msgspec
import pytest

from journal import events
from scheduler.effects import (
    AcceptRequest,
    DropRow,
    EndRequest,
    RejectRequest,
    RunChunk,
    SendTokens,
    SetBatch,
    StartRow,
    effects_of,
)
from tests.unit.core_driver import LIMITS, CoreDriver, check_causes


def ready(*sizes: int, **changes: int) -> CoreDriver:
    driver = CoreDriver(msgspec.structs.replace(LIMITS, **changes))
    driver.start()
    driver.serve(*sizes)
    return driver


def seq_of(driver: CoreDriver, kind: type[events.Event]) -> int:
    """The seq of the last event of this kind."""
    return next(r.seq for r in reversed(driver.records) if isinstance(r.event, kind))


def test_arrival_is_accepted_started_and_fed() -> None:
    driver = ready(20)
    assert driver.effects == [
        StartRow(seq_of(driver, events.RequestAdmitted), 1, "a", 20),
        RunChunk(seq_of(driver, events.PrefillChunkPlanned), 1, 1, 0, 19),
        AcceptRequest(seq_of(driver, events.RequestQueued), "a", 10),
    ]


def test_refused_arrival_gets_the_whole_refusal() -> None:
    driver = ready(9_000)
    rejected = driver.records[-1]
    assert isinstance(rejected.event, events.RequestRejected)
    assert driver.effects == [RejectRequest(rejected.seq, "a", rejected.event)]


def test_decode_step_sends_its_tokens() -> None:
    driver = ready(1)
    driver.step(driver.decoded())
    assert driver.effects == [SendTokens(driver.records[-1].seq)]


def test_engine_hears_of_a_step_before_its_tokens_are_sent_and_ends_come_last() -> None:
    driver = ready(1, 1, 20, max_rows=3)
    driver.serve(30)
    driver.step(driver.decoded())
    driver.step(driver.chunk_done(), driver.decoded(a="stop"), driver.receive(5, name="e"))
    finished = seq_of(driver, events.RequestFinished)
    assert driver.effects == [
        DropRow(finished, 1),
        StartRow(seq_of(driver, events.RequestAdmitted), 4, "d", 30),
        SetBatch(seq_of(driver, events.BatchChanged), 2, (2, 3)),
        RunChunk(seq_of(driver, events.PrefillChunkPlanned), 4, 2, 0, 29),
        SendTokens(seq_of(driver, events.TokensDecoded)),
        AcceptRequest(seq_of(driver, events.RequestQueued), "e", 10),
        EndRequest(finished, "a", "finished", "stop", "", 2),
    ]


def test_cancelled_request_drops_its_row_only_when_it_has_one() -> None:
    driver = ready(20, 20, max_rows=1)
    driver.step(events.CancelRequested(request_id="b"))
    cancelled = seq_of(driver, events.RequestCancelled)
    assert driver.effects == [EndRequest(cancelled, "b", "cancelled", "cancel_requested", "", 0)]
    driver.step(events.ClientGone(request_id="a"))
    cancelled = seq_of(driver, events.RequestCancelled)
    assert driver.effects == [
        DropRow(cancelled, 1),
        EndRequest(cancelled, "a", "cancelled", "client_gone", "", 0),
    ]


def test_retried_row_is_dropped_and_its_stream_hears_nothing() -> None:
    driver = ready(20)
    driver.step(driver.failed("a"))
    assert driver.effects == [DropRow(seq_of(driver, events.RequestRetried), 1)]


def test_row_that_leaves_already_is_not_dropped_again() -> None:
    driver = ready(20)
    driver.step(driver.failed("a"))
    driver.step(events.CancelRequested(request_id="a"))
    assert driver.state.leaving == {1: 256_000}
    cancelled = seq_of(driver, events.RequestCancelled)
    assert driver.effects == [EndRequest(cancelled, "a", "cancelled", "cancel_requested", "", 0)]


def test_aborted_request_says_why() -> None:
    driver = ready(20, max_retries=0)
    driver.step(driver.failed("a", "prefill"))
    aborted = seq_of(driver, events.RequestAborted)
    assert driver.effects == [
        DropRow(aborted, 1),
        EndRequest(aborted, "a", "aborted", "engine_failed", "prefill: boom", 0),
    ]


def test_request_aborted_for_its_deaths_has_no_row_to_drop() -> None:
    driver = ready(20)
    driver.start()
    driver.start()
    driver.begin_run()
    aborted = seq_of(driver, events.RequestAborted)
    detail = "in the engine at 3 deaths of the server"
    assert driver.effects == [EndRequest(aborted, "a", "aborted", "server_deaths", detail, 0)]


def test_start_commit_and_stop_have_no_effects() -> None:
    driver = ready(20, chunk_tokens=19)
    driver.step(events.ServerStopping(reason="SIGTERM"))
    assert driver.effects == []
    driver.begin_run()
    assert driver.effects == []
    records = driver.place(
        "decision", [events.PrefillChunkCommitted(request_id="a", num_cached_tokens=1)]
    )
    assert effects_of(driver.state, records) == []


def test_effect_of_no_decision_is_refused() -> None:
    driver = ready(20)
    with pytest.raises(KeyError):
        check_causes([SendTokens(99)], driver.records[-3:])
    with pytest.raises(AssertionError):
        check_causes([DropRow(1, 1)], driver.records)
    with pytest.raises(AssertionError):
        check_causes([SendTokens(1)], driver.records)
