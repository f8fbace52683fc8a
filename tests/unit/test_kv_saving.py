"""Which blocks are saved and when, within the writers' bound and the budget."""

import msgspec
import pytest

from journal import events
from journal.events import PlannedBlock
from scheduler.effects import DropRow, SaveBlocks
from tests.unit.core_driver import MODEL, only
from tests.unit.kv_driver import (
    BLOCK,
    BLOCK_BYTES,
    STATEFUL,
    KvDriver,
    kv_limits,
    names_of,
)

CHUNKS_OF_TWO = msgspec.structs.replace(kv_limits(), chunk_tokens=2 * BLOCK)


def files(planned: list[PlannedBlock]) -> list[str]:
    return [p.hash + (".state" if p.part == "state" else "") for p in planned]


def failed(planned: PlannedBlock, reason: str) -> events.BlockSaveFailed:
    return msgspec.convert(
        {"hash": planned.hash, "part": planned.part, "reason": reason, "detail": ""},
        events.BlockSaveFailed,
    )


def test_each_chunk_saves_the_blocks_that_it_filled() -> None:
    driver = KvDriver(CHUNKS_OF_TWO)
    driver.ask("vwxyz", 3)
    assert driver.plans == []
    decisions = driver.step(driver.chunk_done())
    assert [type(d) for d in decisions] == [
        events.PrefillChunkCommitted,
        events.BlockSavePlanned,
        events.PrefillChunkPlanned,
    ]
    assert files(driver.plans) == ["v", "vw"]
    assert [(p.index, p.parent) for p in driver.plans] == [(0, ""), (1, "v")]
    driver.prefill()
    assert files(driver.plans) == ["v", "vw", "vwx", "vwxy", "vwxyz"]


def test_writers_get_no_more_than_their_bound_and_the_rest_later() -> None:
    driver = KvDriver(kv_limits(writing_bytes=2 * BLOCK_BYTES + 1))
    driver.ask("vwxyz", 3)
    driver.prefill()
    assert files(driver.plans) == ["v", "vw"]
    assert driver.state.index.writing_bytes == 2 * BLOCK_BYTES
    assert driver.request("a").unsaved == [2, 3, 4]
    driver.step(driver.decoded())
    assert files(driver.plans) == ["v", "vw"]
    driver.step(driver.saved(driver.plans.pop(0)))
    assert files(driver.plans) == ["vw", "vwx"]
    driver.save_all()
    assert driver.on_disk == ["v", "vw", "vwx", "vwxy", "vwxyz"]
    assert driver.state.unsaved == {}


def test_nothing_is_saved_beyond_the_budget() -> None:
    driver = KvDriver(kv_limits(max_bytes=3 * BLOCK_BYTES + 1))
    driver.ask("vwxyz", 3)
    driver.prefill()
    driver.save_all()
    assert driver.on_disk == ["v", "vw", "vwx"], "what is in use does not go"
    assert driver.request("a").unsaved == [3, 4]
    driver.finish("a")
    assert driver.state.unsaved == {}


def test_a_block_that_decode_fills_is_saved_when_its_last_token_is_cached() -> None:
    driver = KvDriver()
    driver.ask("x", BLOCK - 1)
    driver.prefill()
    driver.save_all()
    assert driver.request("a").num_cached_tokens == 2 * BLOCK - 2
    driver.step(driver.decoded(), driver.named("a", "xo", first=1))
    assert driver.plans == [], "the last token is pending"
    driver.step(driver.decoded())
    assert files(driver.plans) == ["xo"]


def test_the_last_block_is_saved_before_the_row_is_dropped() -> None:
    driver = KvDriver()
    driver.ask("x", BLOCK - 1)
    driver.prefill()
    driver.save_all()
    driver.step(driver.decoded(), driver.named("a", "xo", first=1))
    driver.step(driver.decoded(a="stop"))
    order = [e for e in driver.effects if isinstance(e, (SaveBlocks, DropRow))]
    assert [type(effect) for effect in order] == [SaveBlocks, DropRow]
    driver.save_all()
    assert driver.on_disk == ["x", "xo"]


def test_two_rows_with_one_block_save_it_once() -> None:
    driver = KvDriver(kv_limits(writing_bytes=2 * BLOCK_BYTES, await_ns=0))
    driver.ask("xyz", 3)
    driver.ask("xyz", 3)
    driver.prefill()
    driver.step(driver.decoded())
    driver.prefill()
    assert [driver.request(name).unsaved for name in "ab"] == [[2], [0, 1, 2]]
    first, second = driver.plans
    [save] = only(driver.step(driver.saved(first), driver.saved(second)), events.BlockSavePlanned)
    assert (save.request_id, files(list(save.blocks))) == ("a", ["xyz"])
    driver.step(driver.saved(save.blocks[0]))
    assert {b.leases for b in driver.state.index.blocks.values()} == {2}
    assert driver.state.unsaved == {}


