"""How requests end, fail and come back, and results that arrive too late."""

from typing import Literal

import msgspec
import pytest

from journal import events
from scheduler.request import Phase
from tests.unit.core_driver import LIMITS, CoreDriver, kinds, only


def ready(*sizes: int, **changes: int) -> CoreDriver:
    """A server with requests a, b and so on, whose prompts have these sizes."""
    driver = CoreDriver(msgspec.structs.replace(LIMITS, **changes))
    driver.start()
    driver.serve(*sizes)
    return driver


def is_gone(driver: CoreDriver, name: str) -> bool:
    """Whether nothing but the bytes that leave reminds of the request."""
    state, number = driver.state, driver.number(name)
    lists = [state.waiting, state.held, state.admitted, state.batch_rows, state.requests]
    return name not in state.numbers and not any(number in numbers for numbers in lists)


@pytest.mark.parametrize("reason", ["stop", "end_of_turn", "length"])
def test_request_finishes_for_the_reason_that_the_engine_saw(
    reason: Literal["stop", "end_of_turn", "length"],
) -> None:
    driver = ready(1, 1)
    driver.step(driver.decoded())
    decisions = driver.step(driver.decoded(a=reason))
    assert decisions[0] == events.RequestFinished(
        request_id="a",
        number=1,
        reason=reason,
        num_prompt_tokens=1,
        num_output_tokens=2,
        num_prefilled_tokens=1,
    )
    assert is_gone(driver, "a")
    assert driver.state.leaving == {1: 256_000}
    assert driver.state.reserved_tokens == 11
    assert driver.request("b").num_output_tokens == 2


@pytest.mark.parametrize("fact", [events.CancelRequested, events.ClientGone])
@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.PREFILLING, Phase.DECODING])
def test_request_is_cancelled_in_each_phase(
    phase: Phase, fact: type[events.CancelRequested | events.ClientGone]
) -> None:
    size = 1 if phase is Phase.DECODING else 50
    driver = ready(size, size, max_rows=1)
    name = "b" if phase is Phase.WAITING else "a"
    if phase is Phase.DECODING:
        driver.step(driver.decoded())
    request = driver.request(name)
    assert request.phase is phase
    [cancelled] = only(driver.step(fact(request_id=name)), events.RequestCancelled)
    assert cancelled == events.RequestCancelled(
        request_id=name,
        number=request.number,
        reason="cancel_requested" if fact is events.CancelRequested else "client_gone",
        num_output_tokens=1 if phase is Phase.DECODING else 0,
        had_row=phase is not Phase.WAITING,
        num_prefilled_tokens=1 if phase is Phase.DECODING else 0,
    )
    assert is_gone(driver, name)
    assert (request.number in driver.state.leaving) == (phase is not Phase.WAITING)


def test_held_request_can_be_cancelled() -> None:
    driver = ready(50)
    driver.model = msgspec.structs.replace(driver.model, fingerprint="0" * 64)
    driver.begin_run()
    assert driver.state.held == [1]
    assert kinds(driver.step(events.CancelRequested(request_id="a"))) == ["request_cancelled"]
    assert is_gone(driver, "a")


def test_first_reason_to_cancel_is_the_one_that_is_said() -> None:
    driver = ready(50)
    decisions = driver.step(
        events.ClientGone(request_id="a"), events.CancelRequested(request_id="a")
    )
    assert [d.reason for d in only(decisions, events.RequestCancelled)] == ["client_gone"]


def test_cancel_of_a_request_that_has_ended_is_nothing() -> None:
    driver = ready(50)
    driver.step(events.CancelRequested(request_id="a"))
    assert driver.step(events.CancelRequested(request_id="a")) == []
    assert driver.step(events.ClientGone(request_id="never")) == []


def test_request_that_ended_finishes_though_a_cancel_came_in_the_same_step() -> None:
    driver = ready(1)
    cancel, done = events.CancelRequested(request_id="a"), driver.decoded(a="stop")
    assert kinds(driver.step(cancel, done)) == ["request_finished", "batch_changed"]


