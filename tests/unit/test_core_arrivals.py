"""Each arrival is taken or refused in its own step, for the reason that helps its client most."""

import msgspec
import pytest

from journal import events
from scheduler.memory import capacity_numbers
from scheduler.request import Phase
from tests.unit.core_driver import LIMITS, MODEL, CoreDriver, kinds, only, server_started

# Room for a row of 768 tokens beside weights and chunk.
TIGHT = msgspec.structs.replace(LIMITS, ceiling_bytes=1_005_120 + 768_000)


def started(limits: events.Limits = LIMITS) -> CoreDriver:
    """A server whose engine still loads: what is taken waits."""
    driver = CoreDriver(limits)
    driver.begin_run()
    return driver


def judged(driver: CoreDriver, num_prompt_tokens: int, max_tokens: int | None) -> events.AnyEvent:
    [decision] = driver.step(driver.receive(num_prompt_tokens, max_tokens, name="a"))
    return decision


def test_request_is_taken_with_the_limit_it_asked_for() -> None:
    driver = started()
    taken = judged(driver, 100, 50)
    assert taken == events.RequestQueued(request_id="a", max_tokens=50, num_waiting=0)
    request = driver.request("a")
    assert (request.phase, request.max_tokens, request.asked_max_tokens) == (Phase.WAITING, 50, 50)
    assert request.queued_seq == driver.records[-1].seq
    assert request.received_ns == driver.now_ns
    assert driver.state.waiting == [1]


def test_without_max_tokens_the_default_holds() -> None:
    assert judged(started(), 100, None) == events.RequestQueued(
        request_id="a", max_tokens=1_000, num_waiting=0
    )


def test_default_is_cut_to_the_context() -> None:
    assert judged(started(), 8_000, None) == events.RequestQueued(
        request_id="a", max_tokens=192, num_waiting=0
    )


def test_default_is_cut_to_the_memory() -> None:
    assert judged(started(TIGHT), 700, None) == events.RequestQueued(
        request_id="a", max_tokens=68, num_waiting=0
    )


@pytest.mark.parametrize("max_tokens", [1, None])
def test_last_token_that_fits(max_tokens: int | None) -> None:
    assert judged(started(TIGHT), 767, max_tokens) == events.RequestQueued(
        request_id="a", max_tokens=1, num_waiting=0
    )


@pytest.mark.parametrize(("asked", "counted"), [(None, 1), (1, 1), (500, 500)])
def test_prompt_without_room_for_output_never_fits(asked: int | None, counted: int) -> None:
    driver = started(TIGHT)
    assert judged(driver, 768, asked) == events.RequestRejected(
        request_id="a",
        reason="context_length_exceeded",
        numbers=capacity_numbers(MODEL, TIGHT, 768, counted),
        num_waiting=0,
    )
    assert driver.state.requests == {}
    assert driver.state.numbers == {}
    assert driver.state.next_number == 2


def test_prompt_that_fits_with_an_output_that_does_not() -> None:
    refused = judged(started(TIGHT), 700, 69)
    assert isinstance(refused, events.RequestRejected)
    assert refused.reason == "max_tokens_exceeds_capacity"
    assert refused.numbers == events.CapacityNumbers(
        prompt_tokens=700,
        max_tokens=69,
        required_bytes=1_005_120 + 1_024_000,
        capacity_bytes=1_005_120 + 768_000,
        weights_bytes=1_000_000,
        kv_bytes_per_token=1_000,
        max_context_tokens=768,
    )


def test_full_queue_turns_away_and_says_how_many_wait() -> None:
    driver = started(msgspec.structs.replace(LIMITS, max_waiting=2))
    decisions = driver.serve(1, 1, 1)
    assert kinds(decisions) == ["request_queued", "request_queued", "request_rejected"]
    assert decisions[1] == events.RequestQueued(request_id="b", max_tokens=10, num_waiting=1)
    assert decisions[2] == events.RequestRejected(
        request_id="c", reason="queue_full", numbers=None, num_waiting=2
    )
    assert driver.state.waiting == [1, 2]


def test_held_requests_count_in_the_queue() -> None:
    driver = started(msgspec.structs.replace(LIMITS, max_waiting=1))
    driver.serve(1)
    driver.model = msgspec.structs.replace(MODEL, fingerprint="0" * 64)
    driver.begin_run()
    assert driver.state.held == [1]
    assert kinds(driver.step(driver.receive(1))) == ["request_rejected"]


def test_stopping_server_turns_away() -> None:
    driver = started()
    driver.step(events.ServerStopping(reason="SIGTERM"))
    assert judged(driver, 1, 1) == events.RequestRejected(
        request_id="a", reason="server_stopping", numbers=None, num_waiting=0
    )


def test_arrival_in_the_step_of_the_stop_is_turned_away() -> None:
    driver = started()
    decisions = driver.step(driver.receive(1), events.ServerStopping(reason="SIGTERM"))
    assert [d.reason for d in only(decisions, events.RequestRejected)] == ["server_stopping"]


def test_what_never_fits_is_said_before_what_does_not_fit_now() -> None:
    driver = started(msgspec.structs.replace(TIGHT, max_waiting=1))
    driver.serve(1)
    driver.step(events.ServerStopping(reason="SIGTERM"))
    [refused] = driver.serve(8_000)
    assert isinstance(refused, events.RequestRejected)
    assert refused.reason == "context_length_exceeded"
    [turned_away] = driver.serve(1)
    assert isinstance(turned_away, events.RequestRejected)
    assert turned_away.reason == "server_stopping"


def test_arrival_whose_client_is_gone_in_the_same_step_is_not_taken() -> None:
    driver = started()
    arrival = driver.receive(1, name="a")
    assert driver.step(arrival, events.ClientGone(request_id="a")) == [
        events.RequestCancelled(request_id="a", number=1, reason="client_gone", num_output_tokens=0)
    ]
    assert driver.state.requests == {}


def test_arrivals_are_judged_by_the_estimate_until_the_model_is_measured() -> None:
    driver = started(TIGHT)
    driver.step(driver.receive(700, 60, name="a"))
    measured = msgspec.structs.replace(MODEL, kv_bytes_per_token=1_001)
    driver.step(events.EngineReady(model=measured, one_row_only=False, note="", load_ns=1))
    assert driver.state.model == measured
    assert driver.state.max_context_tokens == 512
    assert (driver.state.held, driver.state.waiting) == ([1], [])
    assert driver.request("a").held_reason == "exceeds_capacity"
    refused = driver.step(driver.receive(512, 1, name="b"))
    assert kinds(refused) == ["request_rejected"]


def test_run_takes_its_limits_and_model_from_its_start() -> None:
    driver = started()
    limits = msgspec.structs.replace(LIMITS, default_max_tokens=7)
    driver.run_id += 1
    start = server_started(limits, msgspec.structs.replace(MODEL, context_tokens=99))
    driver.step(msgspec.structs.replace(start, policy_version=77, code_digest="abc"))
    assert (driver.state.policy_version, driver.state.code_digest) == (77, "abc")
    assert driver.state.limits == limits
    assert driver.state.max_context_tokens == 99
    assert judged(driver, 1, None) == events.RequestQueued(
        request_id="a", max_tokens=7, num_waiting=0
    )
