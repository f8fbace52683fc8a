"""Held requests through deaths and ends: in every stage of a pause and of a resume."""

from collections.abc import Callable

import msgspec
import pytest

from journal import events
from journal.events import Limits
from scheduler.evolve import fold
from scheduler.request import Phase
from tests.unit.core_driver import kinds, only, server_started
from tests.unit.hold_driver import HoldDriver, hold_limits, phases
from tests.unit.kv_driver import DOMAIN, ready

LIMITS = hold_limits(chunk_tokens=16, writing_bytes=32_000)


def feeding(limits: Limits = LIMITS) -> HoldDriver:
    """Held while its chunk is being fed."""
    driver = HoldDriver(limits)
    driver.ask("xyz", 1)
    driver.step(driver.chunk_done())
    driver.hold("req_a")
    return driver


def filled_at_first(limits: Limits = LIMITS) -> HoldDriver:
    """Held while its row is being filled with what others have saved."""
    driver = HoldDriver(limits)
    driver.run("xy")
    driver.ask("xyz", 1)
    driver.hold("req_b")
    return driver


def saving_blocks(limits: Limits = LIMITS) -> HoldDriver:
    """Held while writers have no room for its last block."""
    driver = HoldDriver(limits)
    driver.ask("xyz", 1)
    driver.feed()
    driver.hold("req_a")
    assert not driver.request("req_a").tail_planned
    return driver


def saving_tail(limits: Limits = LIMITS) -> HoldDriver:
    """Held, with all blocks on disk, and its tail in the writers' hands."""
    driver = HoldDriver(limits)
    driver.decode("xyz")
    driver.hold("req_a")
    return driver


def saving_last_block(limits: Limits = LIMITS) -> HoldDriver:
    """Held, with its tail on disk, and a block in the writers' hands."""
    driver = HoldDriver(limits)
    driver.ask("x", 1)
    driver.feed()
    driver.hold("req_a")
    driver.step(driver.tail_saved("req_a"))
    assert driver.request("req_a").phase is Phase.PAUSING
    return driver


def held(limits: Limits = LIMITS) -> HoldDriver:
    """Its row is still leaving."""
    driver = saving_tail(limits)
    driver.step(driver.tail_saved("req_a"))
    return driver


def dropped(limits: Limits = LIMITS) -> HoldDriver:
    """Held with its tokens only."""
    driver = saving_tail(limits)
    driver.step(driver.tail_failed("req_a"))
    return driver


def filled(limits: Limits = LIMITS) -> HoldDriver:
    """Its row is being filled again."""
    driver = held(limits)
    driver.step(driver.freed("req_a"))
    driver.release("req_a")
    assert driver.request("req_a").phase is Phase.RESUMING
    return driver


def gone_on(limits: Limits = LIMITS) -> HoldDriver:
    """It decodes again."""
    driver = filled(limits)
    driver.step(driver.restored("req_a"))
    return driver


STAGES: dict[Callable[..., HoldDriver], tuple[str, int]] = {
    feeding: ("paused", 0),
    filled_at_first: ("paused", 0),
    saving_blocks: ("paused", 0),
    saving_tail: ("paused", 0),
    saving_last_block: ("paused", 0),
    held: ("paused", 1),
    dropped: ("paused", 0),
    filled: ("resuming", 1),
    gone_on: ("prefilling", 0),
}
"""Where the request is after a death in this stage, and how many tails are kept."""


def name_of(driver: HoldDriver) -> str:
    [request] = driver.state.requests.values()
    return request.request_id


def run_to_end(driver: HoldDriver, name: str) -> list[events.RequestFinished]:
    """Plays engine and writers until the request has ended."""
    if driver.request(name).phase is Phase.PAUSED:
        driver.release(name)
    for _ in range(40):
        if driver.request(name).restoring:
            driver.step(driver.restored(name))
        elif driver.state.chunk is not None:
            driver.step(driver.chunk_done())
        elif driver.state.batch_rows:
            return only(driver.finish(name), events.RequestFinished)
        else:
            driver.step(events.ClockTicked())
    raise AssertionError(f"{name} does not come to its end")


