"""What a held request goes on from: its own chain, or as much of it as is left."""

import msgspec

from journal import events
from scheduler.request import Phase
from tests.unit.core_driver import kinds, only
from tests.unit.hold_driver import HoldDriver, hold_limits, paused, release_all
from tests.unit.kv_driver import STATEFUL, ready

STATEFUL_SMALL = msgspec.structs.replace(STATEFUL, kv_step_tokens=16)


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
