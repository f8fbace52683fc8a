"""A request waits for blocks that another one is just computing: bounded, and only if it helps."""

import msgspec
import pytest

from journal import events
from scheduler.admission import MAX_ADMISSIONS
from scheduler.deadlines import deadline_ns
from tests.unit.core_driver import only
from tests.unit.kv_driver import (
    BLOCK,
    BLOCK_BYTES,
    KV,
    STATEFUL,
    KvDriver,
    admitted,
    kv_limits,
)

CHUNKS_OF_ONE = msgspec.structs.replace(kv_limits(), chunk_tokens=BLOCK)


def deferred(decisions: list[events.Decision]) -> events.RequestDeferred:
    [decision] = only(decisions, events.RequestDeferred)
    return decision


def test_a_twin_waits_for_the_last_block_that_it_shares() -> None:
    driver = KvDriver(CHUNKS_OF_ONE)
    driver.ask("wxyz", 3)
    wait = deferred(driver.ask("wxq", 3))
    assert (wait.hash, wait.computed_by) == ("wx", 1)
    assert wait.until_ns == driver.state.now_ns + KV.await_ns
    driver.step(driver.chunk_done())
    assert only(driver.step(driver.saved(driver.plans.pop(0))), events.RequestAdmitted) == []
    driver.step(driver.chunk_done())
    admission = admitted(driver.step(driver.saved(driver.plans.pop(0))))
    assert (admission.request_id, admission.num_cached_tokens) == ("b", 2 * BLOCK)
    assert admission.waited_ns > 0
    assert driver.request("b").deferred_until_ns == 0


def test_twins_of_one_step_compute_once() -> None:
    driver = KvDriver()
    arrivals = [
        msgspec.structs.replace(driver.receive(3 * BLOCK + 1, name=name), number=number)
        for number, name in enumerate("abc", 1)
    ]
    names = [driver.named(name, "xyz") for name in "abc"]
    decisions = driver.step(*arrivals, *names)
    assert admitted(decisions).request_id == "a"
    waits = only(decisions, events.RequestDeferred)
    assert [(w.request_id, w.hash, w.computed_by) for w in waits] == [
        ("b", "xyz", 1),
        ("c", "xyz", 1),
    ]
    driver.prefill()
    driver.save_all()
    assert [driver.request(name).restoring for name in "bc"] == [True, True]


def test_those_behind_it_pass() -> None:
    driver = KvDriver()
    driver.ask("xyz", 3)
    driver.ask("xyz", 3)
    assert admitted(driver.ask("q", 3)).request_id == "c"


def test_the_end_of_the_one_who_computes_ends_the_wait() -> None:
    driver = KvDriver()
    driver.ask("xyz", 3)
    driver.ask("xyz", 3)
    decisions = driver.step(events.CancelRequested(request_id="a"))
    assert admitted(decisions).request_id == "b"
    assert driver.state.index.coming == {"x": 2, "xy": 2, "xyz": 2}


def test_a_stop_of_saving_ends_the_wait() -> None:
    driver = KvDriver()
    driver.ask("xyz", 3)
    driver.ask("xyz", 3)
    assert admitted(driver.step(events.SavingStopped(reason="io_error", detail=""))).number == 2
    assert only(driver.ask("xyz", 3), events.RequestDeferred) == [], "and none begins"


def test_time_ends_the_wait() -> None:
    driver = KvDriver()
    driver.ask("xyz", 3)
    wait = deferred(driver.ask("xyz", 3))
    assert deadline_ns(driver.state) == wait.until_ns
    driver.now_ns = wait.until_ns - 2_000
    assert only(driver.step(events.ClockTicked()), events.RequestAdmitted) == []
    assert admitted(driver.step(events.ClockTicked())).number == 2
    assert deadline_ns(driver.state) is None


def test_a_wait_of_nothing_is_none() -> None:
    driver = KvDriver(kv_limits(await_ns=0))
    driver.ask("xyz", 3)
    decisions = driver.ask("xyz", 3)
    assert only(decisions, events.RequestDeferred) == []
    assert admitted(decisions).parted_because == "being_computed"