def check_nothing_is_left(driver: HoldDriver) -> None:
    """After the last end, and once writers and engine are done, everything is 0."""
    for number in list(driver.state.index.writing_tails):
        driver.step(
            events.ChainSaved(
                request_id=driver_name(driver, number),
                number=number,
                tail_start=16,
                num_tokens=17,
                tail_bytes=1_000,
                duration_ns=1,
            )
        )
    driver.save_all()
    for number in list(driver.state.leaving):
        driver.step(events.KvFreed(request_id="", number=number, freed_bytes=1))
    driver.step(events.ClockTicked())
    state, index = driver.state, driver.state.index
    lists = (state.requests, state.waiting, state.admitted, state.paused, state.pausing)
    assert not any(lists)
    assert (state.reserved_bytes, state.reserved_tokens, state.leaving) == (0, 0, {})
    assert (index.writing_bytes, index.tails, index.coming, index.bad) == (0, {}, {}, {})
    assert not any(block.leases or block.pins for block in index.blocks.values())
    assert (state.reliefs, state.holds, state.unsaved) == ([], [], {})


def driver_name(driver: HoldDriver, number: int) -> str:
    """The id of a request that may have ended."""
    found = [r.event for r in driver.records if isinstance(r.event, events.RequestReceived)]
    return next(event.request_id for event in found if event.number == number)


# Deaths


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_death_in_each_stage_loses_nothing(stage: Callable[..., HoldDriver]) -> None:
    driver = stage()
    name = name_of(driver)
    output = driver.request(name).num_output_tokens
    driver.plans = []
    driver.start()
    phase, num_tails = STAGES[stage]
    assert (phases(driver)[name], len(driver.state.index.tails)) == (phase, num_tails)
    assert driver.request(name).num_output_tokens == output
    assert (
        not any(block.leases for block in driver.state.index.blocks.values()) or phase != "paused"
    )
    [end] = run_to_end(driver, name)
    assert end.num_output_tokens == output + 1
    parts = (end.num_memory_tokens, end.num_disk_tokens, end.num_prefilled_tokens)
    assert sum(parts) == end.num_prompt_tokens
    check_nothing_is_left(driver)


def whole_but_not_pinned(limits: Limits = LIMITS) -> HoldDriver:
    """The process died between the fact that makes the chain whole and what follows from it, as a
    policy that pins later would leave it.
    """
    driver = saving_tail(limits)
    driver.release("req_a")
    fold(driver.state, driver.place("fact", [driver.tail_saved("req_a")]))
    return driver


def test_chain_that_is_whole_is_pinned_by_the_first_step_of_the_next_run() -> None:
    driver = whole_but_not_pinned()
    decisions = driver.begin_run()
    assert kinds(decisions) == ["chain_pinned", "request_paused"]
    assert only(decisions, events.RequestPaused)[0].had_row is False
    assert driver.effects == [], "there is no row to drop"
    [started] = only(driver.step(ready(driver.model)), events.ResumeStarted)
    assert started.has_tail
    assert driver.request("req_a").deaths == 1


@pytest.mark.parametrize("how", ["cancel", "deaths"])
def test_whole_chain_without_a_row_may_end_in_the_first_step(how: str) -> None:
    max_deaths = 0 if how == "deaths" else 2
    driver = whole_but_not_pinned(msgspec.structs.replace(LIMITS, max_deaths=max_deaths))
    facts: list[events.AnyEvent] = [server_started(driver.limits, driver.model)]
    if how == "cancel":
        facts.append(events.CancelRequested(request_id="req_a"))
    driver.run_id += 1
    decisions = driver.step(*facts)
    assert kinds(decisions)[0] == "chain_unpinned"
    ends = only(decisions, events.RequestCancelled) or only(decisions, events.RequestAborted)
    assert [end.had_row for end in ends] == [False]
    check_nothing_is_left(driver)


