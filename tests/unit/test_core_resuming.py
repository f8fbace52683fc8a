"""Held requests go on: in which order, when there is room, what from, and who gets in meanwhile."""

import msgspec
import pytest

from journal import events
from journal.events import Limits
from scheduler.admission import MAX_OVERTAKEN_NS
from scheduler.request import Phase
from scheduler.resuming import MAX_RESUMED
from tests.unit.core_driver import kinds, only
from tests.unit.hold_driver import FINE, HoldDriver, hold_limits, phases
from tests.unit.kv_driver import STATEFUL, ready

STATEFUL_SMALL = msgspec.structs.replace(STATEFUL, kv_step_tokens=16)


def paused(*chains: str, limits: Limits | None = None) -> HoldDriver:
    """Requests with these chains, all of them held by hand."""
    driver = HoldDriver(limits)
    driver.decode(*chains)
    for name in [r.request_id for r in driver.state.requests.values()]:
        driver.pause(name)
    return driver


def release_all(driver: HoldDriver, *more: events.AnyEvent) -> list[events.Decision]:
    """Releases everybody in one step."""
    names = [r.request_id for r in driver.state.requests.values() if r.hold]
    return driver.step(*(events.ReleaseRequested(request_id=name) for name in names), *more)


def begun(decisions: list[events.Decision]) -> list[int]:
    return [d.number for d in only(decisions, events.ResumeStarted)]


def let_in(decisions: list[events.Decision]) -> list[int]:
    return [d.number for d in only(decisions, events.RequestAdmitted)]


# From what


def test_whole_chain_goes_on_with_no_prefill() -> None:
    driver = paused("xy")
    request = driver.request("req_a")
    known, saved = request.num_known_tokens, request.saved_tokens
    assert saved == known - 1
    driver.pass_ns(5_000)
    [started] = only(release_all(driver), events.ResumeStarted)
    assert started == events.ResumeStarted(
        request_id="req_a",
        number=1,
        num_known_tokens=known,
        num_cached_tokens=saved,
        reserved_bytes=64_000,
        in_use_bytes=0,
        ceiling_bytes=2_000_000,
        num_admitted=0,
        solo=True,
        num_blocks=2,
        has_tail=True,
        num_memory_tokens=0,
        num_disk_tokens=saved,
        parted_because="whole",
        held_ns=driver.state.now_ns - request.paused_ns,
    )
    assert started.held_ns >= 5_000
    assert driver.state.reserved_bytes == 64_000, "reserved from the start of the resume on"
    decisions = driver.step(driver.restored("req_a"))
    assert kinds(decisions) == ["request_resumed", "chain_unpinned", "batch_changed"]
    [resumed] = only(decisions, events.RequestResumed)
    assert (resumed.num_cached_tokens, resumed.num_lost_tokens) == (saved, 0)
    assert (request.phase, request.pins, driver.state.index.tails) == (Phase.DECODING, {}, {})


def test_tail_that_is_lost_costs_the_tail_alone() -> None:
    driver = paused("xy")
    request = driver.request("req_a")
    saved = request.saved_tokens
    release_all(driver)
    decisions = driver.step(driver.tail_lost("req_a"), driver.restored("req_a", 32))
    [resumed] = only(decisions, events.RequestResumed)
    assert (resumed.num_cached_tokens, resumed.num_lost_tokens) == (32, saved - 32)
    [chunk] = only(decisions, events.PrefillChunkPlanned)
    assert (chunk.start, chunk.length) == (32, saved - 32)
    assert driver.state.index.tails == {}
    assert only(decisions, events.BlocksEvicted)[0].tails == (f"req_a-{saved}",)


def test_tail_that_is_missing_at_a_start_is_not_asked_for() -> None:
    driver = paused("xy")
    name = f"req_a-{driver.request('req_a').saved_tokens}"
    driver.begin_run()
    lost = events.BlocksLost(hashes=(), states=(), tails=(name,), reason="missing")
    driver.step(lost, ready(driver.model))
    [started] = only(driver.release("req_a"), events.ResumeStarted)
    assert (started.num_cached_tokens, started.has_tail, started.num_blocks) == (32, False, 2)