def test_request_that_ended_finishes_though_its_row_failed_in_the_same_step() -> None:
    driver = ready(1)
    decisions = driver.step(driver.decoded(a="length"), driver.failed("a"))
    assert kinds(decisions) == ["request_finished", "batch_changed"]


def test_cancel_comes_before_a_retry() -> None:
    driver = ready(50)
    decisions = driver.step(driver.failed("a"), events.ClientGone(request_id="a"))
    assert kinds(decisions) == ["request_cancelled"]


def test_end_that_is_reported_twice_counts_once() -> None:
    driver = ready(1)
    done = driver.decoded(a="stop")
    twice = msgspec.structs.replace(done, ended=done.ended * 2)
    assert kinds(driver.step(twice)) == ["request_finished", "batch_changed"]


def test_all_ends_come_in_a_fixed_order() -> None:
    driver = ready(1, 1, 1, 1)
    decisions = driver.step(
        driver.failed("a"), events.ClientGone(request_id="b"), driver.decoded(d="stop", c="length")
    )
    assert kinds(decisions) == [
        "request_finished",
        "request_finished",
        "request_cancelled",
        "request_retried",
        "batch_changed",
    ]
    assert [d.number for d in only(decisions, events.RequestFinished)] == [3, 4]
    assert only(decisions, events.BatchChanged)[0].left == (1, 2, 3, 4)


# Failures


@pytest.mark.parametrize("phase", [Phase.PREFILLING, Phase.DECODING])
def test_failed_row_waits_again_with_its_tokens(phase: Phase) -> None:
    driver = ready(1 if phase is Phase.DECODING else 5_000, max_rows=1)
    driver.step(driver.decoded() if phase is Phase.DECODING else driver.chunk_done())
    request = driver.request("a")
    output = request.num_output_tokens
    assert (request.phase, output) == (phase, int(phase is Phase.DECODING))
    assert request.num_cached_tokens > 0
    reserved_bytes = request.reserved_bytes
    decisions = driver.step(driver.failed("a"))
    assert decisions[0] == events.RequestRetried(request_id="a", number=1, retry=1)
    assert request.phase is Phase.WAITING
    assert request.num_output_tokens == output
    assert (request.num_cached_tokens, request.reserved_bytes, request.admitted_ns) == (0, 0, 0)
    assert (request.retries, request.failure) == (1, None)
    assert driver.state.waiting == [1]
    assert driver.state.leaving == {1: reserved_bytes}
    assert driver.state.chunk is None
    [readmitted] = only(driver.step(driver.freed("a")), events.RequestAdmitted)
    assert readmitted.num_known_tokens == request.num_prompt_tokens + output


def test_request_is_given_up_after_its_last_retry() -> None:
    driver = ready(50, max_retries=2)
    for retry in (1, 2):
        [retried] = driver.step(driver.failed("a", "prefill"))
        assert retried == events.RequestRetried(request_id="a", number=1, retry=retry)
        driver.step(driver.freed("a"))
        assert driver.request("a").phase is Phase.PREFILLING
    assert driver.step(driver.failed("a", "prefill")) == [
        events.RequestAborted(
            request_id="a",
            number=1,
            reason="engine_failed",
            detail="prefill: boom",
            num_output_tokens=0,
            had_row=True,
        )
    ]
    assert is_gone(driver, "a")
    assert driver.state.leaving == {1: 256_000}


def test_first_failure_of_a_step_is_the_one_that_is_said() -> None:
    driver = ready(50, max_retries=0)
    [aborted] = driver.step(driver.failed("a", "start"), driver.failed("a", "prefill"))
    assert isinstance(aborted, events.RequestAborted)
    assert aborted.detail == "start: boom"


def test_failure_touches_its_own_row_only() -> None:
    driver = ready(1, 1)
    driver.step(driver.failed("a"))
    assert driver.state.batch_rows == [2]
    assert driver.request("b").retries == 0


