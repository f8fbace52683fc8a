"""An operator holds a request and lets it go on, whatever phase it is in."""

import copy

import msgspec
import pytest

from journal import events
from scheduler.effects import DropRow, RestoreRow, SaveTail, StartRow
from scheduler.request import Phase
from tests.unit.core_driver import MODEL, kinds, only
from tests.unit.hold_driver import HoldDriver, hold_limits, phases
from tests.unit.kv_driver import DOMAIN, ready


def decoding(*chains: str, **changes: object) -> HoldDriver:
    driver = HoldDriver(hold_limits(**changes))
    driver.decode(*chains or ("x",))
    return driver


def test_waiting_request_is_held_at_once_and_has_nothing_to_save() -> None:
    driver = decoding("x", max_rows=1)
    driver.ask("y")
    assert driver.hold("req_b") == [
        events.RequestPaused(
            request_id="req_b",
            number=2,
            reason="operator",
            had_row=False,
            num_cached_tokens=0,
            num_output_tokens=0,
        )
    ]
    assert driver.effects == []
    assert (driver.state.waiting, driver.state.paused) == ([], [2])
    driver.step(driver.decoded(req_a="stop"))
    driver.step(driver.freed("req_a"))
    assert phases(driver) == {"req_b": "paused"}, "a row is free, and it stays held"
    decisions = driver.release("req_b")
    assert kinds(decisions)[:2] == ["resume_started", "request_resumed"]
    assert [type(effect) for effect in driver.effects][:1] == [StartRow]
    assert driver.request("req_b").phase is Phase.PREFILLING


def test_request_that_has_just_arrived_is_held() -> None:
    driver = HoldDriver()
    decisions = driver.step(
        driver.receive(20, name="req_a"), events.HoldRequested(request_id="req_a")
    )
    assert kinds(decisions) == ["request_queued", "request_paused"]


def test_request_that_is_refused_is_not_held() -> None:
    driver = HoldDriver()
    decisions = driver.step(
        driver.receive(9_000, name="req_a"), events.HoldRequested(request_id="req_a")
    )
    assert kinds(decisions) == ["request_rejected"]


def test_prefilling_request_is_held_between_two_chunks() -> None:
    driver = HoldDriver(hold_limits(chunk_tokens=16))
    driver.ask("xyz", 8)
    assert kinds(driver.hold("req_a")) == ["pause_started"], "its chunk is still being fed"
    decisions = driver.step(driver.chunk_done())
    assert kinds(decisions) == [
        "prefill_chunk_committed",
        "block_save_planned",
        "tail_save_planned",
    ]
    [tail] = only(decisions, events.TailSavePlanned)
    assert tail.tail_start == 16
    driver.step(driver.tail_saved("req_a"))
    assert driver.request("req_a").phase is Phase.PAUSING, "its block is not on disk yet"
    driver.save_all()
    assert kinds([r.event for r in driver.records])[-2:] == ["chain_pinned", "request_paused"]
    driver.step(driver.freed("req_a"))
    [resumed] = only(driver.release("req_a"), events.ResumeStarted)
    assert (resumed.num_cached_tokens, resumed.num_blocks, resumed.has_tail) == (16, 1, False)
    decisions = driver.step(driver.restored("req_a"))
    [chunk] = only(decisions, events.PrefillChunkPlanned)
    assert (chunk.start, chunk.length) == (16, 16), "it goes on from the last committed token"


def test_row_that_is_being_filled_is_held_when_it_is_full() -> None:
    driver = HoldDriver()
    driver.run("xy")
    driver.ask("xy", 5)
    assert kinds(driver.hold("req_b")) == ["pause_started"]
    decisions = driver.step(driver.restored("req_b"))
    assert kinds(decisions) == ["tail_save_planned"]
    driver.come_to_rest("req_b")
    assert driver.request("req_b").num_disk_tokens == 32


