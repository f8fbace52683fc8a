"""What a real server does about readings of its memory: nothing for one, one thing for two."""

from pathlib import Path

import pytest

from journal import events
from journal.reader import JournalReader
from tests.integration.http_server import TIMEOUT_S, running
from tests.integration.kv_serving import recorded, wait_for
from tests.integration.pressed import ACTIONS, MB, Pressed, pressed

OVER, BETWEEN, EMERGENCY = 930 * MB, 900 * MB, 3000 * MB
"""Bytes in use: over the high mark (920 MB), between it and where it is left (880 MB), and over the
emergency mark. What is reserved for the rows is a hundredth of that distance.
"""


def actions(folder: Path) -> list[str]:
    """What was done about memory, in order."""
    with JournalReader.open(folder) as reader:
        return [type(r.event).__name__ for r in reader.read() if isinstance(r.event, ACTIONS)]


def over(folder: Path) -> list[bool]:
    """Of each reading that was recorded, whether it is over the high mark."""
    return [event.active_bytes >= OVER for event in recorded(folder, events.MemorySampled)]


def finish(server: Pressed) -> None:
    """Both requests come to their end."""
    assert [answer.result().status_code for answer in server.answers] == [200, 200]


@pytest.mark.parametrize("spike_bytes", [OVER, EMERGENCY])
def test_nothing_happens_for_one_reading(tmp_path: Path, spike_bytes: int) -> None:
    with pressed(tmp_path) as server:
        server.two_rows(150)
        server.engine.usages.append(spike_bytes)
        server.wait_for_readings()
        finish(server)
    assert over(tmp_path).count(True) == 1
    assert actions(tmp_path) == []


def test_a_mark_that_is_crossed_at_each_reading_is_not_acted_upon(tmp_path: Path) -> None:
    with pressed(tmp_path) as server:
        server.two_rows(200)
        server.engine.usages.extend([OVER, BETWEEN] * 20)
        server.wait_for_readings()
        finish(server)
    found = over(tmp_path)
    assert found.count(True) == 20
    first = found.index(True)
    assert found[first : first + 40] == [True, False] * 20, "each of them is a fact"
    assert actions(tmp_path) == []


def test_a_mark_that_is_crossed_every_other_reading_is_acted_upon_once(tmp_path: Path) -> None:
    with pressed(tmp_path) as server:
        _, younger = server.two_rows(500)
        server.engine.usage_bytes = BETWEEN
        for _ in range(2):
            server.engine.usages.extend([OVER, OVER, BETWEEN, BETWEEN] * 5)
            wait_for(tmp_path, events.RequestPaused)
            server.wait_for_readings()
        assert [event.request_id for event in recorded(tmp_path, events.PauseStarted)] == [younger]
        assert recorded(tmp_path, events.ResumeStarted) == []
        server.engine.usage_bytes = 0
        finish(server)
    assert actions(tmp_path) == ["PauseStarted"]
    assert len(recorded(tmp_path, events.RequestResumed)) == 1


def test_the_allocator_gives_back_what_it_keeps_while_rows_decode(tmp_path: Path) -> None:
    with pressed(tmp_path) as server:
        server.two_rows(200)
        for times in (1, 2):
            server.engine.kept_bytes = OVER
            wait_for(tmp_path, events.MemoryReclaimed, times)
            server.wait_for_readings()
        finish(server)
    assert actions(tmp_path) == ["ReclaimStarted", "ReclaimStarted"]
    assert [e.freed_bytes for e in recorded(tmp_path, events.MemoryReclaimed)] == [OVER, OVER]
    left = [event.left for event in recorded(tmp_path, events.BatchChanged) if event.left]
    assert [number for numbers in left for number in numbers] == [1, 2], "only at their ends"
    ends = recorded(tmp_path, events.RequestFinished)
    assert [end.num_output_tokens for end in ends] == [200, 200]


def test_memory_is_read_also_while_the_engine_is_at_work(tmp_path: Path) -> None:
    with pressed(tmp_path) as server:
        server.engine.gate.clear()
        answer = server.send(4)
        wait_for(tmp_path, events.PrefillChunkPlanned)
        before = server.engine.num_readings
        for _ in range(before + 5):
            assert server.engine.seen.acquire(timeout=TIMEOUT_S), "nothing else wakes the loop"
        server.engine.gate.set()
        assert answer.result().status_code == 200


def test_by_default_the_ceiling_is_the_machines_and_its_numbers_are_recorded(
    tmp_path: Path,
) -> None:
    with running(tmp_path, memory={}) as server:
        body = {"model": "default", "prompt": "a", "max_tokens": 3}
        assert server.http.post("/v1/completions", json=body).status_code == 200
        wait_for(tmp_path, events.MemorySampled)
    limits = recorded(tmp_path, events.ServerStarted)[0].limits
    assert limits.memory is not None
    assert limits.memory.is_auto
    assert limits.ceiling_bytes == server.settings.limits().ceiling_bytes
    reading = recorded(tmp_path, events.MemorySampled)[0]
    assert reading.process_bytes > 10 * MB
    assert reading.available_bytes > 0


def test_without_a_ceiling_nothing_is_recorded(tmp_path: Path) -> None:
    with pressed(tmp_path, memory={"ceiling": "none", "sample_ms": 10}) as server:
        server.two_rows(50)
        finish(server)
    assert recorded(tmp_path, events.MemorySampled) == []
