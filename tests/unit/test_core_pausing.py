"""The stages of a pause: what each waits for, what may come in meanwhile, and what goes wrong."""

import msgspec
import pytest

from journal import events
from scheduler.effects import DropRow, RemoveFiles
from scheduler.pausing import MAX_ADVANCED
from scheduler.request import Phase
from tests.unit.core_driver import kinds, only
from tests.unit.hold_driver import HoldDriver, hold_limits, phases, running
from tests.unit.kv_driver import STATEFUL

STATEFUL_SMALL = msgspec.structs.replace(STATEFUL, kv_step_tokens=16)


def failed_block(name: str, reason: str = "io_error") -> events.AnyEvent:
    fields = {"hash": name, "part": "block", "reason": reason, "detail": ""}
    return msgspec.convert(fields, events.BlockSaveFailed)


def with_block_being_written() -> HoldDriver:
    """req_a decodes; its only block is in the writers' hands when it is held."""
    driver = HoldDriver()
    driver.ask("x", 1)
    driver.feed()
    assert kinds(driver.hold("req_a"))[-1] == "tail_save_planned", "the block is on its way"
    return driver


# What a pause waits for


def test_token_of_the_step_under_way_comes_in_and_counts() -> None:
    driver = running("x", "y")
    token = driver.decoded()
    driver.hold("req_b")
    before = driver.request("req_b").num_output_tokens
    assert driver.step(token) == []
    assert driver.request("req_b").num_output_tokens == before + 1
    driver.step(driver.tail_saved("req_b"))
    request = driver.request("req_b")
    assert (request.phase, request.saved_tokens) == (Phase.PAUSED, request.num_known_tokens - 1)


def test_tail_that_is_older_than_the_token_under_way_is_not_enough() -> None:
    driver = running("x")
    token = driver.decoded()
    driver.hold("req_a")
    early = driver.tail_saved("req_a")
    assert driver.step(early) == [] or driver.request("req_a").phase is Phase.PAUSED
    driver = running("x")
    driver.hold("req_a")
    saved = driver.tail_saved("req_a")
    decisions = driver.step(token, saved)
    assert decisions == [], "it holds one token more than was saved"
    assert driver.request("req_a").phase is Phase.PAUSING


def test_token_of_the_next_batch_is_not_its_own() -> None:
    driver = running("x", "y")
    driver.hold("req_b")
    later = msgspec.structs.replace(
        driver.decoded(), batch=driver.state.batch + 1, numbers=(1, 2), counts=(1, 0)
    )
    before = driver.request("req_b").num_output_tokens
    driver.step(later)
    assert driver.request("req_b").num_output_tokens == before


def test_late_token_of_a_paused_request_is_nobodys() -> None:
    driver = running("x", "y")
    token = driver.decoded()
    driver.pause("req_b")
    before = driver.request("req_b").num_output_tokens
    driver.step(token)
    assert driver.request("req_b").num_output_tokens == before


def test_memory_is_given_back_when_every_block_is_on_disk() -> None:
    driver = with_block_being_written()
    assert driver.step(driver.tail_saved("req_a")) == []
    decisions = driver.step(driver.saved(driver.plans.pop()))
    assert kinds(decisions) == ["chain_pinned", "request_paused"]


def test_tail_waits_for_blocks_that_no_writer_has_yet() -> None:
    driver = HoldDriver(hold_limits(writing_bytes=16_000))
    driver.ask("xyz", 1)
    driver.feed()
    assert [planned.hash for planned in driver.plans] == ["x"]
    assert kinds(driver.hold("req_a")) == ["pause_started", "batch_changed"]
    first = driver.step(driver.saved(driver.plans.pop(0)))
    assert kinds(first) == ["block_save_planned"], "one at a time"
    second = driver.step(driver.saved(driver.plans.pop(0)))
    assert kinds(second) == ["block_save_planned", "tail_save_planned"], "all are on their way"