def test_block_that_is_lost_costs_what_is_behind_it() -> None:
    driver = paused("xyz")
    driver.step(events.BlocksLost(hashes=("xy",), states=(), reason="missing"))
    assert driver.request("req_a").pins == {"x": None, "xyz": None}
    [started] = only(release_all(driver), events.ResumeStarted)
    assert (started.num_cached_tokens, started.num_blocks, started.has_tail) == (16, 1, False)
    assert started.parted_because == "missing"
    decisions = driver.step(driver.restored("req_a"))
    assert only(decisions, events.RequestResumed)[0].num_lost_tokens == 33
    driver.feed()
    driver.save_all()
    assert driver.on_disk == ["x", "xy", "xyz"], "and it is saved again"


def test_chain_of_which_nothing_is_left_is_computed_anew() -> None:
    driver = HoldDriver()
    driver.run("x")
    driver.ask("x", 20)
    driver.step(driver.restored("req_b"))
    driver.feed()
    driver.pause("req_b")
    assert driver.request("req_b").num_disk_tokens == 16
    driver.step(events.BlocksLost(hashes=("x",), states=(), reason="missing"))
    decisions = driver.release("req_b")
    assert kinds(decisions)[:3] == ["resume_started", "request_resumed", "chain_unpinned"]
    assert driver.request("req_b").num_disk_tokens == 0, "nothing of its prompt is from disk now"
    driver.feed()
    [end] = only(driver.finish("req_b"), events.RequestFinished)
    numbers = (end.num_memory_tokens, end.num_disk_tokens, end.num_prefilled_tokens)
    assert numbers == (0, 0, 36)


def test_block_that_is_lost_while_the_row_is_filled_costs_time_only() -> None:
    driver = paused("xy")
    release_all(driver)
    bad = events.BlockCorrupt(hash="xy", part="block", reason="corrupt", detail="")
    decisions = driver.step(bad, driver.restored("req_a", 16))
    assert only(decisions, events.RequestResumed)[0].num_cached_tokens == 16
    driver.feed()
    assert driver.request("req_a").phase is Phase.DECODING


def test_state_layers_go_on_from_the_tail_alone() -> None:
    driver = HoldDriver(hold_limits(state_every_blocks=2), STATEFUL_SMALL)
    driver.ask("xy", 0)
    driver.feed()
    driver.hold("req_a")
    driver.come_to_rest("req_a")
    request = driver.request("req_a")
    assert request.tail_bytes >= STATEFUL.state_bytes
    [started] = only(driver.release("req_a"), events.ResumeStarted)
    assert (started.num_cached_tokens, started.has_tail) == (request.saved_tokens, True)


def test_state_layers_without_their_tail_go_back_to_a_boundary() -> None:
    driver = HoldDriver(hold_limits(state_every_blocks=2), STATEFUL_SMALL)
    driver.ask("xyz", 1)
    driver.feed()
    driver.pause("req_a")
    name = f"req_a-{driver.request('req_a').saved_tokens}"
    driver.step(events.BlocksLost(hashes=(), states=(), tails=(name,), reason="corrupt"))
    [started] = only(driver.release("req_a"), events.ResumeStarted)
    assert (started.num_cached_tokens, started.has_tail, started.num_blocks) == (48, False, 3)


def test_row_held_before_its_first_chunk_starts_with_nothing() -> None:
    driver = HoldDriver(hold_limits(max_rows=2))
    driver.ask("xyz", 1)
    driver.ask("uvw", 1)
    assert driver.request("req_b").num_cached_tokens == 0
    driver.hold("req_b")
    driver.step(driver.tail_saved("req_b"))
    driver.step(driver.freed("req_b"))
    assert driver.request("req_b").saved_tokens == 0
    decisions = driver.release("req_b")
    assert kinds(decisions) == ["resume_started", "request_resumed"]
    assert only(decisions, events.RequestResumed)[0].num_lost_tokens == 0


def test_request_held_in_the_queue_starts_from_what_is_saved() -> None:
    driver = HoldDriver(hold_limits(max_rows=1))
    driver.decode("x")
    driver.ask("x", 9)
    driver.hold("req_b")
    driver.finish("req_a")
    [started] = only(driver.release("req_b"), events.ResumeStarted)
    assert (started.num_cached_tokens, started.num_blocks, started.has_tail) == (16, 1, False)
    driver.step(driver.restored("req_b"))
    request = driver.request("req_b")
    assert (request.num_disk_tokens, request.num_prefilled_tokens) == (16, 0)