def test_decoding_request_is_held_with_its_tail() -> None:
    driver = decoding("x", "y")
    decisions = driver.hold("req_b")
    cached = driver.request("req_b").num_cached_tokens
    assert kinds(decisions) == ["pause_started", "batch_changed", "tail_save_planned"]
    [started] = only(decisions, events.PauseStarted)
    assert (started.reason, started.rank, started.num_candidates) == ("operator", 0, 0)
    assert (started.frees_bytes, started.unsaved_bytes) == (32_000, (cached - 16) * 1_000)
    assert [e for e in driver.effects if isinstance(e, SaveTail)] == [
        SaveTail(driver.effects[-1].seq, 2, "req_b", 16)
    ]
    assert driver.state.reliefs == [], "an operator's hold is no action against pressure"
    decisions = driver.step(driver.tail_saved("req_b"))
    assert decisions == [
        events.ChainPinned(
            request_id="req_b",
            number=2,
            num_blocks=1,
            last_hash="y",
            tail_bytes=(cached - 16) * 1_000,
            num_tokens=cached,
        ),
        events.RequestPaused(
            request_id="req_b",
            number=2,
            reason="operator",
            had_row=True,
            num_cached_tokens=cached,
            num_output_tokens=driver.request("req_b").num_output_tokens,
        ),
    ]
    assert [type(e) for e in driver.effects] == [DropRow]
    assert driver.state.index.blocks["y"].pins == 1
    assert list(driver.state.index.tails) == [f"req_b-{cached}"]


def test_resuming_request_is_held_again_as_it_was() -> None:
    driver = decoding()
    driver.pause("req_a")
    before = msgspec.to_builtins(driver.request("req_a"))
    driver.release("req_a")
    assert kinds(driver.hold("req_a")) == ["request_paused"]
    assert [type(e) for e in driver.effects] == [DropRow]
    driver.step(driver.freed("req_a"))
    changed = {"hold", "paused_ns", "held_ns"}
    after = msgspec.to_builtins(driver.request("req_a"))
    assert {k: v for k, v in after.items() if k not in changed} == {
        k: v for k, v in before.items() if k not in changed
    }
    driver.release("req_a")
    [restore] = [e for e in driver.effects if isinstance(e, RestoreRow)]
    assert (restore.hashes, restore.tail is not None) == (("x",), True)


def test_hold_twice_is_one_pause() -> None:
    driver = decoding()
    twice = events.HoldRequested(request_id="req_a")
    assert kinds(driver.step(twice, twice)).count("pause_started") == 1
    assert driver.hold("req_a") == []
    driver.come_to_rest("req_a")
    assert driver.hold("req_a") == []
    assert driver.request("req_a").num_pauses == 1
    assert kinds(driver.release("req_a")) == ["resume_started"]
    assert driver.release("req_a") == []


def test_hold_and_release_in_one_step_is_nothing() -> None:
    driver = decoding()
    assert (
        driver.step(
            events.HoldRequested(request_id="req_a"), events.ReleaseRequested(request_id="req_a")
        )
        == []
    )
    decisions = driver.step(
        events.ReleaseRequested(request_id="req_a"), events.HoldRequested(request_id="req_a")
    )
    assert kinds(decisions)[0] == "pause_started"


def test_release_while_pausing_lets_it_go_on_as_soon_as_it_is_paused() -> None:
    driver = decoding()
    driver.hold("req_a")
    assert driver.release("req_a") == []
    driver.step(driver.tail_saved("req_a"))
    assert driver.request("req_a").phase is Phase.PAUSED
    assert kinds(driver.step(driver.freed("req_a"))) == ["resume_started"]


def test_wish_to_hold_what_is_pausing_for_memory_keeps_it_held() -> None:
    driver = decoding("x", "y")
    driver.press()
    assert driver.request("req_b").phase is Phase.PAUSING
    assert driver.hold("req_b") == []
    driver.come_to_rest("req_b")
    for _ in range(3):
        driver.step(driver.sampled(1_100_000))
    assert driver.request("req_b").phase is Phase.PAUSED
    assert kinds(driver.release("req_b")) == ["resume_started"]