def test_blocks_of_pausing_rows_are_saved_first() -> None:
    driver = HoldDriver(hold_limits(writing_bytes=16_000))
    driver.ask("xyz", 1)
    driver.ask("uvw", 1)
    driver.feed()
    driver.feed()
    assert sorted(driver.state.unsaved) == [1, 2]
    driver.hold("req_b")
    [planned] = only(driver.step(driver.saved(driver.plans.pop(0))), events.BlockSavePlanned)
    assert planned.request_id == "req_b"


def test_row_that_ends_at_a_block_has_no_tail() -> None:
    driver = HoldDriver(hold_limits(chunk_tokens=16))
    driver.ask("xy", 8)
    driver.step(driver.chunk_done())
    driver.save_all()
    driver.hold("req_a")
    driver.step(driver.chunk_done())
    driver.save_all()
    saved = driver.tail_saved("req_a")
    assert (saved.tail_start, saved.num_tokens, saved.tail_bytes) == (32, 32, 0)
    [pinned, _] = driver.step(saved)
    assert isinstance(pinned, events.ChainPinned)
    assert (pinned.num_blocks, pinned.tail_bytes) == (2, 0)
    assert driver.state.index.tails == {}


def test_state_is_part_of_every_tail() -> None:
    driver = HoldDriver(hold_limits(), STATEFUL_SMALL)
    driver.ask("x", 1)
    driver.feed()
    driver.hold("req_a")
    driver.save_all()
    saved = driver.tail_saved("req_a")
    assert saved.tail_bytes == (saved.num_tokens - 16) * 1_000 + STATEFUL.state_bytes
    driver.step(saved)
    assert driver.request("req_a").phase is Phase.PAUSED


def test_tail_is_counted_while_it_is_written() -> None:
    driver = running("x")
    driver.hold("req_a")
    request = driver.request("req_a")
    at_most = (request.num_cached_tokens + 1 - 16) * 1_000
    index = driver.state.index
    assert (index.writing_tails, index.writing_bytes) == ({1: at_most}, at_most)
    driver.step(driver.tail_saved("req_a"))
    assert (index.writing_tails, index.writing_bytes) == ({}, 0)
    assert index.disk_bytes == 16_000 + (at_most - 1_000)


def test_many_pauses_come_to_their_end_some_at_a_time() -> None:
    number = MAX_ADVANCED + 1
    driver = HoldDriver(hold_limits(max_rows=number, max_waiting=number))
    driver.decode(*"abcdefghi")
    names = list(driver.state.numbers)
    driver.step(*(events.HoldRequested(request_id=name) for name in names))
    driver.step(events.ClockTicked())
    planned = [name for name in names if driver.request(name).tail_planned]
    driver.step(*(driver.tail_saved(name) for name in planned))
    assert len(driver.state.paused) == MAX_ADVANCED
    driver.step(events.ClockTicked())
    driver.step(driver.tail_saved(names[-1]))
    assert len(driver.state.paused) == number


# What cannot be saved


@pytest.mark.parametrize("reason", ["disk_full", "io_error", "not_taken"])
def test_tail_that_fails_costs_the_kv_and_not_the_request(reason: str) -> None:
    driver = running("x")
    driver.hold("req_a")
    decisions = driver.step(driver.tail_failed("req_a", reason))
    assert kinds(decisions) == ["kv_dropped", "request_paused"]
    assert only(decisions, events.KvDropped)[0].reason == reason
    assert [type(e) for e in driver.effects] == [DropRow]
    assert driver.state.index.writing_bytes == 0
    driver.step(driver.freed("req_a"))
    [started] = only(driver.release("req_a"), events.ResumeStarted)
    assert (started.num_cached_tokens, started.has_tail) == (16, False), "its block is on disk"