@pytest.mark.parametrize("reason", ["disk_full", "io_error", "given_up"])
def test_a_block_that_its_row_still_holds_is_tried_again(reason: str) -> None:
    driver = KvDriver()
    driver.ask("xy", 3)
    driver.prefill()
    driver.step(failed(driver.plans.pop(0), reason))
    assert files(driver.plans) == ["xy", "x"]


@pytest.mark.parametrize("reason", ["obstructed", "not_taken"])
def test_a_block_that_cannot_be_had_is_not(reason: str) -> None:
    driver = KvDriver()
    driver.ask("xy", 3)
    assert set(driver.state.index.coming) == {"x", "xy"}
    driver.prefill()
    driver.step(failed(driver.plans.pop(0), reason))
    assert files(driver.plans) == ["xy"]
    assert set(driver.state.index.coming) == {"xy"}, "nobody waits for it"


def test_what_fails_late_does_not_come_back_to_another_row() -> None:
    driver = KvDriver()
    driver.ask("xy", 3)
    driver.prefill()
    driver.step(driver.failed("a"))
    driver.step(driver.freed("a"))
    assert driver.request("a").num_cached_tokens == 0
    driver.step(failed(driver.plans.pop(0), "io_error"))
    assert driver.request("a").unsaved == []
    assert files(driver.plans) == ["xy"], "of the row before"
    driver.prefill()
    driver.save_all()
    assert driver.on_disk == ["x", "xy"]


def test_what_a_failed_row_holds_is_not_saved() -> None:
    driver = KvDriver(kv_limits(writing_bytes=BLOCK_BYTES))
    driver.ask("xy", 3)
    driver.prefill()
    saved = driver.saved(driver.plans.pop(0))
    decisions = driver.step(saved, driver.failed("a"))
    assert only(decisions, events.BlockSavePlanned) == []


def test_saving_stops_and_goes_on() -> None:
    driver = KvDriver(CHUNKS_OF_TWO)
    driver.ask("wxyz", 3)
    driver.step(events.SavingStopped(reason="disk_full", detail=""))
    driver.prefill()
    driver.step(driver.decoded())
    assert driver.plans == []
    driver.step(events.SavingResumed(stopped_ns=1))
    assert files(driver.plans) == ["w", "wx", "wxy", "wxyz"]


# States


def test_chunks_end_where_a_state_is_kept() -> None:
    driver = KvDriver(model=STATEFUL)
    driver.ask("vwxyz", 5, suffix_tokens=7)
    lengths: list[int] = []
    while driver.state.chunk is not None:
        lengths.append(driver.state.chunk.length)
        driver.step(driver.chunk_done())
    assert lengths == [2 * BLOCK, 2 * BLOCK, BLOCK + 4]
    assert files(driver.plans) == ["v", "vw", "vw.state", "vwx", "vwxy", "vwxy.state", "vwxyz"]


def test_a_chunk_ends_where_the_next_turn_will_part() -> None:
    driver = KvDriver(kv_limits(state_every_blocks=100), model=STATEFUL)
    driver.ask("vwxyz", 5, suffix_tokens=7)
    assert driver.state.chunk is not None
    assert driver.state.chunk.length == 4 * BLOCK, "the suffix begins inside the fifth block"
    driver.prefill()
    assert [name for name in files(driver.plans) if "." in name] == ["vwxy.state"]


def test_a_state_is_saved_with_the_commit_or_never() -> None:
    driver = KvDriver(kv_limits(writing_bytes=2 * BLOCK_BYTES), model=STATEFUL)
    driver.ask("wxyz", 5)
    driver.step(driver.chunk_done())
    assert files(driver.plans) == ["w", "wx", "wx.state"], "over the bound by its own size"
    driver.step(driver.chunk_done())
    assert len(driver.plans) == 3
    driver.save_all()
    assert driver.on_disk == ["w", "wx", "wxy", "wxyz"]
    assert driver.state.index.blocks["wxyz"].state_bytes == 0


def test_blocks_and_state_of_one_commit_keep_the_budget_together() -> None:
    max_bytes = 2 * BLOCK_BYTES + MODEL.kv_bytes_per_token
    driver = KvDriver(kv_limits(max_bytes=max_bytes), model=STATEFUL)
    driver.ask("xy", 5)
    driver.step(driver.chunk_done())
    assert files(driver.plans) == ["x", "xy"]


