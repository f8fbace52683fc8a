"""The ladder: one rung at a time, the least that hurts first, and never all."""

import pytest

from journal import events
from scheduler.effects import ReclaimMemory, ShrinkTier
from scheduler.relief import MAX_COOLED
from tests.unit.core_driver import kinds, only
from tests.unit.hold_driver import (
    EMERGENCY,
    FINE,
    HIGH,
    HoldDriver,
    decoded,
    hold_limits,
    long_chain,
    phases,
    running,
    victims,
)
from tests.unit.kv_driver import BLOCK

# Reclaim


def test_allocator_gives_back_first() -> None:
    driver = running("x", "y", memory_bytes=1_000_000)
    [started] = driver.press(1_700_000, 160_000)
    assert started == events.ReclaimStarted(
        usage_bytes=1_860_000 + 32_000,
        ceiling_bytes=2_000_000,
        expected_bytes=160_000,
        num_admitted=2,
    )
    assert [type(e) for e in driver.effects] == [ReclaimMemory]
    assert driver.step(driver.sampled(1_700_000, 160_000)) == [], "nothing else meanwhile"
    assert driver.step(driver.sampled(1_700_000, 160_000)) == []
    assert driver.step(driver.reclaimed(160_000, 1_700_000)) == []
    driver.step(driver.sampled(1_700_000))
    assert driver.state.memory.level == ""


@pytest.mark.parametrize(("cached_bytes", "kind"), [(20_000, "reclaim"), (19_999, "pause")])
def test_allocator_is_not_asked_for_next_to_nothing(cached_bytes: int, kind: str) -> None:
    decisions = running("x", "y").press(HIGH, cached_bytes)
    assert kinds(decisions)[0] == f"{kind}_started"


@pytest.mark.parametrize("freed_bytes", [0, 30_000])
def test_allocator_is_not_asked_twice_in_a_row(freed_bytes: int) -> None:
    driver = running("x", "y")
    driver.press(HIGH, 30_000)
    driver.step(driver.reclaimed(freed_bytes))
    assert kinds(driver.press(HIGH, 30_000))[0] == "pause_started", "what it keeps comes back"


@pytest.mark.parametrize("freed_bytes", [-51_000_000_000, 0])
def test_reclaim_that_came_to_less_than_nothing_is_one_all_the_same(freed_bytes: int) -> None:
    driver = running("x", "y")
    driver.press(HIGH, 30_000)
    driver.step(driver.reclaimed(freed_bytes))
    assert driver.state.memory.reclaimed
    driver.step(driver.sampled(FINE))
    assert not driver.state.memory.reclaimed, "until the pressure is over"


def test_allocator_is_asked_again_when_any_row_is_gone() -> None:
    driver = running("x", "y")
    driver.press(HIGH, 30_000)
    driver.step(driver.reclaimed(0))
    driver.step(driver.decoded(req_b="stop"))
    driver.step(events.KvFreed(request_id="req_b", number=2, freed_bytes=32_000))
    assert kinds(driver.press(HIGH - 62_000, 62_000 + 20_000)) == ["reclaim_started"]


def test_busy_server_reclaims_between_two_steps() -> None:
    driver = running("x", "y")
    driver.step(driver.decoded(), driver.sampled(HIGH, 500_000))
    decisions = driver.step(driver.decoded(), driver.sampled(HIGH, 500_000))
    assert "reclaim_started" in kinds(decisions)
    driver.step(driver.decoded())
    assert len(driver.state.batch_rows) == 2, "and nobody leaves"


def test_reclaim_that_is_not_answered_is_over_after_its_time() -> None:
    driver = running("x", "y")
    driver.press(HIGH, 30_000)
    driver.pass_ns(2_000_000_000)
    assert driver.step(driver.sampled(HIGH)) == []
    assert victims(driver.step(driver.sampled(HIGH))) == [2]


# Shrink


def test_blocks_in_memory_go_next_down_to_the_mark() -> None:
    driver = running("abcdef", memory_bytes=1_000_000)
    driver.ask("x", 1)
    driver.feed()
    usage = 1_860_000
    unallocated = 16_000 * 2
    [shrunk] = driver.press(usage - unallocated)
    assert shrunk == events.TierShrunk(
        hashes=("a", "ab", "abc", "abcd", "abcde", "abcdef"),
        freed_bytes=6 * 16_000,
        reason="pressure",
        usage_bytes=usage,
    ), "1,764,000 are over 1,760,000 still, and that was all"
    assert [type(e) for e in driver.effects] == [ShrinkTier]
    assert driver.state.index.hot == {}


def test_no_more_blocks_go_than_needed() -> None:
    driver = running("abcdefgh", memory_bytes=1_000_000)
    [shrunk] = driver.press(1_840_000)
    assert isinstance(shrunk, events.TierShrunk)
    assert shrunk.usage_bytes is not None
    assert shrunk.usage_bytes - shrunk.freed_bytes < 1_760_000
    assert shrunk.usage_bytes - shrunk.freed_bytes + 16_000 >= 1_760_000
    assert driver.state.index.hot_bytes == 128_000 - shrunk.freed_bytes