@pytest.mark.parametrize("why", ["disk_full", "io_error"])
def test_saving_that_stops_before_the_tail_drops_the_kv(why: str) -> None:
    driver = HoldDriver(hold_limits(writing_bytes=16_000))
    driver.ask("xyz", 1)
    driver.feed()
    driver.hold("req_a")
    fields = {"reason": why, "detail": ""}
    decisions = driver.step(msgspec.convert(fields, events.SavingStopped))
    assert kinds(decisions) == ["kv_dropped", "request_paused"]
    assert only(decisions, events.KvDropped)[0].reason == why


def test_saving_that_stops_with_a_block_on_its_way_drops_the_kv() -> None:
    driver = with_block_being_written()
    assert driver.step(driver.tail_saved("req_a")) == []
    decisions = driver.step(
        failed_block("x", "disk_full"), events.SavingStopped(reason="disk_full", detail="")
    )
    assert kinds(decisions)[:3] == ["chain_unpinned", "kv_dropped", "request_paused"]
    assert only(decisions, events.KvDropped)[0].reason == "disk_full"
    assert only(decisions, events.ChainUnpinned)[0].reason == "lost"
    assert driver.state.index.tails == {}


def test_saving_that_stops_when_all_is_on_its_way_is_waited_for() -> None:
    driver = with_block_being_written()
    assert driver.step(events.SavingStopped(reason="disk_full", detail="")) == []
    driver.step(driver.saved(driver.plans.pop()))
    assert kinds(driver.step(driver.tail_saved("req_a"))) == ["chain_pinned", "request_paused"]


def test_block_that_fails_once_is_saved_again() -> None:
    driver = with_block_being_written()
    driver.step(driver.tail_saved("req_a"))
    assert kinds(driver.step(failed_block("x"))) == ["block_save_planned"]
    driver.plans.pop(0)
    decisions = driver.step(driver.saved(driver.plans.pop(0)))
    assert kinds(decisions) == ["chain_pinned", "request_paused"]


@pytest.mark.parametrize("reason", ["obstructed", "not_taken"])
def test_block_that_cannot_be_saved_drops_the_kv(reason: str) -> None:
    driver = with_block_being_written()
    decisions = driver.step(failed_block("x", reason), driver.tail_saved("req_a"))
    assert kinds(decisions)[:3] == ["chain_unpinned", "kv_dropped", "request_paused"]
    assert only(decisions, events.KvDropped)[0].reason == "not_saved"
    [removed] = [e for e in driver.effects if isinstance(e, RemoveFiles)]
    assert removed.tails == ("req_a-17",) or removed.tails[0].startswith("req_a-")


def test_block_that_cannot_be_saved_drops_the_kv_before_the_tail_too() -> None:
    driver = HoldDriver(hold_limits(writing_bytes=16_000))
    driver.ask("xyz", 1)
    driver.feed()
    driver.hold("req_a")
    decisions = driver.step(failed_block("x", "obstructed"))
    assert "kv_dropped" in kinds(decisions)
    assert only(decisions, events.KvDropped)[0].reason == "not_saved"


def test_block_that_is_lost_while_pausing_is_saved_again() -> None:
    driver = running("x")
    driver.hold("req_a")
    lost = events.BlocksLost(hashes=("x",), states=(), reason="missing")
    assert kinds(driver.step(lost)) == ["block_save_planned"]
    driver.step(driver.tail_saved("req_a"))
    driver.save_all()
    assert driver.request("req_a").phase is Phase.PAUSED
    assert driver.on_disk == ["x"]


def test_disk_with_no_room_at_all_drops_the_kv() -> None:
    driver = HoldDriver(hold_limits(max_bytes=10_000))
    driver.ask("x", 1)
    driver.feed()
    decisions = driver.hold("req_a")
    assert kinds(decisions) == ["pause_started", "batch_changed", "kv_dropped", "request_paused"]
    assert only(decisions, events.KvDropped)[0].reason == "not_saved"


def test_others_blocks_go_to_make_room_for_a_pause() -> None:
    driver = HoldDriver(hold_limits(max_bytes=48_000, writing_bytes=16_000))
    driver.run("pq")
    driver.ask("xy", 1)
    driver.feed()
    driver.hold("req_b")
    for _ in range(6):
        driver.save_all()
        driver.step(events.ClockTicked())
    driver.step(driver.tail_saved("req_b"))
    assert phases(driver) == {"req_b": "paused"}
    assert set(driver.on_disk) >= {"x", "xy"}


