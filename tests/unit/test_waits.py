"""What people are told of requests that do not go on, and of memory."""

import msgspec
import pytest

from journal import events
from scheduler.usage import firm_bytes
from scheduler.views import RequestView, view_memory, view_server
from tests.unit.core_driver import LIMITS, MODEL, CoreDriver
from tests.unit.hold_driver import CEILING, FINE, HIGH, HoldDriver, hold_limits
from tests.unit.hold_lives import busy_with_holds

SECOND = 10**9


def view_of(driver: CoreDriver, name: str) -> RequestView:
    views = view_server(driver.state, driver.now_ns).requests
    [view] = [view for view in views if view.id == name]
    return view


def reason_of(driver: CoreDriver, name: str) -> str | None:
    wait = view_of(driver, name).wait
    return None if wait is None else wait.reason


def test_what_is_worked_on_waits_for_nothing() -> None:
    driver = HoldDriver()
    driver.ask("x", 1)
    assert (view_of(driver, "req_a").state, reason_of(driver, "req_a")) == ("prefilling", None)
    driver.feed()
    assert (view_of(driver, "req_a").state, reason_of(driver, "req_a")) == ("decoding", None)


def test_the_queue_is_counted_and_held_requests_go_first() -> None:
    driver = HoldDriver(hold_limits(max_rows=1))
    driver.decode("x")
    for chain in ("y", "z", "w"):
        driver.ask(chain, 1)
    assert reason_of(driver, "req_b") == "rows"
    wait = view_of(driver, "req_d").wait
    assert wait is not None
    assert (wait.reason, wait.num_before, wait.text) == ("queue", 2, "2 before it")
    driver.hold("req_b")
    assert reason_of(driver, "req_b") == "operator"
    assert reason_of(driver, "req_c") == "rows"
    driver.release("req_b")
    assert (view_of(driver, "req_b").state, reason_of(driver, "req_b")) == ("paused", "rows")
    assert reason_of(driver, "req_c") == "queue"


def test_memory_is_named_with_what_is_needed_and_what_is_free() -> None:
    driver = HoldDriver()
    driver.decode("abcdefghijklmno" * 2)
    driver.ask("A" * 10)
    assert reason_of(driver, "req_b") == "memory"
    wait = view_of(driver, "req_b").wait
    assert wait is not None
    assert wait.needs_bytes == 11 * 16_000, "its prompt, and 16 tokens of output"
    assert wait.free_bytes == CEILING * 8 // 10 - firm_bytes(driver.state)
    assert wait.text == "needs 176.0KB of memory, 82.8KB are free"
    driver.finish("req_a")
    assert reason_of(driver, "req_b") is None


def test_a_held_request_needs_room_for_all_that_it_is_filled_with() -> None:
    driver = HoldDriver(hold_limits(reserve="chunk", chunk_tokens=16, chunk_tokens_beside_rows=16))
    driver.decode("abcdefghij")
    driver.pause("req_a")
    driver.decode("ABCDEFGHIJ" * 3)
    driver.release("req_a")
    wait = view_of(driver, "req_a").wait
    assert wait is not None
    assert (wait.reason, wait.needs_bytes) == ("memory", 12 * 16_000)


def test_nobody_gets_a_row_while_memory_is_over_a_mark() -> None:
    driver = HoldDriver()
    driver.decode("x")
    driver.press(HIGH)
    driver.ask("y", 1)
    assert reason_of(driver, "req_b") == "pressure"


def test_other_programs_are_named_when_nothing_of_ours_could_be_given_back() -> None:
    limits = hold_limits(is_auto=True)
    driver = HoldDriver(limits)
    driver.step(driver.sampled(0, available_bytes=1_010_000))
    driver.ask("x" * 10)
    wait = view_of(driver, "req_a").wait
    assert wait is not None
    assert wait.reason == "others"
    assert wait.needs_bytes is not None
    assert wait.free_bytes is not None
    assert wait.needs_bytes > wait.free_bytes
    assert view_memory(driver.state).ceiling_bytes == 1_010_000
    assert view_memory(driver.state).is_auto


def test_the_one_who_computes_the_blocks_is_named() -> None:
    driver = HoldDriver()
    driver.ask("xy", 1)
    driver.ask("xy", 2)
    wait = view_of(driver, "req_b").wait
    assert wait is not None
    assert (wait.reason, wait.request_id) == ("blocks", "req_a")


@pytest.mark.parametrize(
    ("limits", "reason"),
    [({"token_budget": 60}, "tokens"), ({"max_rows": 1}, "rows")],
)
def test_bounds_on_what_runs_at_once_are_named(limits: dict[str, int], reason: str) -> None:
    stateful = msgspec.structs.replace(MODEL, state_bytes=20_000)
    driver = CoreDriver(msgspec.structs.replace(LIMITS, **limits), stateful)
    driver.start()
    driver.serve(20, 50)
    assert reason_of(driver, "b") == reason
    assert (view_of(driver, "a").row_bytes, view_of(driver, "b").row_bytes) == (20_000, 0)


