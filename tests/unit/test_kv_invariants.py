"""An index that contradicts itself is found, whatever is wrong with it."""

from collections.abc import Callable

import pytest

from journal import events
from scheduler.evolve import evolve
from scheduler.invariants import InvariantBroken, check
from scheduler.prefix import Writing
from scheduler.request import Request
from scheduler.state import SchedulerState
from tests.unit.kv_driver import BLOCK_BYTES, DOMAIN, STATEFUL, KvDriver, kv_limits

WRITING = Writing(number=2, domain=DOMAIN, parent="", end_tokens=16, num_bytes=5)


def busy() -> SchedulerState:
    """One chain on disk and in use, one that may go, and blocks that are written and to be."""
    driver = KvDriver(kv_limits(writing_bytes=2 * BLOCK_BYTES, memory_bytes=10**6), model=STATEFUL)
    driver.run("xy", 5)
    driver.run("q", 5)
    driver.ask("xyzw", 5)
    driver.step(driver.restored("c"))
    driver.step(driver.chunk_done())
    state = driver.state
    assert state.index.writing
    assert state.index.order
    assert driver.request("c").leases
    return state


def row(state: SchedulerState) -> Request:
    return state.requests[3]


def add_orphan(state: SchedulerState) -> None:
    state.index.orphans["n"] = 1


def lend_twice(state: SchedulerState) -> None:
    state.index.blocks["xy"].leases += 1


def lose_lease(state: SchedulerState) -> None:
    del row(state).leases["xy"]


def lend_to_nobody(state: SchedulerState) -> None:
    row(state).leases["n"] = None


def write_what_is_there(state: SchedulerState) -> None:
    state.index.writing["xy"] = WRITING
    state.index.writing_bytes += WRITING.num_bytes


def write_too_much(state: SchedulerState) -> None:
    state.index.writing["n"] = Writing(2, DOMAIN, "", 16, 10**7)
    state.index.writing_bytes += 10**7


def expect_of_nobody(state: SchedulerState) -> None:
    state.index.coming["n"] = 7


def expect_what_is_there(state: SchedulerState) -> None:
    state.index.coming["xy"] = 3


def want_no_more_what_is_used(state: SchedulerState) -> None:
    state.index.unwanted["xy"] = DOMAIN


def want_no_more_what_is_not_there(state: SchedulerState) -> None:
    state.index.unwanted["n"] = DOMAIN


def call_bad_what_is_there(state: SchedulerState) -> None:
    state.index.bad["xy"] = DOMAIN


def remember_what_is_gone(state: SchedulerState) -> None:
    state.index.hot["n"] = 0


def go_out_of_order(state: SchedulerState) -> None:
    state.index.order.reverse()
    state.index.order.pop()


def save_what_is_not_computed(state: SchedulerState) -> None:
    row(state).unsaved = [7]
    row(state).hashes += ["n"] * 9
    state.unsaved[3] = None


def save_unlisted(state: SchedulerState) -> None:
    state.unsaved[9] = None


def restore_more_than_there_is(state: SchedulerState) -> None:
    row(state).num_disk_tokens = 1_000


def restore_a_full_row(state: SchedulerState) -> None:
    row(state).restoring = True


def miscount(name: str) -> Callable[[SchedulerState], None]:
    def change(state: SchedulerState) -> None:
        setattr(state.index, name, getattr(state.index, name) + 1)

    change.__name__ = name
    return change


BREAKS: list[Callable[[SchedulerState], None]] = [
    *(miscount(name) for name in ("disk_bytes", "hot_bytes", "writing_bytes", "num_ours")),
    add_orphan,
    lend_twice,
    lose_lease,
    lend_to_nobody,
    write_what_is_there,
    write_too_much,
    expect_of_nobody,
    expect_what_is_there,
    want_no_more_what_is_used,
    want_no_more_what_is_not_there,
    call_bad_what_is_there,
    remember_what_is_gone,
    go_out_of_order,
    save_what_is_not_computed,
    save_unlisted,
    restore_more_than_there_is,
    restore_a_full_row,
]


def test_a_true_index_passes() -> None:
    state = busy()
    check(state)
    assert state.index.disk_bytes > 0


@pytest.mark.parametrize("spoil", BREAKS, ids=lambda spoil: spoil.__name__)
def test_a_contradiction_is_found(spoil: Callable[[SchedulerState], None]) -> None:
    state = busy()
    spoil(state)
    with pytest.raises(InvariantBroken):
        check(state)


def test_an_eviction_of_what_is_in_use_is_our_bug() -> None:
    driver = KvDriver()
    driver.ask("xy", 1)
    driver.prefill()
    driver.save_all()
    [record] = driver.place("decision", [evict("xy")])
    with pytest.raises(AssertionError, match="is in use and evicted"):
        evolve(driver.state, record)


def evict(name: str) -> events.BlocksEvicted:
    return events.BlocksEvicted(
        domain=DOMAIN, hashes=(name,), states=(), freed_bytes=1, reason="budget"
    )