def test_a_block_that_is_not_saved_ends_the_wait() -> None:
    driver = KvDriver()
    driver.ask("xyz", 3)
    driver.ask("xyz", 3)
    driver.prefill()
    failed = [
        events.BlockSaveFailed(hash=p.hash, part=p.part, reason="not_taken", detail="")
        for p in driver.plans
    ]
    assert admitted(driver.step(*failed)).number == 2


def test_a_retry_waits_for_nobody() -> None:
    driver = KvDriver()
    driver.ask("xyz", 3)
    driver.ask("q", 3)
    driver.step(driver.failed("a", "prefill"))
    driver.ask("xyz", 3)
    driver.step(driver.freed("a"))
    assert driver.request("a").retries == 1
    assert driver.request("a").deferred_until_ns == 0


@pytest.mark.parametrize(("more", "every"), [(0, 0), (3, 0), (3, 100)])
def test_a_twin_with_states_waits_for_the_state_too(more: int, every: int) -> None:
    driver = KvDriver(kv_limits(state_every_blocks=every), model=STATEFUL)
    driver.ask("xy", 1 + more, suffix_tokens=1)
    wait = deferred(driver.ask("xy", 1 + more, suffix_tokens=1))
    assert wait.hash == "xy"
    driver.prefill()
    first, second, state = driver.plans
    driver.step(driver.saved(first))
    assert only(driver.step(driver.saved(second)), events.RequestAdmitted) == []
    assert admitted(driver.step(driver.saved(state))).num_cached_tokens == 2 * BLOCK


def test_a_state_on_its_way_is_waited_for() -> None:
    driver = KvDriver(model=STATEFUL)
    driver.ask("xy", 1)
    driver.prefill()
    first, second, state = driver.plans
    driver.step(driver.saved(first), driver.saved(second))
    wait = deferred(driver.ask("xyq", 1))
    assert (wait.hash, wait.computed_by) == ("xy", 1)
    assert admitted(driver.step(driver.saved(state))).num_cached_tokens == 2 * BLOCK


def test_nobody_waits_for_blocks_without_a_state_among_them() -> None:
    driver = KvDriver(kv_limits(state_every_blocks=4), model=STATEFUL)
    driver.ask("wxyz", 5)
    decisions = driver.ask("wxq", 5)
    assert only(decisions, events.RequestDeferred) == []
    assert admitted(decisions).number == 2


def test_a_step_over_many_twins_is_bounded() -> None:
    limits = msgspec.structs.replace(kv_limits(), max_waiting=100)
    driver = KvDriver(limits)
    driver.begin_run()
    for number in range(1, 81):
        arrival = driver.receive(BLOCK + 1, name=f"r{number}")
        driver.step(arrival, driver.named(f"r{number}", "x"))
    ready = events.EngineReady(
        model=driver.model, one_row_only=False, note="", load_ns=1, kv_domain="d" * 64
    )
    decisions = driver.step(ready)
    told = len(only(decisions, events.RequestDeferred))
    assert told + len(only(decisions, events.RequestAdmitted)) == MAX_ADMISSIONS
    decisions = driver.step(driver.chunk_done())
    assert len(only(decisions, events.RequestDeferred)) == MAX_ADMISSIONS
    driver.step(driver.decoded())
    assert len([r for r in driver.state.requests.values() if r.deferred_hash]) == 79
    assert only(driver.step(driver.decoded()), events.RequestDeferred) == []
    driver.save_all()
    assert len(driver.state.admitted) == 4
    assert driver.state.index.disk_bytes == BLOCK_BYTES


def test_a_wait_ends_with_the_run() -> None:
    driver = KvDriver()
    driver.ask("xyz", 3)
    driver.ask("xyz", 3)
    assert driver.request("b").deferred_hash == "xyz"
    driver.begin_run()
    assert driver.request("b").deferred_hash == ""
    assert driver.request("b").deferred_until_ns == 0