def test_memory_and_disk_and_prefill_are_the_prompt_through_pauses() -> None:
    driver = HoldDriver(hold_limits(memory_bytes=16_000))
    driver.run("xy")
    driver.ask("xyz", 9)
    driver.step(driver.restored("req_b", 32, 16))
    driver.feed()
    for _ in range(2):
        driver.pause("req_b")
        driver.release("req_b")
        driver.step(driver.restored("req_b"))
        driver.step(driver.decoded())
    [end] = only(driver.finish("req_b"), events.RequestFinished)
    numbers = (end.num_memory_tokens, end.num_disk_tokens, end.num_prefilled_tokens)
    assert numbers == (16, 16, 25)
    assert sum(numbers) == end.num_prompt_tokens


# When


def test_held_requests_go_on_in_the_order_of_their_first_admission() -> None:
    driver = paused("x", "y", "z", limits=hold_limits(max_rows=4))
    assert driver.state.paused == [1, 2, 3]
    assert begun(release_all(driver)) == [1, 2]
    assert MAX_RESUMED == 2
    assert begun(driver.step(driver.restored("req_a"))) == [3]


def test_operator_and_capacity_are_passed_over() -> None:
    driver = paused("x", "y", "z")
    driver.release("req_c")
    assert phases(driver) == {"req_a": "paused", "req_b": "paused", "req_c": "resuming"}


def test_only_what_fits_under_the_low_mark_goes_on_beside_others() -> None:
    driver = paused("x")
    driver.decode("y")
    # 1,600,000 less a chunk, less what is in use, is just too little for its 48,000 bytes.
    driver.step(driver.sampled(1_600_000 - 48_000))
    assert begun(driver.release("req_a")) == []
    assert begun(driver.step(driver.sampled(1_500_000))) == [1]


def test_nobody_goes_on_while_usage_is_over_a_mark() -> None:
    driver = HoldDriver()
    driver.decode("x", "y")
    driver.press()
    driver.come_to_rest("req_b")
    assert begun(driver.step(driver.sampled(1_800_000))) == [], "the mark is left below 1,760,000"
    assert driver.state.memory.level == "high"
    assert begun(driver.step(driver.sampled(FINE))) == [2]


def test_request_that_is_alone_goes_on_under_the_ceiling() -> None:
    driver = HoldDriver(hold_limits(reserve="bound"))
    driver.ask("x" * 0, 840, max_tokens=100)
    driver.feed()
    driver.pause("req_a")
    driver.step(driver.sampled(FINE))
    [started] = only(driver.release("req_a"), events.ResumeStarted)
    assert started.solo
    assert 1_000_000 + 5_120 + started.reserved_bytes > 1_600_000, "it is over the low mark"


def test_alone_means_that_the_row_before_is_gone() -> None:
    driver = HoldDriver()
    driver.ask("", 400, max_tokens=10)
    driver.feed()
    driver.pause("req_a")
    driver.ask("", 400, max_tokens=10)
    driver.feed()
    assert begun(driver.release("req_a")) == [], "both are over the low mark together"
    assert begun(driver.step(driver.decoded(req_b="stop"))) == [], "the row is still there"
    assert begun(driver.step(driver.freed("req_b"))) == [1]


def test_row_that_is_dropped_makes_nobody_alone_before_it_is_gone() -> None:
    driver = paused("x")
    driver.decode("y")
    driver.step(driver.sampled(1_950_000))
    assert begun(driver.release("req_a")) == []
    decisions = driver.press(2_050_000)
    assert kinds(decisions)[:4] == [
        "emergency_declared",
        "pause_started",
        "kv_dropped",
        "request_paused",
    ]
    assert begun(decisions) == []


def test_row_that_still_leaves_is_waited_for() -> None:
    driver = HoldDriver()
    driver.decode("x")
    driver.hold("req_a")
    driver.release("req_a")
    driver.step(driver.tail_saved("req_a"))
    assert phases(driver) == {"req_a": "paused"}
    assert begun(driver.step(driver.freed("req_a"))) == [1]


