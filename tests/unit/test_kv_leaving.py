"""What leaves the disk and memory: in which order, for which reason, and what never does."""

import msgspec
import pytest

from journal import events
from scheduler.deadlines import deadline_ns
from scheduler.effects import RemoveFiles
from scheduler.eviction import MAX_EVICTED
from tests.unit.core_driver import LIMITS
from tests.unit.hold_driver import HoldDriver
from tests.unit.kv_driver import (
    BLOCK,
    BLOCK_BYTES,
    DOMAIN,
    STATEFUL,
    KvDriver,
    kv_limits,
    names_of,
    ready,
)

TICK = events.ClockTicked()


def tight(blocks: int) -> KvDriver:
    """A budget of so many blocks, of which a tenth is kept free for the writers."""
    return KvDriver(kv_limits(max_bytes=blocks * BLOCK_BYTES, writing_bytes=2 * BLOCK_BYTES))


def gone(driver: KvDriver) -> list[tuple[str, tuple[str, ...]]]:
    """All evictions so far: why, and which."""
    found = [r.event for r in driver.records if isinstance(r.event, events.BlocksEvicted)]
    return [(event.reason, event.hashes + event.states) for event in found]


def names_gone(driver: KvDriver) -> list[str]:
    return [name for _, names in gone(driver) for name in names]


def test_what_was_not_used_for_longest_goes_first_and_the_deepest_of_a_chain() -> None:
    driver = KvDriver(kv_limits(max_bytes=100 * BLOCK_BYTES))
    for chain in ("ab", "pq", "xyz"):
        driver.run(chain)
    driver.run("pq", 2)
    driver.step(events.ClearRequested(by="test"))
    assert gone(driver) == [("cleared", ("ab", "a", "xyz", "xy", "x", "pq", "p"))]
    assert (driver.on_disk, driver.state.index.disk_bytes) == ([], 0)
    assert driver.state.clearing is False


def test_the_budget_holds_room_for_the_writers() -> None:
    driver = tight(4)
    driver.run("ab")
    driver.run("p")
    assert gone(driver) == []
    driver.run("q")
    assert gone(driver) == [("budget", ("ab",))]
    assert driver.state.index.disk_bytes == 3 * BLOCK_BYTES


def test_a_state_goes_with_its_block() -> None:
    driver = KvDriver(model=STATEFUL)
    driver.run("xy", 5)
    driver.step(events.ClearRequested(by="test"))
    assert gone(driver) == [("cleared", ("xy", "x", "xy"))]
    [effect] = [e for e in driver.effects if isinstance(e, RemoveFiles)]
    assert (effect.domain, effect.hashes, effect.states) == (DOMAIN, ("xy", "x"), ("xy",))
    assert driver.state.index.disk_bytes == 0


def test_a_state_that_is_saved_after_its_block_has_gone_is_removed() -> None:
    driver = KvDriver(model=STATEFUL)
    driver.ask("xy", 5)
    driver.prefill()
    first, second, state = driver.plans
    driver.step(driver.saved(first), driver.saved(second))
    driver.finish("a")
    driver.step(events.ClearRequested(by="test"))
    driver.step(driver.saved(state))
    assert gone(driver) == [("cleared", ("xy", "x")), ("bad", ("xy",))]
    assert driver.state.index.disk_bytes == 0


def test_another_domain_goes_first_however_young() -> None:
    driver = KvDriver()
    driver.run("ab")
    driver.begin_run()
    driver.step(ready(driver.model, "another"))
    driver.run("xy")
    driver.begin_run()
    driver.step(ready(driver.model, DOMAIN))
    driver.step(events.ClearRequested(by="test"))
    assert gone(driver) == [("cleared", ("xy", "x"))]
    assert [e.domain for e in driver.effects if isinstance(e, RemoveFiles)] == ["another"]
    driver.step(TICK)
    assert gone(driver)[1:] == [("cleared", ("ab", "a"))]
    assert [e.domain for e in driver.effects if isinstance(e, RemoveFiles)] == [DOMAIN]


def test_what_is_leased_stays_and_what_is_below_it() -> None:
    driver = KvDriver()
    driver.run("xyz")
    driver.ask("xy", 1)
    driver.step(events.ClearRequested(by="test"))
    assert driver.on_disk == ["x", "xy"]
    assert driver.state.clearing is False
    driver.step(TICK)
    assert gone(driver) == [("cleared", ("xyz",))]