def test_failure_of_a_request_without_a_row_is_nothing() -> None:
    driver = ready(50, 50, max_rows=1)
    assert driver.step(driver.failed("b")) == []
    driver.step(events.CancelRequested(request_id="b"))
    assert driver.step(driver.failed("b")) == []


# Results that arrive too late


def test_chunk_of_a_row_that_has_ended_is_nothing() -> None:
    driver = ready(50, 50)
    late = driver.chunk_done()
    driver.step(events.CancelRequested(request_id="a"))
    assert driver.state.chunk is not None
    assert driver.state.chunk.number == 2
    assert driver.step(late) == []
    assert driver.state.chunk.done is False


def test_chunk_of_a_row_that_has_ended_is_nothing_when_none_is_planned() -> None:
    driver = ready(50)
    late = driver.chunk_done()
    driver.step(events.CancelRequested(request_id="a"))
    assert driver.state.chunk is None
    assert driver.step(late) == []


def test_chunk_of_one_row_is_not_touched_by_the_end_of_another() -> None:
    driver = ready(50, 50)
    planned = driver.state.chunk
    assert planned is not None
    assert planned.number == 1
    assert kinds(driver.step(driver.failed("b"))) == ["request_retried"]
    assert driver.state.chunk == planned
    assert kinds(driver.step(events.CancelRequested(request_id="b"))) == ["request_cancelled"]
    assert driver.state.chunk == planned


def test_chunk_that_was_fed_for_a_row_that_ends_in_the_same_step_is_not_committed() -> None:
    driver = ready(50)
    decisions = driver.step(driver.chunk_done(), events.CancelRequested(request_id="a"))
    assert kinds(decisions) == ["request_cancelled"]
    assert driver.state.chunk is None


def test_chunk_of_an_earlier_row_of_the_request_is_nothing() -> None:
    driver = ready(50)
    late = driver.chunk_done()
    driver.step(driver.failed("a"))
    driver.step(driver.freed("a"))
    assert driver.step(late) == []
    assert driver.request("a").num_cached_tokens == 0


def test_tokens_of_a_row_that_has_ended_are_nothing() -> None:
    driver = ready(1, 1)
    late = driver.decoded(a="stop")
    driver.step(events.CancelRequested(request_id="a"))
    assert driver.step(late) == []
    assert driver.request("b").num_output_tokens == 1


def test_tokens_of_a_row_that_waits_or_prefills_are_nothing() -> None:
    driver = ready(1, 1)
    driver.step(driver.decoded())
    late = driver.decoded(a="stop")
    driver.step(driver.failed("a"))
    assert kinds(driver.step(late))[0] == "request_admitted"
    request = driver.request("a")
    assert (request.phase, request.num_output_tokens) == (Phase.PREFILLING, 1)
    driver.step(late)
    assert (request.phase, request.num_output_tokens) == (Phase.PREFILLING, 1)


def test_tokens_of_a_row_that_left_and_came_back_are_nothing() -> None:
    driver = ready(1, 1)
    driver.step(driver.decoded())
    late = driver.decoded(a="stop")
    driver.step(driver.failed("a"))
    driver.step(driver.decoded())
    driver.prefill()
    request = driver.request("a")
    assert request.phase is Phase.DECODING
    assert request.joined_batch > late.batch
    driver.step(late)
    assert (request.phase, request.num_output_tokens) == (Phase.DECODING, 1)
    driver.step(driver.decoded())
    assert request.num_output_tokens == 2


def test_tokens_of_an_earlier_batch_count_for_rows_that_stayed() -> None:
    driver = ready(1)
    late = driver.decoded()
    driver.step(driver.receive(1))
    assert driver.state.batch == late.batch + 1
    driver.step(late)
    assert [r.num_output_tokens for r in driver.state.requests.values()] == [1, 0]


def test_row_without_a_token_stays_as_it_is() -> None:
    driver = ready(1, 1)
    driver.step(msgspec.structs.replace(driver.decoded(), counts=(0, 3)))
    assert [r.num_output_tokens for r in driver.state.requests.values()] == [0, 3]
    assert [r.num_cached_tokens for r in driver.state.requests.values()] == [0, 3]
