"""Each invariant of held requests finds the state that breaks it."""

from collections.abc import Callable

import pytest

from journal import events
from scheduler.deadlines import deadline_ns
from scheduler.invariants import InvariantBroken, check, check_cheap
from scheduler.prefix import KeptTail, add_tail, change
from scheduler.request import Phase
from scheduler.state import SchedulerState
from tests.unit.core_driver import only
from tests.unit.hold_driver import HoldDriver, hold_limits
from tests.unit.kv_driver import DOMAIN


def busy() -> SchedulerState:
    """1 is held with a tail, 2 is pausing, 3 is filled again, 4 is held in the queue, 5 decodes."""
    driver = HoldDriver(hold_limits(max_rows=4))
    driver.decode("a", "b", "c")
    driver.pause("req_a")
    driver.pause("req_c")
    driver.release("req_c")
    driver.step(driver.receive(5, name="req_d"), events.HoldRequested(request_id="req_d"))
    driver.decode("e")
    driver.hold("req_b")
    state = driver.state
    found = (state.paused, state.pausing, state.admitted, state.batch_rows)
    assert found == ([1, 4], [2], [2, 3, 5], [5])
    assert state.requests[3].phase is Phase.RESUMING
    return state


def setting(what: str, value: object, number: int = 0) -> Callable[[SchedulerState], None]:
    """Sets a field of the state, or of the request with this number."""

    def spoil(state: SchedulerState) -> None:
        setattr(state.requests[number] if number else state, what, value)

    return spoil


def pin_for_nobody(state: SchedulerState) -> None:
    change(state.index, "e", pins=1)


def pin_too_little(state: SchedulerState) -> None:
    change(state.index, "a", pins=-1)


def pin_what_is_not_there(state: SchedulerState) -> None:
    state.requests[1].pins["n"] = None


def keep_a_tail_for_nobody(state: SchedulerState) -> None:
    add_tail(state.index, "req_x-9", 1)


def lose_a_tail(state: SchedulerState) -> None:
    state.index.disk_bytes -= state.index.tails.popitem()[1].num_bytes


def miscount_a_tail(state: SchedulerState) -> None:
    state.index.tails = {name: KeptTail(DOMAIN, 7) for name in state.index.tails}


def forget_what_is_written(state: SchedulerState) -> None:
    state.index.writing_tails = {}


def call_a_tail_bad(state: SchedulerState) -> None:
    state.index.bad[next(iter(state.index.tails))] = DOMAIN


def hold_files_while_decoding(state: SchedulerState) -> None:
    state.requests[5].pins = {"a": None}
    change(state.index, "a", pins=1)


def restore_more_than_it_had(state: SchedulerState) -> None:
    state.requests[3].num_disk_tokens = 1_000


SPOILS = [
    (setting("paused", [4, 1]), "order in which they go on"),
    (setting("paused", [1, 5]), "is paused"),
    (setting("pausing", []), "pauses under way"),
    (setting("pausing", [2, 5]), "pauses under way"),
    (setting("num_cached_tokens", 1, 1), "caches nothing"),
    (setting("reserved_bytes", 1, 1), "reserves nothing"),
    (setting("num_cached_tokens", 1_000, 2), "is pending"),
    (setting("phase", Phase.PAUSED, 5), "batch is the rows that decode"),
    (pin_for_nobody, "pins are those of held requests"),
    (pin_too_little, "pins are those of held requests"),
    (pin_what_is_not_there, "pins are those of held requests"),
    (keep_a_tail_for_nobody, "tails are those of held requests"),
    (lose_a_tail, "tails are those of held requests"),
    (miscount_a_tail, "disk_bytes is the sum"),
    (forget_what_is_written, "writing_bytes is the sum"),
    (call_a_tail_bad, "what cannot be read is not there"),
    (hold_files_while_decoding, "holds files while it is held"),
    (restore_more_than_it_had, "has restored some of its prompt"),
    (setting("leases", {"a": None}, 1), "holds nothing without a row"),
]


def test_whole_state_is_sound() -> None:
    check(busy())


@pytest.mark.parametrize(("spoil", "message"), SPOILS)
def test_invariant_finds(spoil: Callable[[SchedulerState], None], message: str) -> None:
    state = busy()
    spoil(state)
    with pytest.raises(InvariantBroken, match=message):
        check(state)


def test_request_in_no_list_is_found_at_little_cost() -> None:
    state = busy()
    state.paused = [1]
    with pytest.raises(InvariantBroken, match="admitted or paused"):
        check_cheap(state)


# When time itself must act


def test_oldest_request_and_a_wait_for_memory_have_a_time() -> None:
    driver = HoldDriver(hold_limits(is_auto=True, wait_limit_ns=5_000_000))
    driver.step(driver.sampled(1_000_000, 0, 5_000))
    assert deadline_ns(driver.state) is None
    driver.ask("x", 1)
    received_ns = driver.request("req_a").received_ns
    assert deadline_ns(driver.state) == received_ns + 5_000_000
    driver.pass_ns(5_000_000)
    [aborted] = only(driver.step(events.ClockTicked()), events.RequestAborted)
    assert (aborted.request_id, aborted.reason) == ("req_a", "memory_wait")
    assert deadline_ns(driver.state) is None


def test_wait_for_memory_begins_when_anything_went_on_last() -> None:
    driver = HoldDriver(hold_limits(is_auto=True, wait_limit_ns=5_000_000))
    driver.decode("x")
    driver.pause("req_a")
    driver.step(driver.sampled(1_000_000, 0, 5_000))
    assert deadline_ns(driver.state) is None, "an operator holds it, memory does not"
    driver.release("req_a")
    assert driver.request("req_a").phase is Phase.PAUSED
    progress_ns = driver.state.progress_ns
    assert deadline_ns(driver.state) == progress_ns + 5_000_000
    driver.step(driver.sampled(1_000_000, 0, 500_000))
    assert driver.request("req_a").phase is Phase.RESUMING
    assert deadline_ns(driver.state) is None


def test_an_explicit_ceiling_has_nobody_to_wait_for() -> None:
    driver = HoldDriver(hold_limits(wait_limit_ns=5_000_000))
    driver.step(driver.sampled(3_000_000))
    driver.ask("x", 1)
    assert driver.request("req_a").phase is Phase.PREFILLING, "alone, it is let in"
    assert deadline_ns(driver.state) is None