@pytest.mark.parametrize("pinned", ["xy", "xyz"])
def test_what_a_held_request_pins_stays(pinned: str) -> None:
    driver = HoldDriver()
    driver.run("xyz")
    driver.ask(pinned, 2)
    driver.step(driver.restored("req_b"))
    driver.feed()
    driver.pause("req_b")
    driver.step(events.ClearRequested(by="test"))
    assert driver.on_disk == list(names_of(pinned))
    assert deadline_ns(driver.state) is None
    driver.step(events.CancelRequested(request_id="req_b"))
    driver.step(events.ClearRequested(by="test"))
    assert driver.on_disk == []


def test_a_block_is_not_sent_away_in_the_step_that_leases_it() -> None:
    limits = msgspec.structs.replace(kv_limits(state_every_blocks=100), chunk_tokens=BLOCK)
    driver = KvDriver(limits, model=STATEFUL)
    driver.run("xyz", suffix_tokens=4 * BLOCK)
    driver.ask("xyz", 3)
    assert driver.request("b").leases == {}, "there is no state to start from"
    driver.step(driver.chunk_done(), events.ClearRequested(by="test"))
    assert driver.request("b").leases == {"x": None}
    driver.step(TICK)
    assert driver.on_disk == ["x"]


def test_clear_goes_on_by_ticks_until_all_has_gone() -> None:
    driver = KvDriver(msgspec.structs.replace(kv_limits(), max_waiting=200))
    num_blocks = MAX_EVICTED + 3
    chain = "".join(chr(200 + number) for number in range(num_blocks))
    driver.run(chain)
    assert deadline_ns(driver.state) is None
    driver.step(events.ClearRequested(by="test"))
    assert len(driver.on_disk) == 3
    assert deadline_ns(driver.state) == driver.state.now_ns
    driver.step(TICK)
    assert driver.on_disk == []
    assert deadline_ns(driver.state) is None
    assert names_gone(driver) == list(reversed(names_of(chain)))


def test_unreadable_files_go_by_ticks_too() -> None:
    driver = KvDriver()
    chain = "abcdefghijkl"
    driver.run(chain)
    driver.step(events.BlocksLost(hashes=names_of(chain), states=(), reason="corrupt"))
    assert deadline_ns(driver.state) == driver.state.now_ns
    driver.step(TICK)
    assert sorted(names_gone(driver)) == sorted(names_of(chain))
    assert deadline_ns(driver.state) is None


def test_missing_files_are_forgotten_without_an_eviction() -> None:
    driver = KvDriver(model=STATEFUL)
    driver.run("xy", 5)
    driver.step(events.BlocksLost(hashes=("xy",), states=(), reason="missing"))
    assert gone(driver) == [("bad", ("xy",))], "its state has a file"
    assert driver.on_disk == ["x"]


def test_age() -> None:
    driver = KvDriver(kv_limits(max_age_ns=100_000))
    driver.run("ab")
    driver.begin_run()
    driver.step(ready(driver.model, "another"))
    driver.run("x")
    driver.now_ns += 90_000
    driver.run("y")
    driver.now_ns += 20_000
    while deadline_ns(driver.state) is not None:
        driver.step(TICK)
    driver.step(TICK)
    assert driver.on_disk == ["y"]
    assert {reason for reason, _ in gone(driver)} == {"age"}


def test_old_blocks_of_ours_do_not_wait_for_young_ones_of_others() -> None:
    driver = KvDriver(kv_limits(max_age_ns=100_000))
    driver.run("x")
    driver.now_ns += 90_000
    driver.run("y")
    driver.begin_run()
    driver.step(ready(driver.model, "another"))
    driver.run("p")
    driver.begin_run()
    driver.step(ready(driver.model, DOMAIN))
    driver.now_ns += 20_000
    driver.step(TICK)
    assert gone(driver) == [("age", ("x",))]


def test_the_reserve_of_the_file_system() -> None:
    driver = KvDriver(kv_limits(reserve_bytes=1_000_000))
    for chain in "xyz":
        driver.run(chain)
    measured = events.StoreMeasured(
        free_bytes=1_000_000 - BLOCK_BYTES - 1, num_swept=0, swept_bytes=0
    )
    driver.step(measured)
    assert gone(driver) == [("reserve", ("x", "y"))]
    assert driver.state.index.free_bytes == 1_000_000 + BLOCK_BYTES - 1