# Tails of before


def test_tail_of_a_row_that_failed_is_removed_when_it_comes() -> None:
    driver = running("x")
    driver.hold("req_a")
    late = driver.tail_saved("req_a")
    driver.release("req_a")
    driver.step(driver.failed("req_a"))
    decisions = driver.step(late)
    assert only(decisions, events.BlocksEvicted)[0].tails == (f"req_a-{late.num_tokens}",)
    assert driver.state.index.writing_bytes == 0


def test_tail_that_is_still_written_is_waited_for_before_another_one() -> None:
    driver = running("x")
    driver.hold("req_a")
    late = driver.tail_saved("req_a")
    driver.release("req_a")
    driver.step(driver.failed("req_a"))
    driver.step(driver.freed("req_a"))
    driver.feed()
    assert kinds(driver.hold("req_a")) == ["pause_started", "batch_changed"]
    assert driver.state.index.writing_tails.keys() == {1}
    driver.step(late)
    decisions = driver.step(events.ClockTicked())
    assert "tail_save_planned" in kinds([r.event for r in driver.records[-8:]]), decisions
    driver.save_all()
    driver.step(driver.tail_saved("req_a"))
    assert phases(driver) == {"req_a": "paused"}


def test_tail_that_was_lost_is_saved_anew_though_the_row_came_no_further() -> None:
    driver = HoldDriver()
    driver.ask("", 8)
    driver.feed()
    driver.pause("req_a")
    driver.release("req_a")
    driver.step(driver.tail_lost("req_a"), driver.restored("req_a", 0))
    driver.step(driver.chunk_done())
    assert "tail_save_planned" in kinds(driver.hold("req_a"))
    assert driver.step(events.ClockTicked()) == [], "nothing of it is saved yet"
    [pinned] = only(driver.step(driver.tail_saved("req_a")), events.ChainPinned)
    assert pinned.num_tokens == 8
    assert pinned.tail_bytes == 8 * driver.model.kv_bytes_per_token


def test_row_that_failed_leaves_nothing_saved_behind() -> None:
    driver = HoldDriver(hold_limits(chunk_tokens=16))
    driver.ask("xy", 8)
    driver.hold("req_a")
    driver.step(driver.chunk_done())
    driver.step(driver.tail_saved("req_a"))
    assert driver.request("req_a").saved_tokens == 16
    driver.release("req_a")
    driver.step(driver.failed("req_a"))
    assert driver.request("req_a").saved_tokens == -1


# Ends while pausing


@pytest.mark.parametrize("how", ["stop", "length", "cancel", "gone", "deadline"])
def test_request_that_ends_while_pausing_leaves_at_once(how: str) -> None:
    driver = HoldDriver(msgspec.structs.replace(hold_limits(), max_age_ns=10**9))
    driver.decode("x", "y")
    token = driver.decoded(req_b=how)
    driver.hold("req_b")
    late = driver.tail_saved("req_b")
    match how:
        case "cancel":
            decisions = driver.step(events.CancelRequested(request_id="req_b"))
        case "gone":
            decisions = driver.step(events.ClientGone(request_id="req_b"))
        case "deadline":
            driver.pass_ns(10**9)
            decisions = driver.step(events.ClockTicked())
        case _:
            decisions = driver.step(token)
    kind = "request_finished" if how in ("stop", "length") else "request_cancelled"
    assert kinds(decisions).count(kind) == 1 + (how == "deadline")
    assert DropRow in [type(e) for e in driver.effects]
    driver.step(driver.freed("req_b"), late)
    driver.step(events.ClockTicked())
    index = driver.state.index
    assert (index.tails, index.writing_bytes, index.bad) == ({}, 0, {})
    assert driver.state.pausing == []