def test_what_comes_back_after_deaths_runs_alone() -> None:
    driver = CoreDriver(msgspec.structs.replace(LIMITS, max_deaths=1))
    driver.start()
    driver.serve(20, 50)
    driver.start()
    assert (view_of(driver, "a").state, reason_of(driver, "b")) == ("prefilling", "solo")


def test_an_engine_that_is_not_there_and_a_stop_are_named() -> None:
    driver = CoreDriver()
    driver.begin_run()
    driver.serve(20)
    assert reason_of(driver, "a") == "loading"
    driver.step(events.ServerStopping(reason="test"))
    assert reason_of(driver, "a") == "stopping"


def test_what_this_server_cannot_run_is_named() -> None:
    driver = CoreDriver()
    driver.start()
    driver.serve(2_000)
    driver.model = msgspec.structs.replace(MODEL, fingerprint="g" * 64)
    driver.start()
    assert reason_of(driver, "a") == "model"
    driver.model = msgspec.structs.replace(MODEL, context_tokens=1_000)
    driver.start()
    assert reason_of(driver, "a") == "capacity"
    assert view_server(driver.state, 0).num_unfit == 1


def test_a_pause_says_what_is_still_to_be_saved() -> None:
    driver = HoldDriver()
    driver.ask("xyz", 1)
    driver.feed()
    driver.hold("req_a")
    view = view_of(driver, "req_a")
    assert view.wait is not None
    assert (view.state, view.pause_reason) == ("pausing", "operator")
    assert (view.wait.reason, view.wait.num_blocks) == ("saving", 3)
    assert view.row_bytes == 4 * 16_000
    driver.save_all()
    view = view_of(driver, "req_a")
    assert view.wait is not None
    assert (view.wait.num_blocks, view.wait.text) == (0, "saving what is behind its last block")


def test_a_held_request_shows_its_chain_and_its_time() -> None:
    driver = HoldDriver()
    driver.decode("xy")
    driver.pause("req_a")
    driver.now_ns += 3 * SECOND
    view = view_of(driver, "req_a")
    assert (view.num_pinned_blocks, view.num_saved_tokens) == (2, 33)
    assert view.tail_bytes == 1_000
    assert (view.num_pauses, view.held_ms, view.row_bytes) == (1, 3_000, 0)
    driver.release("req_a")
    driver.now_ns += SECOND
    view = view_of(driver, "req_a")
    assert view.wait is not None
    assert (view.state, view.wait.reason, view.wait.num_tokens) == ("resuming", "restoring", 33)
    assert view.held_ms == 3_000, "it is on its way"
    driver.step(driver.restored("req_a"))
    driver.pause("req_a")
    driver.now_ns += 2 * SECOND
    view = view_of(driver, "req_a")
    assert (view.num_pauses, view.held_ms) == (2, 5_000)


def test_memory_is_shown_with_its_marks_and_what_is_done_about_it() -> None:
    driver = HoldDriver()
    driver.decode("x", "y")
    memory = view_memory(driver.state)
    assert (memory.low_bytes, memory.high_bytes) == (1_600_000, 1_840_000)
    assert (memory.emergency_bytes, memory.ceiling_bytes) == (2_000_000, CEILING)
    assert (memory.level, memory.is_auto, memory.reliefs) == ("normal", False, [])
    assert memory.sampled_at_ns is None
    driver.press(HIGH)
    memory = view_memory(driver.state)
    assert (memory.level, memory.active_bytes) == ("high", HIGH)
    assert memory.sampled_at_ns == driver.now_ns
    [relief] = memory.reliefs
    assert (relief.rung, relief.request_id) == ("pause", "req_b")
    driver.come_to_rest("req_b")
    driver.step(driver.sampled(FINE))
    assert view_memory(driver.state).level == "normal"


def test_without_a_ceiling_there_are_no_marks() -> None:
    driver = CoreDriver()
    assert view_memory(driver.state).usage_bytes == 0
    driver.start()
    memory = view_memory(driver.state)
    assert (memory.ceiling_bytes, memory.high_bytes) == (None, None)
    assert memory.usage_bytes == MODEL.weights_bytes


def test_every_state_of_every_life_can_be_shown() -> None:
    num_shown = 0
    for driver in busy_with_holds():
        for request in view_server(driver.state, driver.now_ns).requests:
            num_shown += 1
            has_row = request.state in ("prefilling", "decoding", "pausing", "resuming")
            assert has_row or request.wait is not None
    assert num_shown > 3