@pytest.mark.parametrize("why", ["stopping", "loading", "crowded", "tokens"])
def test_nobody_goes_on_while_something_stands_against_it(why: str) -> None:
    limits = hold_limits(max_rows=1, token_budget=150) if why == "crowded" else None
    limits = hold_limits(token_budget=150) if why == "tokens" else limits
    driver = paused("x", limits=limits)
    match why:
        case "stopping":
            driver.step(events.ServerStopping(reason="SIGTERM"))
        case "loading":
            driver.begin_run()
        case _:
            driver.decode("y")
    assert begun(driver.release("req_a")) == []


# Solo


def test_solo_request_goes_on_alone() -> None:
    driver = paused("x")
    driver.release("req_a")
    driver.start()
    driver.begin_run()
    assert driver.request("req_a").solo, "its row was being filled at two deaths"
    driver.ask("y", 1)
    decisions = driver.step(ready(driver.model))
    assert (begun(decisions), let_in(decisions)) == ([1], [])
    driver.step(driver.restored("req_a"))
    driver.step(driver.decoded())
    assert driver.state.admitted == [1]
    driver.finish("req_a")
    assert driver.state.admitted == [2]


def test_nobody_goes_on_beside_a_solo_request() -> None:
    driver = paused("x", "y")
    driver.release("req_a")
    driver.start()
    driver.begin_run()
    assert driver.request("req_a").solo
    driver.release("req_b")
    assert begun(driver.step(ready(driver.model))) == [1]


# Newcomers


def short(*, newcomer_tokens: int, active_bytes: int = 1_540_000) -> tuple[HoldDriver, list[int]]:
    """A request is held and does not fit; a smaller one arrives. Who was admitted."""
    driver = HoldDriver(hold_limits())
    driver.ask("", 200, max_tokens=10)
    driver.feed()
    driver.decode("y")
    driver.pause("req_a")
    driver.step(driver.sampled(active_bytes))
    assert begun(driver.release("req_a")) == []
    admitted = let_in(driver.ask("", newcomer_tokens, max_tokens=10))
    return driver, admitted


def test_newcomer_that_fits_with_all_it_may_need_passes_a_held_request() -> None:
    assert short(newcomer_tokens=5)[1] == [3]


def test_newcomer_that_would_take_the_place_of_the_held_one_waits() -> None:
    assert short(newcomer_tokens=60)[1] == []


def test_held_request_is_not_passed_for_ever() -> None:
    driver, _ = short(newcomer_tokens=60)
    driver.pass_ns(MAX_OVERTAKEN_NS)
    assert let_in(driver.ask("", 5, max_tokens=10)) == []


def test_held_request_comes_before_newcomers_when_there_is_room() -> None:
    driver, _ = short(newcomer_tokens=60)
    decisions = driver.step(driver.sampled(1_200_000))
    assert kinds(decisions)[0] == "resume_started"
    assert begun(decisions) == [1]


def test_newcomers_are_passed_in_turn_but_not_for_ever() -> None:
    driver = HoldDriver()
    driver.decode("y")
    driver.step(driver.sampled(1_540_000))
    assert let_in(driver.ask("", 100, max_tokens=10)) == []
    assert let_in(driver.ask("", 5, max_tokens=10)) == [3]
    driver.pass_ns(MAX_OVERTAKEN_NS)
    assert let_in(driver.ask("", 5, max_tokens=10)) == []
    assert driver.state.waiting == [2, 4]


def test_nobody_gets_in_while_usage_is_over_a_mark() -> None:
    driver = HoldDriver()
    driver.decode("x", "y")
    driver.press()
    driver.come_to_rest("req_b")
    assert let_in(driver.ask("", 5, max_tokens=10)) == []
    assert let_in(driver.step(driver.sampled(1_100_000))) == [3]


def test_first_admission_is_when_the_held_one_first_gets_a_row() -> None:
    driver = HoldDriver(hold_limits(max_rows=2))
    driver.step(driver.receive(20, 100, name="req_a"), events.HoldRequested(request_id="req_a"))
    driver.decode("x")
    assert kinds(driver.release("req_a"))[0] == "resume_started"
    first = {r.request_id: r.first_admitted_seq for r in driver.state.requests.values()}
    assert first["req_a"] > first["req_b"] > 0


def test_model_without_marks_goes_on_by_its_reservations() -> None:
    limits = msgspec.structs.replace(hold_limits(), memory=None)
    driver = paused("x", limits=limits)
    driver.decode("y")
    assert begun(driver.release("req_a")) == [1]
    assert driver.state.reserved_bytes == 2 * 128_000
