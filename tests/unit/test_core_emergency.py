"""At the emergency mark, alone, with nothing that can be saved, and with a chunk without room."""

import msgspec
import pytest

from journal import events
from journal.events import Decision
from scheduler.effects import DropRow
from scheduler.relief import MAX_RELIEFS
from scheduler.request import Phase
from tests.unit.core_driver import kinds, only
from tests.unit.hold_driver import (
    EMERGENCY,
    FINE,
    HIGH,
    HoldDriver,
    hold_limits,
    long_chain,
    phases,
    running,
    victims,
)

# What cannot be saved


@pytest.mark.parametrize(("why", "reason"), [("disk_full", "disk_full"), ("io_error", "io_error")])
def test_kv_is_dropped_at_once_while_saving_has_stopped(why: str, reason: str) -> None:
    driver = running("x", "y")
    stopped = events.SavingStopped(reason=why, detail="")  # pyright: ignore[reportArgumentType]
    driver.step(stopped)
    decisions = driver.press()
    assert kinds(decisions) == ["pause_started", "kv_dropped", "request_paused", "batch_changed"]
    assert only(decisions, events.KvDropped)[0].reason == reason
    assert DropRow in [type(e) for e in driver.effects]
    assert driver.request("req_b").saved_tokens == -1


def test_kv_is_dropped_when_nothing_is_saved_in_this_run() -> None:
    driver = HoldDriver(msgspec.structs.replace(hold_limits(), kv=None))
    driver.step(driver.receive(20, 100, name="req_a"))
    driver.step(driver.receive(20, 100, name="req_b"))
    driver.feed()
    decisions = driver.press(EMERGENCY)
    assert only(decisions, events.KvDropped)[0].reason == "not_saved"


# Emergency


def test_emergency_adds_one_action_and_not_a_third() -> None:
    driver = running("x", "y", "z", "w")
    assert victims(driver.press(EMERGENCY)) == [4]
    assert driver.state.memory.declared
    assert driver.step(driver.sampled(EMERGENCY)) == []
    decisions = driver.step(driver.sampled(EMERGENCY + 200_000))
    assert (kinds(decisions)[0], victims(decisions)) == ("pause_started", [3])
    assert len(driver.state.reliefs) == MAX_RELIEFS
    for _ in range(4):
        assert driver.step(driver.sampled(EMERGENCY + 200_000)) == []


@pytest.mark.parametrize(("left_bytes", "added"), [(1_999_999, []), (2_000_000, [2])])
def test_emergency_adds_nothing_when_what_is_under_way_suffices(
    left_bytes: int, added: list[int]
) -> None:
    driver = running("x", "y", "z")
    driver.press(EMERGENCY)
    expected = driver.state.reliefs[0].expected_bytes
    usage = driver.state.memory.usage_bytes
    reading = driver.sampled(EMERGENCY - (usage - expected - left_bytes))
    assert driver.step(reading) == []
    assert victims(driver.step(reading)) == added


def test_emergency_adds_another_rung_and_not_the_same() -> None:
    driver = running("x", "y")
    assert kinds(driver.press(2_100_000, 100_000))[-1] == "reclaim_started"
    assert driver.step(driver.sampled(2_200_000, 100_000)) == []
    assert victims(driver.step(driver.sampled(2_200_000, 100_000))) == [2]


def test_high_mark_adds_nothing_to_what_is_under_way() -> None:
    driver = running("x", "y", "z")
    driver.press()
    for _ in range(9):
        assert driver.step(driver.sampled(HIGH)) == []


def test_emergency_is_declared_once_and_anew_after_it_has_ended() -> None:
    driver = running("x")
    told = [kinds(driver.step(driver.sampled(EMERGENCY))) for _ in range(2)]
    assert told[1][0] == "emergency_declared"
    driver = running("x", "y")
    driver.step(events.HoldRequested(request_id="req_b"))
    readings = [EMERGENCY] * 4 + [FINE] + [EMERGENCY] * 2
    declared = [
        "emergency_declared" in kinds(driver.step(driver.sampled(each))) for each in readings
    ]
    assert declared == [False, True, False, False, False, False, True]


def test_what_the_allocator_keeps_is_no_emergency_by_itself() -> None:
    """A row has gone, its buffers are kept, and others have reserved as much again."""
    driver = running("x", "y")
    kept_bytes = EMERGENCY - FINE
    assert kinds(driver.press(FINE, kept_bytes)) == ["reclaim_started"]
    assert not driver.state.memory.declared
    assert kinds(driver.step(driver.reclaimed(0, EMERGENCY))) == ["emergency_declared"]


def test_protected_and_costly_rows_are_held_last_at_the_emergency_mark() -> None:
    driver = running("x", "y")
    driver.pause("req_b")
    driver.release("req_b")
    driver.step(driver.restored("req_b"))
    assert victims(driver.press(EMERGENCY)) == [2]
    driver = running("x")
    driver.ask("yz", 1)
    decisions = driver.press(EMERGENCY)
    assert victims(decisions) == [2]
    assert only(decisions, events.KvDropped)[0].reason == "not_saved", "it has nothing to save"