def test_death_while_it_is_held_is_not_charged() -> None:
    driver = held()
    for _ in range(4):
        driver.start()
    assert driver.request("req_a").deaths == 0


def test_death_while_its_row_is_filled_is_charged() -> None:
    driver = filled()
    for deaths in (1, 2):
        driver.start()
        assert driver.request("req_a").deaths == deaths
    decisions = driver.begin_run()
    assert kinds(decisions) == ["chain_unpinned", "request_aborted"]
    assert only(decisions, events.RequestAborted)[0].had_row is False
    driver.step(ready(driver.model))
    check_nothing_is_left(driver)


def test_held_request_waits_for_its_own_model() -> None:
    driver = held()
    model = driver.model
    driver.model = msgspec.structs.replace(model, fingerprint="0" * 64)
    driver.start()
    driver.release("req_a")
    assert driver.request("req_a").held_reason == "other_model"
    assert phases(driver) == {"req_a": "paused"}
    driver.model = model
    driver.start()
    assert phases(driver) == {"req_a": "resuming"}


def test_chain_of_another_domain_is_given_up() -> None:
    driver = held()
    driver.begin_run()
    decisions = driver.step(ready(driver.model, "e" * 64))
    [evicted] = only(decisions, events.BlocksEvicted)
    assert (evicted.domain, evicted.tails[0][:6]) == (DOMAIN, "req_a-")
    assert not any(block.pins for block in driver.state.index.blocks.values())
    decisions = driver.release("req_a")
    assert kinds(decisions)[:2] == ["resume_started", "request_resumed"]
    [end] = run_to_end(driver, "req_a")
    assert end.num_prefilled_tokens == end.num_prompt_tokens


def test_server_that_saves_nothing_computes_it_anew() -> None:
    driver = HoldDriver(LIMITS)
    driver.run("xyz")
    driver.ask("xyz", 1)
    driver.step(driver.restored("req_b"))
    driver.feed()
    driver.pause("req_b")
    driver.limits = msgspec.structs.replace(driver.limits, kv=None)
    driver.start()
    driver.release("req_b")
    [end] = run_to_end(driver, "req_b")
    assert end.num_prefilled_tokens == end.num_prompt_tokens
    assert driver.state.index.tails == {}


def test_held_requests_keep_their_order_through_a_death() -> None:
    driver = HoldDriver(hold_limits(max_rows=4))
    driver.decode("x", "y", "z")
    for name in ("req_c", "req_a"):
        driver.pause(name)
    driver.release("req_a")
    driver.start()
    assert driver.state.requests[1].phase is Phase.RESUMING
    driver.begin_run()
    assert driver.state.paused == [1, 3]


# Ends


@pytest.mark.parametrize("how", ["cancel", "gone", "deadline", "failure"])
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__)
def test_end_in_each_stage_leaves_nothing(stage: Callable[..., HoldDriver], how: str) -> None:
    driver = stage(msgspec.structs.replace(LIMITS, max_age_ns=10**9, max_retries=0))
    name = name_of(driver)
    had_row = driver.number(name) in driver.state.admitted
    match how:
        case "cancel":
            decisions = driver.step(events.CancelRequested(request_id=name))
        case "gone":
            decisions = driver.step(events.ClientGone(request_id=name))
        case "deadline":
            driver.pass_ns(10**9)
            decisions = driver.step(events.ClockTicked())
        case _:
            decisions = driver.step(driver.failed(name))
    if how == "failure" and not had_row:
        assert decisions == [], "a row that is gone cannot fail"
        decisions = driver.step(events.CancelRequested(request_id=name))
    ends = only(decisions, events.RequestCancelled) or only(decisions, events.RequestAborted)
    [end] = ends
    assert end.had_row is had_row
    check_nothing_is_left(driver)