@pytest.mark.parametrize(
    ("reserve_bytes", "expected"), [(100_000, [("reserve", ("x", "y"))]), (0, [])]
)
def test_a_full_disk_with_a_reserve_is_given_room_for_the_next_save(
    reserve_bytes: int, expected: list[tuple[str, tuple[str, ...]]]
) -> None:
    driver = KvDriver(kv_limits(reserve_bytes=reserve_bytes, writing_bytes=2 * BLOCK_BYTES))
    for chain in "xyz":
        driver.run(chain)
    measured = events.StoreMeasured(free_bytes=reserve_bytes + 1, num_swept=0, swept_bytes=0)
    driver.step(measured)
    assert gone(driver) == []
    driver.step(events.SavingStopped(reason="disk_full", detail=""))
    assert gone(driver) == expected


# Output that nothing can match again


def with_output(driver: KvDriver, chain: str, name: str) -> None:
    """Runs a request whose last block is its own output, and is not to be kept."""
    driver.ask(chain[:-1], BLOCK - 1, keep_output=False)
    driver.prefill()
    driver.step(driver.decoded(), driver.named(name, chain, first=len(chain) - 1))
    driver.step(driver.decoded())


def test_output_that_no_prompt_repeats_goes_once_it_is_saved() -> None:
    driver = KvDriver()
    with_output(driver, "xyo", "a")
    driver.finish("a")
    assert gone(driver) == []
    driver.save_all()
    assert gone(driver) == [("never_matched", ("xyo",))]
    assert driver.on_disk == ["x", "xy"]


def test_output_that_another_request_uses_stays() -> None:
    driver = KvDriver()
    with_output(driver, "xyo", "a")
    driver.save_all()
    driver.ask("xyo", 1)
    driver.step(driver.restored("b"))
    driver.finish("a")
    driver.prefill()
    driver.finish("b")
    driver.step(TICK)
    assert driver.on_disk == ["x", "xy", "xyo"]


def test_a_retry_keeps_its_output() -> None:
    driver = KvDriver()
    with_output(driver, "xyo", "a")
    driver.save_all()
    driver.step(driver.failed("a"))
    driver.step(driver.freed("a"))
    assert driver.on_disk == ["x", "xy", "xyo"]


def test_a_request_that_ends_in_the_queue_takes_its_output_along() -> None:
    driver = KvDriver()
    with_output(driver, "xyo", "a")
    driver.save_all()
    driver.begin_run()
    driver.step(events.CancelRequested(request_id="a"))
    assert deadline_ns(driver.state) == driver.state.now_ns
    driver.step(TICK)
    assert gone(driver) == [("never_matched", ("xyo",))]


def test_unwanted_files_of_another_domain_are_looked_for_there() -> None:
    driver = KvDriver()
    with_output(driver, "xyo", "a")
    driver.save_all()
    driver.step(driver.decoded(a="stop"))
    assert set(driver.state.index.unwanted) == {"xyo"}
    driver.limits = LIMITS
    driver.begin_run()
    driver.step(ready(driver.model, ""))
    assert gone(driver) == [], "this run saves nothing"
    driver.limits = kv_limits()
    driver.begin_run()
    driver.step(ready(driver.model, "another"))
    [event] = [r.event for r in driver.records if isinstance(r.event, events.BlocksEvicted)]
    assert (event.domain, event.hashes) == (DOMAIN, ("xyo",))


# Memory


def test_memory_gives_up_what_was_used_least_recently() -> None:
    driver = KvDriver(kv_limits(memory_bytes=3 * BLOCK_BYTES))
    driver.run("x")
    driver.run("y")
    driver.run("z")
    driver.run("x", 2)
    assert list(driver.state.index.hot) == ["y", "z", "x"]
    driver.run("q")
    shrunk = [r.event for r in driver.records if isinstance(r.event, events.TierShrunk)]
    assert [(event.hashes, event.freed_bytes) for event in shrunk] == [
        (("y", "z"), 2 * BLOCK_BYTES)
    ]
    assert driver.on_disk == ["q", "x", "y", "z"]


@pytest.mark.parametrize("how", ["cleared", "lost"])
def test_memory_forgets_what_is_not_on_disk(how: str) -> None:
    driver = KvDriver(kv_limits(memory_bytes=10**6), model=STATEFUL)
    driver.run("xy", 5)
    assert set(driver.state.index.hot) == {"x", "xy", "xy.state"}
    if how == "cleared":
        driver.step(events.ClearRequested(by="test"))
    else:
        driver.step(events.BlocksLost(hashes=("xy", "x"), states=("xy",), reason="missing"))
    assert (driver.state.index.hot, driver.state.index.hot_bytes) == ({}, 0)
