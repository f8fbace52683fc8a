"""The recovery table line by line, deaths and clean stops, and requests of another model."""

import msgspec
import pytest

from journal import events
from scheduler.request import Phase
from tests.unit.core_driver import LIMITS, MODEL, CoreDriver, engine_ready, kinds, only

OTHER = msgspec.structs.replace(MODEL, fingerprint="0" * 64)


def ready(*sizes: int) -> CoreDriver:
    driver = CoreDriver()
    driver.start()
    if sizes:
        driver.serve(*sizes)
    return driver


def stop(driver: CoreDriver) -> None:
    driver.step(events.ServerStopping(reason="SIGTERM"))


def test_waiting_stays_waiting_and_is_not_charged() -> None:
    driver = CoreDriver()
    driver.begin_run()
    driver.serve(20)
    before = msgspec.structs.replace(driver.request("a"))
    assert driver.begin_run() == []
    assert driver.request("a") == before
    assert driver.state.waiting == [1]


def test_prefilling_waits_again_and_its_tokens_are_fed_anew() -> None:
    driver = ready(2_000)
    driver.step(driver.chunk_done())
    request = driver.request("a")
    assert (request.phase, request.num_cached_tokens) == (Phase.PREFILLING, 512)
    assert driver.begin_run() == []
    assert request.phase is Phase.WAITING
    assert (request.num_cached_tokens, request.reserved_bytes, request.admitted_ns) == (0, 0, 0)
    assert request.max_tokens == 10
    [planned] = only(driver.step(engine_ready()), events.PrefillChunkPlanned)
    assert (planned.start, planned.length, planned.chunk) == (0, 512, 3)


def test_decoding_waits_again_and_keeps_its_output() -> None:
    driver = ready(1)
    driver.step(driver.decoded())
    driver.step(driver.decoded())
    request = driver.request("a")
    assert driver.begin_run() == []
    assert request.phase is Phase.WAITING
    assert (request.num_output_tokens, request.num_cached_tokens) == (2, 0)
    assert request.num_prefill_tokens == 2
    driver.step(engine_ready())
    driver.prefill()
    driver.step(driver.decoded())
    assert (request.phase, request.num_output_tokens) == (Phase.DECODING, 3)


@pytest.mark.parametrize("kind", ["finished", "cancelled", "aborted", "rejected"])
def test_what_has_ended_stays_ended(kind: str) -> None:
    driver = CoreDriver(msgspec.structs.replace(LIMITS, max_retries=0, max_waiting=1))
    driver.start()
    driver.serve(1)
    match kind:
        case "finished":
            driver.step(driver.decoded(a="stop"))
        case "cancelled":
            driver.step(events.ClientGone(request_id="a"))
        case "aborted":
            driver.step(driver.failed("a"))
        case _:
            driver.step(events.CancelRequested(request_id="a"), events.ServerStopping(reason=""))
            driver.serve(1)
    assert f"request_{kind}" in kinds([r.event for r in driver.records])
    driver.start()
    assert driver.state.requests == {}
    assert driver.effects == []


def test_what_belonged_to_the_engine_is_void() -> None:
    driver = ready(1, 1, 600)
    driver.step(driver.decoded(a="stop"))
    driver.step(driver.decoded())
    state = driver.state
    assert (list(state.leaving), state.batch_rows, state.decoded_since_chunk) == ([1], [2], True)
    assert state.chunk is not None
    batch, num_chunks = state.batch, state.num_chunks
    driver.begin_run()
    assert (state.admitted, state.batch_rows, state.chunk, state.leaving) == ([], [], None, {})
    assert (state.reserved_bytes, state.reserved_tokens) == (0, 0)
    assert (state.engine_ready, state.decoded_since_chunk, state.stopping) == (False, False, False)
    # Numbers of batches and chunks go on, so that no result is taken for that of another run.
    assert (state.batch, state.num_chunks) == (batch, num_chunks)
    assert state.waiting == [2, 3]


def test_queue_is_in_the_order_of_arrival_again() -> None:
    driver = CoreDriver(msgspec.structs.replace(LIMITS, max_rows=2))
    driver.start()
    driver.serve(5, 5, 5, 5)
    driver.step(events.CancelRequested(request_id="a"))
    driver.step(driver.freed("a"))
    assert (driver.state.admitted, driver.state.waiting) == ([2, 3], [4])
    driver.begin_run()
    assert driver.state.waiting == [2, 3, 4]


# Deaths


def test_death_is_charged_to_what_was_in_the_engine() -> None:
    driver = CoreDriver(msgspec.structs.replace(LIMITS, max_rows=2))
    driver.start()
    driver.serve(1, 50, 50)
    driver.begin_run()
    assert [r.deaths for r in driver.state.requests.values()] == [1, 1, 0]
    assert not any(r.solo for r in driver.state.requests.values())


def test_death_while_the_engine_loads_is_charged_to_nobody() -> None:
    driver = ready(50)
    driver.begin_run()
    driver.begin_run()
    assert driver.request("a").deaths == 1


