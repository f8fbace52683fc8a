"""What is stored of requests that are sent again: nothing of the arrival, and of the other one all
that may be asked for, as long as it may be.
"""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from scheduler.adopting import holder_of
from scheduler.draft import Draft
from scheduler.streams import Joined, RequestStream
from scheduler.upkeep import Upkeep
from tests.loop_driver import LoopDriver, arrival_of, settings_of

RETENTION_S = 100
KEY = "digest of a key"


def submit(driver: LoopDriver, key: str = KEY) -> RequestStream:
    """The same question each time."""
    driver.num_requests += 1
    arrival = arrival_of(f"req_{driver.num_requests:026}", "hello", 5)
    arrival = replace(arrival, content_digest="digest of all", key_digest=key)
    stream = RequestStream(arrival.request_id, arrival.parameters, len(arrival.prompt))
    driver.hub.add(stream)
    driver.sensors.arrive(arrival)
    return stream


def test_a_request_that_joined_another_leaves_neither_prompt_nor_parameters(tmp_path: Path) -> None:
    driver = LoopDriver(tmp_path)
    first = submit(driver)
    driver.loop.step()
    again, in_the_same_step = submit(driver), submit(driver)
    driver.run_until_idle()
    late = submit(driver)
    driver.loop.step()
    journal = driver.journal
    for stream in (again, in_the_same_step, late):
        assert stream.judgement == Joined(first.request_id)
        assert journal.prompt_tokens(stream.request_id) is None
        assert journal.parameters(stream.request_id) is None
        assert len(journal.output_tokens(stream.request_id)[0]) == 0
    assert journal.prompt_tokens(first.request_id) is not None
    assert journal.output_tokens(first.request_id)[0].tolist() == first.tokens
    assert journal.verify() == []
    assert journal.purge(driver.state.now_ns, 0) == 1, "there is one prompt to be purged"
    journal.close()


@pytest.mark.parametrize("later_retention_s", [None, RETENTION_S, RETENTION_S // 2])
def test_an_answer_is_kept_for_as_long_as_its_key_may_ask_for_it(
    tmp_path: Path, later_retention_s: int | None
) -> None:
    """Also where the server is started again, perhaps to keep answers for less long."""
    driver = LoopDriver(tmp_path, settings_of(requests__retention_s=RETENTION_S))
    stream = submit(driver)
    driver.run_until(lambda: stream.end is not None)
    ended_ns = driver.state.now_ns
    if later_retention_s is not None:
        driver.settings = settings_of(requests__retention_s=later_retention_s)
        driver.restart()
    upkeep = Upkeep(driver.settings, driver.journal)
    over_ns = ended_ns + driver.settings.requests.retention_s * 10**9
    for now_ns, is_kept in ((over_ns - 1, True), (over_ns, False)):
        upkeep.due_ns = time.monotonic_ns()
        upkeep.work(now_ns, idle=False)
        driver.state.now_ns = now_ns
        holder = holder_of(driver.state, Draft(), KEY)
        assert (holder is not None) == is_kept, "who sends the key gets this answer"
        assert (driver.journal.prompt_tokens(stream.request_id) is not None) == is_kept
        tokens = driver.journal.output_tokens(stream.request_id)[0]
        assert tokens.tolist() == (stream.tokens if is_kept else [])
    driver.journal.close()


def test_what_is_open_keeps_its_tokens_however_long_it_is_without_a_client(tmp_path: Path) -> None:
    driver = LoopDriver(tmp_path, settings_of(requests__retention_s=0, scheduler__max_rows=1))
    running, waiting = submit(driver, ""), submit(driver, KEY)
    driver.run_until(lambda: len(running.tokens) == 2)
    driver.restart()
    assert driver.journal.purge(driver.state.now_ns + 10**18, 0) == 0
    for stream in (running, waiting):
        assert driver.journal.prompt_tokens(stream.request_id) is not None
    driver.journal.close()
