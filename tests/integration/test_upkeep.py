"""A journal that was purged and shortened is still the same history."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from journal.errors import JournalFull
from journal.events import StateCarried
from scheduler.recovery import encode_state, recover_state
from scheduler.upkeep import Upkeep
from tests.loop_driver import LoopDriver, expected_tokens, settings_of
from tests.replaying import assert_replays

NS_PER_S = 10**9
LATER_NS = 30 * 86_400 * NS_PER_S


def work_until(upkeep: Upkeep, now_ns: int, done: Callable[[], bool], *, idle: bool = True) -> None:
    """Portion after portion, without waiting for what is due later."""
    for _ in range(1000):
        if done():
            return
        if upkeep.carried is None and not upkeep.is_writing:
            upkeep.due_ns = time.monotonic_ns()
        upkeep.work(now_ns, idle=idle)
    raise AssertionError("upkeep does not come to its end")


def first_event(driver: LoopDriver) -> object:
    return next(driver.journal.read()).event


def test_tokens_go_after_the_retention_and_the_journal_still_replays(state_folder: Path) -> None:
    driver = LoopDriver(state_folder, settings_of(requests__retention_s=100))
    ended, running = driver.submit("ended", 5), driver.submit("running", 200)
    driver.run_until(lambda: ended.end is not None)
    upkeep = Upkeep(driver.settings, driver.journal)
    now_ns = driver.state.now_ns
    upkeep.work(now_ns + 99 * NS_PER_S, idle=False)
    assert driver.journal.prompt_tokens(ended.request_id) is not None
    upkeep.due_ns = time.monotonic_ns()
    upkeep.work(now_ns + 101 * NS_PER_S, idle=False)
    assert driver.journal.prompt_tokens(ended.request_id) is None
    assert driver.journal.parameters(ended.request_id) is None
    assert len(driver.journal.output_tokens(ended.request_id)[0]) == 0
    assert driver.journal.prompt_tokens(running.request_id) is not None
    sent = list(running.tokens)
    driver.restart()
    again = driver.stream(running.request_id)
    assert again.tokens == sent, "what is open is not purged"
    driver.run_until_idle()
    assert len(again.tokens) == 200
    driver.journal.close()


def test_an_old_journal_is_shortened_while_a_request_waits(state_folder: Path) -> None:
    driver = LoopDriver(state_folder, settings_of(scheduler__max_rows=1))
    for _ in range(3):
        driver.submit("before", 50)
    driver.run_until_idle()
    waits = driver.submit("hello", 40)
    driver.run_until(lambda: len(waits.tokens) == 3)
    driver.sensors.stop("asked to")
    driver.loop.step()
    driver.restart()
    before, num_before = encode_state(driver.state), len(list(driver.journal.read()))
    upkeep = Upkeep(driver.settings, driver.journal)
    work_until(
        upkeep,
        driver.state.now_ns + LATER_NS,
        lambda: isinstance(first_event(driver), StateCarried),
    )
    assert len(list(driver.journal.read())) < num_before // 4
    assert encode_state(recover_state(driver.journal)[0]) == before
    assert upkeep.wait_s() > 1
    driver.run_until(lambda: len(driver.stream(waits.request_id).tokens) == 7)
    driver.restart()
    again = driver.stream(waits.request_id)
    assert again.tokens[:3] == expected_tokens("hello", 3, nonce=1)
    assert again.tokens[3:7] == expected_tokens("hello", 7, nonce=2)[3:]
    driver.run_until_idle()
    assert len(again.tokens) == 40
    driver.assert_empty()
    driver.journal.close()


def test_a_journal_that_was_shortened_is_shortened_again(tmp_path: Path) -> None:
    driver = LoopDriver(tmp_path)
    firsts: list[int] = []
    for _ in range(2):
        driver.submit("hello", 50)
        driver.run_until_idle()
        upkeep = Upkeep(driver.settings, driver.journal)
        seq = driver.state.seq
        work_until(
            upkeep,
            driver.state.now_ns + LATER_NS,
            lambda seq=seq: next(driver.journal.read()).seq == seq,
        )
        firsts.append(seq)
    assert firsts[0] < firsts[1]
    assert encode_state(recover_state(driver.journal)[0]) == encode_state(driver.state)
    driver.submit("hello again", 5)
    driver.run_until_idle()
    driver.journal.close()
    assert_replays(tmp_path)


def test_a_young_and_small_journal_is_left_alone(tmp_path: Path) -> None:
    driver = LoopDriver(tmp_path)
    driver.submit("hello", 50)
    driver.run_until_idle()
    upkeep = Upkeep(driver.settings, driver.journal)
    upkeep.work(driver.state.now_ns, idle=True)
    assert upkeep.carried is None
    driver.journal.close()
    assert_replays(tmp_path)


def test_nothing_is_shortened_while_rows_run(tmp_path: Path) -> None:
    driver = LoopDriver(tmp_path)
    driver.submit("hello", 50)
    driver.run_until_idle()
    upkeep = Upkeep(driver.settings, driver.journal)
    now_ns = driver.state.now_ns + LATER_NS
    work_until(upkeep, now_ns, lambda: driver.journal.purge(now_ns, 0) == 0, idle=False)
    for _ in range(3):
        upkeep.due_ns = time.monotonic_ns()
        upkeep.work(now_ns, idle=False)
    assert upkeep.carried is None, "it does not even begin"
    work_until(upkeep, now_ns, lambda: upkeep.carried is not None)
    assert upkeep.carried is not None
    upkeep.work(now_ns, idle=False)
    assert upkeep.carried.seq == 0, "nor does it go on"
    upkeep.work(now_ns, idle=True)
    assert upkeep.is_writing
    for _ in range(10):
        upkeep.work(now_ns, idle=False)
    assert upkeep.is_writing
    driver.journal.close()


@pytest.mark.parametrize("method", ["begin_compaction", "advance_compaction"])
def test_without_space_upkeep_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    driver = LoopDriver(tmp_path)
    driver.submit("hello", 50)
    driver.run_until_idle()
    upkeep = Upkeep(driver.settings, driver.journal)
    now_ns = driver.state.now_ns + LATER_NS

    was_full = threading.Event()

    def full(*_: object) -> None:
        driver.journal._give_up_compaction()  # pyright: ignore[reportPrivateUsage]
        was_full.set()
        raise JournalFull("no space")

    with monkeypatch.context() as context:
        context.setattr(driver.journal, method, full)
        work_until(upkeep, now_ns, was_full.is_set)
    assert upkeep.carried is None
    assert not upkeep.is_writing
    work_until(upkeep, now_ns, lambda: isinstance(first_event(driver), StateCarried))
    driver.submit("hello again", 5)
    driver.run_until_idle()
    driver.journal.close()
    assert_replays(tmp_path)