def test_clean_stop_is_charged_to_nobody() -> None:
    driver = ready(1, 50)
    stop(driver)
    driver.begin_run()
    assert [r.deaths for r in driver.state.requests.values()] == [0, 0]
    assert [r.phase for r in driver.state.requests.values()] == [Phase.WAITING] * 2
    assert driver.state.waiting == [1, 2]


def test_clean_stop_is_forgotten_by_the_next_run() -> None:
    driver = ready(1)
    stop(driver)
    driver.start()
    driver.begin_run()
    assert driver.request("a").deaths == 1


def test_two_deaths_make_a_request_solo_and_the_third_ends_it() -> None:
    driver = ready(1)
    driver.step(driver.decoded())
    driver.start()
    assert (driver.request("a").deaths, driver.request("a").solo) == (1, False)
    driver.start()
    assert (driver.request("a").deaths, driver.request("a").solo) == (2, True)
    assert driver.begin_run() == [
        events.RequestAborted(
            request_id="a",
            number=1,
            reason="server_deaths",
            detail="in the engine at 3 deaths of the server",
            num_output_tokens=1,
        )
    ]
    assert (driver.state.requests, driver.state.waiting) == ({}, [])


def test_retries_do_not_save_a_request_from_its_deaths() -> None:
    driver = ready(50)
    for _ in range(2):
        driver.start()
    assert driver.request("a").retries == 0
    assert [d.reason for d in only(driver.begin_run(), events.RequestAborted)] == ["server_deaths"]


def test_solo_request_whose_row_fails_is_retried_like_any_other() -> None:
    driver = ready(50)
    for _ in range(2):
        driver.start()
    assert driver.request("a").solo
    assert kinds(driver.step(driver.failed("a"))) == ["request_retried"]
    driver.step(driver.freed("a"))
    assert kinds(driver.step(driver.failed("a"))) == ["request_retried"]
    driver.step(driver.freed("a"))
    aborted = only(driver.step(driver.failed("a")), events.RequestAborted)
    assert [d.reason for d in aborted] == ["engine_failed"]


def test_request_that_ran_out_of_deaths_does_not_start_though_others_do() -> None:
    driver = ready(50)
    driver.start()
    driver.start()
    driver.step(driver.receive(5, name="b"))
    assert kinds(driver.begin_run()) == ["request_aborted"]
    assert driver.request("b").deaths == 0
    assert [d.number for d in only(driver.step(engine_ready()), events.RequestAdmitted)] == [2]


# Other models


def test_request_of_another_model_is_held_until_its_model_is_back() -> None:
    driver = ready(1, 50)
    driver.step(driver.decoded())
    stop(driver)
    driver.model = OTHER
    driver.start()
    assert (driver.state.waiting, driver.state.held) == ([], [1, 2])
    assert {r.held_reason for r in driver.state.requests.values()} == {"other_model"}
    assert driver.state.admitted == []
    stop(driver)
    driver.model = MODEL
    driver.start()
    assert (driver.state.held, driver.state.admitted) == ([], [1, 2])
    assert {r.held_reason for r in driver.state.requests.values()} == {None}
    assert driver.request("a").num_output_tokens == 1


def test_held_and_waiting_requests_merge_in_the_order_of_arrival() -> None:
    driver = CoreDriver()
    driver.begin_run()
    driver.serve(5)
    driver.model = OTHER
    driver.begin_run()
    driver.step(driver.receive(5, name="b"))
    driver.model = MODEL
    driver.begin_run()
    assert (driver.state.waiting, driver.state.held) == ([1], [2])
    driver.step(driver.receive(5, name="c"))
    driver.model = OTHER
    driver.begin_run()
    assert (driver.state.waiting, driver.state.held) == ([2], [1, 3])


def test_death_is_charged_though_the_next_run_serves_another_model() -> None:
    driver = ready(50)
    driver.model = OTHER
    driver.begin_run()
    assert (driver.request("a").deaths, driver.request("a").held_reason) == (1, "other_model")


def test_held_request_that_ran_out_of_deaths_is_given_up() -> None:
    driver = ready(50)
    driver.start()
    driver.start()
    driver.model = OTHER
    assert kinds(driver.begin_run()) == ["request_aborted"]
    assert driver.state.held == []


def test_request_that_no_longer_fits_is_held_until_it_does() -> None:
    driver = ready(247, 200)
    stop(driver)
    driver.limits = msgspec.structs.replace(LIMITS, ceiling_bytes=1_005_120 + 256_000)
    driver.start()
    assert driver.request("a").held_reason == "exceeds_capacity"
    assert (driver.state.held, driver.state.admitted) == ([1], [2])
    stop(driver)
    driver.limits = LIMITS
    driver.start()
    assert (driver.state.held, driver.state.admitted) == ([], [1, 2])


def test_request_that_just_fits_is_not_held() -> None:
    driver = ready(246)
    stop(driver)
    driver.limits = msgspec.structs.replace(LIMITS, ceiling_bytes=1_005_120 + 256_000)
    driver.start()
    assert driver.state.admitted == [1]