# Alone at the emergency mark


def test_alone_at_the_emergency_mark_it_is_dropped_once_and_then_aborted() -> None:
    driver = running("x")
    decisions = driver.press(EMERGENCY)
    assert kinds(decisions) == [
        "emergency_declared",
        "pause_started",
        "kv_dropped",
        "request_paused",
        "batch_changed",
    ]
    assert only(decisions, events.KvDropped)[0].reason == "alone"
    assert driver.step(driver.freed("req_a")) == [], "something else has the memory still"
    assert driver.step(driver.sampled(EMERGENCY)) == []
    decisions = driver.step(driver.sampled(FINE))
    assert kinds(decisions)[0] == "resume_started", "it goes on from what is on disk"
    driver.step(driver.restored("req_a"))
    driver.feed()
    driver.step(driver.sampled(FINE))
    decisions = driver.press(EMERGENCY)
    [aborted] = only(decisions, events.RequestAborted)
    assert (aborted.reason, aborted.had_row) == ("memory", True)
    assert aborted.detail == (
        "memory in use 2.0MB, ceiling 2.0MB, of which this request has 32.0KB"
    )
    assert driver.state.requests == {}


def test_row_that_was_dropped_alone_is_fed_half_of_what_had_room() -> None:
    """What a chunk needs for each token grows with the row. The chunk for which it was dropped is
    the newest that says how much.
    """
    driver = HoldDriver(hold_limits(reserve="chunk", chunk_tokens=128))
    driver.ask(long_chain(25), 0, max_tokens=60)
    driver.step(needing(driver.chunk_done(), 5_000))
    driver.save_all()
    assert next_length(driver) == 128, "there is room for more"
    too_much = needing(driver.chunk_done(), 6_000)
    driver.press(EMERGENCY)
    driver.step(too_much, driver.freed("req_a"))
    driver.step(driver.sampled(FINE))
    driver.step(driver.restored("req_a"))
    assert next_length(driver) == 50, "half of (1,000,000 - 400,000) // 6,000"


def needing(done: events.PrefillChunkDone, token_bytes: int) -> events.PrefillChunkDone:
    """The chunk needed so much for each token while it was computed."""
    peak_bytes = done.active_bytes + done.length * token_bytes
    return msgspec.structs.replace(done, peak_bytes=peak_bytes)


def next_length(driver: HoldDriver) -> int:
    """Of the planned chunk."""
    assert driver.state.chunk is not None
    return driver.state.chunk.length


def test_row_that_is_being_filled_is_not_dropped() -> None:
    driver = HoldDriver()
    driver.run("xyz")
    driver.ask("xyz", 5)
    assert driver.request("req_b").restoring
    assert kinds(driver.press(EMERGENCY)) == ["emergency_declared"]
    assert driver.step(driver.sampled(EMERGENCY)) == []


def test_nobody_is_dropped_for_a_row_that_is_just_leaving() -> None:
    driver = HoldDriver()
    driver.ask("", 400, max_tokens=20)
    driver.feed()
    driver.decode("x")
    driver.step(driver.decoded(req_a="stop"))
    assert driver.state.leaving == {1: 416_000}
    assert kinds(driver.press(EMERGENCY)) == ["emergency_declared"]
    assert phases(driver) == {"req_b": "decoding"}


def test_reading_from_before_a_row_was_gone_is_first_answered_by_a_reclaim() -> None:
    driver = running("x", "y")
    driver.pause("req_b")
    driver.release("req_b")
    driver.press(EMERGENCY)
    driver.step(driver.restored("req_b"))
    driver.step(driver.decoded(req_a="stop"))
    gone = events.KvFreed(request_id="req_a", number=1, freed_bytes=700_000)
    assert kinds(driver.step(gone)) == ["reclaim_started"]
    assert phases(driver) == {"req_b": "decoding"}
    assert driver.step(driver.reclaimed(700_000, FINE)) == []


# pause = false


def test_nobody_is_held_where_pausing_is_off() -> None:
    driver = running("x", "y", pause=False)
    for _ in range(4):
        assert driver.step(driver.sampled(HIGH)) == []


def test_one_victim_is_aborted_where_pausing_is_off() -> None:
    driver = running("x", "y", "z", pause=False)
    decisions = driver.press(EMERGENCY)
    [aborted] = only(decisions, events.RequestAborted)
    assert (aborted.request_id, aborted.reason) == ("req_c", "memory")
    assert phases(driver) == {"req_a": "decoding", "req_b": "decoding"}
    assert driver.step(driver.sampled(EMERGENCY)) == [], "one at a time"
    driver = running("x", pause=False)
    assert only(driver.press(EMERGENCY), events.RequestAborted)[0].request_id == "req_a"


# A chunk that has no room


