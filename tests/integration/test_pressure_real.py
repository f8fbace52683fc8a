"""Real models under a ceiling that holds about one and a half of three prompts: all finish, nobody
is aborted, and log-probabilities and saved KV are those of runs without pressure, bit for bit.
"""

import gc
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest

from journal import events
from journal.events import ModelFacts
from scheduler.memory import row_bytes
from tests.integration.kv_serving import (
    MODELS,
    Answer,
    ask,
    files_below,
    prompt,
    recorded,
    serving,
    wait_for,
)

NUM_PROMPT = 1_500
NUM_OUTPUT = 120
CHUNKS = {"chunk_tokens": 16, "chunk_tokens_beside_rows": 16, "gap_ms": 0}
SMALL = {"block_tokens": 32, "memory_bytes": 0}


def in_turn(folder: Path, model: str, count: int, max_tokens: int) -> list[Answer]:
    """The answers of a server that has all the memory it wants, one after the other."""
    with serving(folder, model, scheduler=CHUNKS, **SMALL) as server:
        return [ask(server, prompt(number, NUM_PROMPT), max_tokens) for number in range(count)]


def together(
    folder: Path, model: str, count: int, max_tokens: int, ceiling_bytes: int
) -> list[Answer]:
    """The same at once under this ceiling. Their files have the same names: the key is a copy."""
    folder.mkdir(mode=0o700)
    shutil.copy2(folder.parent / "calm" / "key", folder / "key")
    marks = {"ceiling": ceiling_bytes, "reserve": "chunk", "min_progress_tokens": 8}
    with (
        serving(folder, model, scheduler=CHUNKS, memory=marks, **SMALL) as server,
        ThreadPoolExecutor(count) as threads,
    ):
        asked = [
            threads.submit(ask, server, prompt(number, NUM_PROMPT), max_tokens)
            for number in range(count)
        ]
        return [each.result() for each in asked]


def others_bytes() -> int:
    """What this process holds beside the server that is to come: other tests' arrays."""
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


def facts_of(folder: Path) -> tuple[ModelFacts, int]:
    """The model's sizes, and the most that a chunk was seen to need beside the rows."""
    [ready] = recorded(folder, events.EngineReady)
    chunks = recorded(folder, events.PrefillChunkDone)
    return ready.model, max(chunk.peak_bytes - chunk.active_bytes for chunk in chunks)


def assert_same(calm: Path, short: Path) -> None:
    """Every file of KV that was saved without pressure is there, byte for byte."""
    same = {path.relative_to(short): path.read_bytes() for path in files_below(short)}
    assert files_below(calm)
    for path in files_below(calm):
        assert same[path.relative_to(calm)] == path.read_bytes(), path.name


@pytest.mark.timeout(300)
@pytest.mark.parametrize("model", MODELS)
def test_three_prompts_that_do_not_fit_together_all_finish(tmp_path: Path, model: str) -> None:
    calm, short = tmp_path / "calm", tmp_path / "short"
    expected = in_turn(calm, model, 3, NUM_OUTPUT)
    facts, chunk_bytes = facts_of(calm)
    rows_bytes = 3 * row_bytes(facts, NUM_PROMPT + NUM_OUTPUT) // 2
    needed_bytes = facts.weights_bytes + chunk_bytes + rows_bytes + others_bytes()
    answers = together(short, model, 3, NUM_OUTPUT, needed_bytes)
    assert [a.content for a in answers] == [a.content for a in expected]
    assert len(recorded(short, events.RequestFinished)) == 3
    assert recorded(short, events.RequestAborted) == []
    assert recorded(short, events.RequestPaused), "somebody was held"
    assert all(each.num_lost_tokens == 0 for each in recorded(short, events.RequestResumed))
    assert_same(calm, short)


@pytest.mark.timeout(200)
@pytest.mark.parametrize("num_prompt", [200, NUM_PROMPT], ids=["decode", "prefill"])
@pytest.mark.parametrize("model", MODELS)
def test_the_younger_row_is_held_while_others_take_the_memory(
    tmp_path: Path, model: str, num_prompt: int
) -> None:
    calm, short = tmp_path / "calm", tmp_path / "short"
    sizes = (200, num_prompt)
    with serving(calm, model, scheduler=CHUNKS, **SMALL) as server:
        expected = [ask(server, prompt(n, size), 400) for n, size in enumerate(sizes)]
    facts, _ = facts_of(calm)
    in_use = facts.weights_bytes + 2 * row_bytes(facts, num_prompt + 400) + others_bytes()
    short.mkdir(mode=0o700)
    shutil.copy2(calm / "key", short / "key")
    marks = {"ceiling": 2 * in_use, "reserve": "chunk"}
    with (
        serving(short, model, scheduler=CHUNKS, memory=marks, **SMALL) as server,
        ThreadPoolExecutor(2) as threads,
    ):
        wait_for(short, events.EngineReady)
        idle_bytes = mx.get_active_memory()
        asked = [threads.submit(ask, server, prompt(0, sizes[0]), 400)]
        wait_for(short, events.TokensDecoded, 10)
        asked.append(threads.submit(ask, server, prompt(1, sizes[1]), 400))
        wait_for_progress(short, num_prompt)
        ballast = mx.zeros((int(1.96 * in_use - mx.get_active_memory()),), mx.uint8)
        mx.eval(ballast)
        [held] = wait_for(short, events.RequestPaused)
        del ballast
        mx.clear_cache()
        answers = [each.result() for each in asked]
        wait_for(short, events.KvFreed, 3)
        gc.collect()
        assert abs(mx.get_active_memory() - idle_bytes) < 2**20, "nothing stays behind"
    assert [a.content for a in answers] == [a.content for a in expected]
    assert (held.number, held.reason in ("high", "emergency")) == (2, True)
    if num_prompt == NUM_PROMPT:
        assert 64 <= held.num_cached_tokens < NUM_PROMPT - 1
    else:
        assert 8 <= held.num_output_tokens <= 400 - 8
    [freed] = [each for each in recorded(short, events.KvFreed) if each.number == 2][:1]
    assert freed.freed_bytes > 0
    assert [each.num_lost_tokens for each in recorded(short, events.RequestResumed)] == [0]
    assert_same(calm, short)


def wait_for_progress(folder: Path, num_prompt: int) -> None:
    """Until the second request has put out ten tokens, or is some blocks into a long prompt."""
    if num_prompt == NUM_PROMPT:
        second = [each.request_id for each in wait_for(folder, events.RequestReceived, 2)][1]
        before = sum(e.request_id != second for e in recorded(folder, events.PrefillChunkCommitted))
        wait_for(folder, events.PrefillChunkCommitted, before + 5)
        return
    wait_for(folder, events.BatchChanged, 2)
    wait_for(folder, events.TokensDecoded, len(recorded(folder, events.TokensDecoded)) + 10)