def test_a_state_may_come_to_disk_before_its_block() -> None:
    driver = KvDriver(model=STATEFUL)
    driver.ask("xy", 5)
    driver.prefill()
    _, block, state = driver.plans
    driver.step(driver.saved(state))
    assert driver.state.index.early_states == {"xy": STATEFUL.state_bytes}
    assert driver.state.index.disk_bytes == STATEFUL.state_bytes
    driver.step(driver.saved(block))
    assert driver.state.index.blocks["xy"].state_bytes == STATEFUL.state_bytes
    assert driver.state.index.early_states == {}


def test_a_state_whose_block_does_not_come_is_removed() -> None:
    driver = KvDriver(model=STATEFUL)
    driver.ask("xy", 5)
    driver.prefill()
    _, block, state = driver.plans
    driver.step(driver.saved(state))
    [gone] = only(driver.step(failed(block, "obstructed")), events.BlocksEvicted)
    assert (gone.hashes, gone.states, gone.reason) == ((), ("xy",), "bad")
    assert driver.state.index.disk_bytes == 0


def test_a_state_whose_block_was_never_saved_goes_with_its_request() -> None:
    driver = KvDriver(kv_limits(writing_bytes=STATEFUL.state_bytes), model=STATEFUL)
    driver.ask("xy", 5)
    driver.prefill()
    block, state = driver.plans
    assert files([block, state]) == ["x", "xy.state"]
    driver.step(driver.saved(state))
    assert set(driver.state.index.early_states) == {"xy"}, "its block is still to be saved"
    driver.step(events.CancelRequested(request_id="a"))
    [gone] = only(driver.step(events.ClockTicked()), events.BlocksEvicted)
    assert (gone.states, gone.reason) == (("xy",), "bad")


def test_a_state_is_not_written_while_its_bad_file_is_still_to_go() -> None:
    driver = KvDriver(kv_limits(state_every_blocks=1), model=STATEFUL)
    chain = "abcdefghijkl"
    driver.run(chain, 5)
    driver.ask(chain, 5)
    bad = [
        events.BlockCorrupt(hash=chain[:depth], part="state", reason="corrupt", detail="")
        for depth in range(len(chain), 0, -1)
    ]
    driver.step(*bad, driver.restored("b", 0))
    assert set(driver.state.index.bad) == {f"{name}.state" for name in names_of("abcd")}
    driver.step(driver.chunk_done())
    assert driver.plans == []
    driver.step(driver.chunk_done())
    assert files(driver.plans) == ["ab.state"]


def test_blocks_without_a_name_are_not_saved_nor_are_their_states() -> None:
    driver = KvDriver(model=STATEFUL)
    driver.step(driver.receive(4 * BLOCK + 5, name="a"))
    driver.prefill()
    assert driver.plans == []
    assert driver.request("a").unsaved == []


def test_a_run_that_saves_nothing_plans_nothing() -> None:
    driver = KvDriver(msgspec.structs.replace(kv_limits(), kv=None))
    driver.ask("xy", 3)
    driver.prefill()
    assert driver.plans == []
    assert driver.request("a").unsaved == []


# Restarts


def test_what_was_being_written_at_a_crash_is_written_again() -> None:
    driver = KvDriver()
    driver.ask("xyz", 3)
    driver.prefill()
    driver.step(driver.saved(driver.plans.pop(0)))
    driver.start()
    index = driver.state.index
    assert (index.writing, index.writing_bytes, driver.on_disk) == ({}, 0, ["x"])
    assert driver.request("a").leases == {"x": None}, "it was admitted again, and matched"
    driver.step(driver.restored("a"))
    driver.prefill()
    assert files(driver.plans) == ["xy", "xyz"]


def test_output_that_nobody_wants_and_was_being_written_is_forgotten_at_a_crash() -> None:
    driver = KvDriver()
    driver.ask("x", BLOCK - 1, keep_output=False)
    driver.prefill()
    driver.step(driver.decoded(), driver.named("a", "xo", first=1))
    driver.step(driver.decoded(a="stop"))
    assert set(driver.state.index.unwanted) == {"xo"}
    driver.start()
    assert driver.state.index.unwanted == {}


def test_nothing_is_sent_away_where_nothing_is_saved() -> None:
    driver = KvDriver()
    driver.run("xyz")
    bad = [
        events.BlockCorrupt(hash=name, part="block", reason="corrupt", detail="")
        for name in ("x", "xy", "xyz")
    ]
    driver.begin_run()
    driver.limits = msgspec.structs.replace(driver.limits, kv=None)
    decisions = driver.begin_run()
    assert only(decisions, events.BlocksEvicted) == []
    decisions = driver.step(*bad)
    assert only(decisions, events.BlocksEvicted) == []
    driver.limits = kv_limits()
    decisions = driver.begin_run()
    assert [gone.hashes for gone in only(decisions, events.BlocksEvicted)] == [
        ("x",),
        ("xy",),
        ("xyz",),
    ]
