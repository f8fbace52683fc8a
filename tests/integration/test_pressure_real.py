"""Real models under a ceiling that holds about one and a half of three prompts: all finish, nobody
is aborted, and log-probabilities and saved KV are those of runs without pressure, bit for bit.
"""

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from journal import events
from scheduler.memory import row_bytes
from tests.integration.kv_serving import (
    MODELS,
    Answer,
    ask,
    files_below,
    prompt,
    recorded,
    serving,
)

NUM_PROMPT = 1_500
NUM_OUTPUT = 48
CHUNKS = {"chunk_tokens": 64, "chunk_tokens_beside_rows": 32, "gap_ms": 0}
SMALL = {"block_tokens": 32, "memory_bytes": 0}


def in_turn(folder: Path, model: str) -> list[Answer]:
    """The three answers of a server that has all the memory it wants, one after the other."""
    with serving(folder, model, scheduler=CHUNKS, **SMALL) as server:
        return [ask(server, prompt(number, NUM_PROMPT), NUM_OUTPUT) for number in range(3)]


def ceiling_for(folder: Path) -> int:
    """Weights, what a chunk was seen to need, and one and a half of the rows; the marks leave a
    little of it.
    """
    [ready] = recorded(folder, events.EngineReady)
    chunks = recorded(folder, events.PrefillChunkDone)
    needed = max(chunk.peak_bytes - chunk.active_bytes for chunk in chunks)
    rows = 3 * row_bytes(ready.model, NUM_PROMPT + NUM_OUTPUT) // 2
    return ready.model.weights_bytes + rows + needed


def together(folder: Path, model: str, ceiling: int, **memory: Any) -> list[Answer]:
    """The same three at once under this ceiling."""
    marks = {"ceiling": ceiling, "reserve": "chunk", "min_progress_tokens": 8, **memory}
    with (
        serving(folder, model, scheduler=CHUNKS, memory=marks, **SMALL) as server,
        ThreadPoolExecutor(3) as threads,
    ):
        asked = [
            threads.submit(ask, server, prompt(number, NUM_PROMPT), NUM_OUTPUT)
            for number in range(3)
        ]
        return [each.result() for each in asked]


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", MODELS)
def test_three_prompts_that_do_not_fit_together_all_finish(tmp_path: Path, model: str) -> None:
    calm, short = tmp_path / "calm", tmp_path / "short"
    expected = in_turn(calm, model)
    short.mkdir(mode=0o700)
    shutil.copy2(calm / "key", short / "key")
    answers = together(short, model, ceiling_for(calm))
    assert [a.content for a in answers] == [a.content for a in expected]
    assert recorded(short, events.RequestAborted) == []
    assert len(recorded(short, events.RequestFinished)) == 3
    paused = recorded(short, events.PauseStarted)
    assert paused, "somebody was held"
    assert recorded(short, events.KvDropped) == []
    assert all(each.num_lost_tokens == 0 for each in recorded(short, events.RequestResumed))
    same = {path.relative_to(short): path.read_bytes() for path in files_below(short)}
    for path in files_below(calm):
        assert same[path.relative_to(calm)] == path.read_bytes(), path.name