def two_prompts(*, pause: bool = True, max_rows: int = 2) -> HoldDriver:
    """Two prompts that reserve a chunk at a time, and have no room beside each other in the end."""
    driver = HoldDriver(
        hold_limits(
            reserve="chunk",
            chunk_tokens=128,
            chunk_tokens_beside_rows=16,
            pause=pause,
            max_rows=max_rows,
        )
    )
    driver.ask(long_chain(43), 12, max_tokens=60)
    driver.ask(long_chain(37), 8, max_tokens=60)
    assert len(driver.state.admitted) == 2
    return driver


def until_one_is_held(driver: HoldDriver) -> list[Decision]:
    """Feeds chunks, writes what they fill, and decodes what is ready; the step that holds one."""
    for _ in range(100):
        decisions = driver.step(driver.chunk_done() if driver.state.chunk else driver.decoded())
        if victims(decisions):
            return decisions
        driver.step(*(driver.saved(driver.plans.pop(0)) for _ in list(driver.plans)))
    raise AssertionError("nobody is held")


def test_one_is_held_when_the_next_chunk_has_no_room() -> None:
    driver = two_prompts()
    decisions = until_one_is_held(driver)
    [started] = only(decisions, events.PauseStarted)
    assert (started.request_id, started.reason) == ("req_b", "no_room")
    held = sum(driver.state.requests[n].num_cached_tokens for n in (1, 2))
    assert 1_000_000 + held * 1_000 <= 2_000_000 < 1_000_000 + (held + 128) * 1_000
    assert only(decisions, events.PrefillChunkPlanned) == [], "what it holds is still there"
    driver.come_to_rest("req_b")
    driver.feed()
    assert driver.request("req_a").phase is Phase.DECODING


def test_chunk_waits_for_writers_before_anybody_is_held() -> None:
    driver = two_prompts()
    while driver.state.chunk is not None:
        decisions = driver.step(driver.chunk_done())
        assert victims(decisions) == []
    assert driver.state.index.writing_bytes > 0, "and nothing is fed until they are done"
    driver.step(*(driver.saved(planned) for planned in driver.plans))
    assert driver.state.chunk is not None
    assert phases(driver) == {"req_a": "prefilling", "req_b": "prefilling"}


def test_nobody_is_held_for_a_chunk_where_pausing_is_off() -> None:
    driver = two_prompts(pause=False)
    while driver.state.chunk is not None:
        driver.step(driver.chunk_done())
        driver.save_all()
    assert phases(driver) == {"req_a": "decoding", "req_b": "prefilling"}
    driver.finish("req_a")
    assert driver.state.chunk is not None, "b goes on when a has ended"


def test_both_finish_one_after_the_other() -> None:
    driver = two_prompts()
    until_one_is_held(driver)
    driver.come_to_rest("req_b")
    driver.feed()
    driver.finish("req_a")
    assert driver.request("req_b").phase is Phase.RESUMING
    driver.step(driver.restored("req_b"))
    driver.feed()
    driver.finish("req_b")
    aborts = only([r.event for r in driver.records], events.RequestAborted)
    assert (aborts, driver.state.requests) == ([], {})


def test_lone_request_near_the_capacity_is_fed_in_whole_chunks() -> None:
    driver = HoldDriver()
    driver.ask("", 960, max_tokens=32)
    [chunk] = only(driver.step(driver.chunk_done()), events.PrefillChunkPlanned)
    assert (chunk.start, chunk.length) == (512, 447)


def test_lone_row_that_was_dropped_is_given_up_when_the_memory_does_not_come_back() -> None:
    driver = running("x")
    driver.press(EMERGENCY)
    driver.step(driver.freed("req_a"))
    limits = driver.state.limits
    assert limits is not None
    assert limits.memory is not None
    driver.pass_ns(limits.memory.wait_limit_ns)
    [aborted] = only(driver.step(driver.sampled(EMERGENCY)), events.RequestAborted)
    assert (aborted.reason, aborted.had_row) == ("memory_wait", False)


def test_row_that_was_filled_in_this_step_is_not_held_before_it_goes_on() -> None:
    driver = running("x")
    driver.pause("req_a")
    driver.release("req_a")
    driver.step(driver.sampled(EMERGENCY))
    restored = driver.restored("req_a")
    decisions = driver.step(driver.sampled(EMERGENCY), restored)
    assert "request_resumed" in kinds(decisions)
    assert "pause_started" not in kinds(decisions)


def test_reading_counts_what_was_on_its_way_when_it_was_taken() -> None:
    driver = HoldDriver()
    driver.ask("xy", 1)
    driver.feed()
    assert driver.state.index.writing_bytes > 10_000
    driver.press(EMERGENCY + 10_000)
    driver.save_all()
    assert driver.state.index.writing_bytes == 0
    assert not only([record.event for record in driver.records], events.KvDropped)


def test_one_is_held_at_a_time_for_a_chunk() -> None:
    driver = two_prompts(max_rows=3)
    driver.ask("", 1, max_tokens=60)
    assert victims(until_one_is_held(driver)) == [3], "the youngest, though it is small"
    driver.hold("req_c")
    for _ in range(3):
        assert victims(driver.step(events.ClockTicked())) == []
    driver.come_to_rest("req_c")
    assert phases(driver)["req_b"] == "prefilling"