@pytest.mark.parametrize("wish", [events.HoldRequested, events.ReleaseRequested])
def test_wish_about_nobody_is_nothing(
    wish: type[events.HoldRequested | events.ReleaseRequested],
) -> None:
    assert decoding().step(wish(request_id="nobody")) == []


def test_cancel_comes_before_a_hold() -> None:
    driver = decoding()
    decisions = driver.step(
        events.HoldRequested(request_id="req_a"), events.CancelRequested(request_id="req_a")
    )
    assert kinds(decisions) == ["request_cancelled", "batch_changed"]


def test_end_of_a_held_request_says_where_its_prompt_had_come_from() -> None:
    """In each of its states: held, being filled again, and with nothing to be filled from."""
    driver = decoding("xyz")
    num_prompt_tokens = driver.request("req_a").num_prompt_tokens
    driver.pause("req_a")
    assert ended(driver, "req_a") == (0, 0, num_prompt_tokens)
    again = decoding("xyz")
    again.pause("req_a")
    again.release("req_a")
    assert again.request("req_a").restoring
    assert ended(again, "req_a") == (0, 0, num_prompt_tokens)
    driver.ask("xyz", 5)
    driver.step(driver.restored("req_b"))
    driver.feed()
    request = driver.request("req_b")
    had = request.num_disk_tokens
    assert had > 0
    driver.pause("req_b")
    assert ended(driver, "req_b") == (0, had, request.num_prompt_tokens - had)


def ended(driver: HoldDriver, name: str) -> tuple[int, int, int]:
    """Cancels a request: how many tokens came from memory, from disk and by prefill."""
    twin = copy.deepcopy(driver)
    (cancelled,) = only(twin.step(events.CancelRequested(request_id=name)), events.RequestCancelled)
    return (
        cancelled.num_memory_tokens,
        cancelled.num_disk_tokens,
        cancelled.num_prefilled_tokens,
    )


def test_others_go_on_while_one_is_held() -> None:
    driver = decoding("x", "y")
    driver.hold("req_b")
    driver.step(driver.decoded())
    output = driver.request("req_a").num_output_tokens
    driver.come_to_rest("req_b")
    driver.step(driver.decoded())
    assert driver.request("req_a").num_output_tokens == output + 1
    assert kinds(driver.ask("z", 1)) == [
        "request_queued",
        "request_admitted",
        "prefill_chunk_planned",
    ]


# A wish stands until it is released


def test_wish_stands_when_the_row_fails() -> None:
    driver = decoding()
    driver.hold("req_a")
    decisions = driver.step(driver.failed("req_a"))
    assert kinds(decisions)[:2] == ["request_retried", "request_paused"]
    assert kinds(driver.step(driver.freed("req_a"))) == []
    assert phases(driver) == {"req_a": "paused"}
    assert kinds(driver.release("req_a"))[:1] == ["resume_started"]


def test_wish_stands_when_the_process_dies_during_the_pause() -> None:
    driver = decoding()
    driver.hold("req_a")
    assert kinds(driver.begin_run()) == ["request_paused"]
    assert driver.step(ready(driver.model)) == []
    assert phases(driver) == {"req_a": "paused"}


def test_wish_stands_while_a_server_with_another_model_runs() -> None:
    driver = decoding()
    model = driver.model
    driver.model = msgspec.structs.replace(MODEL, fingerprint="0" * 64)
    driver.start()
    assert driver.state.held == [1]
    assert driver.hold("req_a") == []
    driver.model = model
    driver.begin_run()
    assert driver.step(ready(model, DOMAIN)) == []
    assert phases(driver) == {"req_a": "paused"}