def test_blocks_in_memory_go_some_at_a_time() -> None:
    chain = long_chain(MAX_COOLED + 2)
    driver = HoldDriver(
        hold_limits(ceiling_bytes=20_000_000, memory_bytes=10_000_000, writing_bytes=10_000_000)
    )
    driver.decode(chain)
    [shrunk] = driver.press(19_900_000)
    assert isinstance(shrunk, events.TierShrunk)
    assert len(shrunk.hashes) == MAX_COOLED


# Hold


def test_one_request_is_held_and_its_event_has_the_numbers() -> None:
    driver = running("x", "y", "z")
    decoded(driver, 3)
    cached = driver.request("req_c").num_cached_tokens
    decisions = driver.press()
    [started] = only(decisions, events.PauseStarted)
    assert started == events.PauseStarted(
        request_id="req_c",
        number=3,
        reason="high",
        usage_bytes=driver.state.memory.usage_bytes,
        ceiling_bytes=2_000_000,
        rank=1,
        num_candidates=2,
        frees_bytes=32_000,
        unsaved_bytes=(cached - BLOCK) * 1_000,
        num_cached_tokens=cached,
        num_output_tokens=driver.request("req_c").num_output_tokens,
    )


def test_youngest_admission_is_held_first_and_the_oldest_never() -> None:
    driver = running("x", "y", "z")
    assert victims(driver.press()) == [3]
    driver.come_to_rest("req_c")
    assert victims(driver.press()) == [2]
    driver.come_to_rest("req_b")
    for _ in range(4):
        assert driver.step(driver.sampled(HIGH)) == []
    assert phases(driver) == {"req_a": "decoding", "req_b": "paused", "req_c": "paused"}


def test_age_is_that_of_the_first_admission() -> None:
    driver = running("x", "y")
    driver.pause("req_a")
    driver.release("req_a")
    driver.step(driver.restored("req_a"))
    decoded(driver, 20)
    assert victims(driver.press()) == [2], "a was there first, though its row is younger"


def test_rows_on_their_way_out_are_no_candidates() -> None:
    driver = running("x", "y", "z")
    driver.hold("req_c")
    decisions = driver.press()
    assert victims(decisions) == [2]
    assert only(decisions, events.PauseStarted)[0].num_candidates == 1


def test_row_that_has_just_gone_on_is_left_alone_until_it_has_made_progress() -> None:
    driver = running("x", "y")
    driver.pause("req_b")
    driver.release("req_b")
    driver.step(driver.restored("req_b"))
    assert driver.press() == []
    decoded(driver, 15)
    assert driver.step(driver.sampled(HIGH)) == []
    assert victims(driver.step(driver.decoded())) == [2]


def test_another_one_is_held_in_its_place() -> None:
    driver = running("x", "y", "z")
    driver.pause("req_c")
    driver.release("req_c")
    driver.step(driver.restored("req_c"))
    assert victims(driver.press()) == [2]


def test_protection_ends_with_the_row() -> None:
    driver = running("xy", "z")
    driver.pause("req_b")
    driver.release("req_b")
    driver.step(driver.restored("req_b"))
    driver.start()
    driver.step(driver.restored("req_a"), driver.restored("req_b"))
    driver.feed()
    assert victims(driver.press()) == [2]


def test_row_whose_pause_writes_more_than_it_frees_is_no_victim() -> None:
    driver = HoldDriver(hold_limits(chunk_tokens=16, chunk_tokens_beside_rows=16))
    driver.decode("x")
    driver.ask("yz", 1)
    assert driver.request("req_b").num_cached_tokens == 0
    assert driver.press() == [], "it has nothing yet, so holding it frees nothing"
    driver.step(driver.chunk_done())
    assert victims(driver.step(driver.sampled(HIGH))) == [2]


def test_row_that_is_filled_again_is_no_victim() -> None:
    driver = running("x", "y")
    driver.pause("req_b")
    driver.release("req_b")
    assert driver.press(EMERGENCY) == [
        events.EmergencyDeclared(
            usage_bytes=driver.state.memory.usage_bytes, ceiling_bytes=2_000_000, num_admitted=2
        )
    ]


def test_alone_at_the_high_mark_nobody_is_held() -> None:
    driver = running("x")
    for _ in range(9):
        assert driver.step(driver.sampled(HIGH)) == []


def test_nothing_runs_and_nothing_is_held() -> None:
    driver = HoldDriver(hold_limits(memory_bytes=1_000_000))
    driver.run("xy")
    assert kinds(driver.press(EMERGENCY, 100_000)) == ["emergency_declared", "reclaim_started"]
    driver.step(driver.reclaimed(100_000, EMERGENCY))
    assert kinds(driver.press(EMERGENCY)) == ["tier_shrunk"]
    for _ in range(4):
        assert driver.step(driver.sampled(EMERGENCY)) == []
