"""What is asked again is not computed again, and comes out the same to the bit."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import mlx.core as mx
import pytest

from journal import events
from scheduler.kvcache.arrays import Block
from scheduler.kvcache.layout import Layout
from tests.integration.http_server import RunningServer
from tests.integration.kv_serving import (
    BLOCK_TOKENS,
    MODELS,
    NUM_TOKENS,
    ask,
    expected,
    num_prefilled,
    prompt,
    recorded,
    serving,
    wait_for,
    wait_for_blocks,
)
from tests.kvcache.rows import zero_position

pytestmark = pytest.mark.engine

NUM_TURNS = 40


def hit_of(model: str, num_tokens: int) -> int:
    """How much of a prompt its repetition can start from: the last token is always computed, and
    state layers are kept at the end of a block only.
    """
    if model == "tiny-hybrid":
        return (num_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    return min(num_tokens - 1, num_tokens // BLOCK_TOKENS * BLOCK_TOKENS)


def check_hits(folder: Path, model: str, num_tokens: int, memory_bytes: int) -> None:
    """Asks three times, the third one after a restart."""
    content = expected(model, 1, num_tokens)
    hit, asked = hit_of(model, num_tokens), prompt(1, num_tokens)
    with serving(folder, model, memory_bytes=memory_bytes) as server:
        answers = [ask(server, asked)]
        wait_for_blocks(server, num_tokens // BLOCK_TOKENS)
        answers.append(ask(server, asked))
    with serving(folder, model, memory_bytes=memory_bytes) as server:
        answers.append(ask(server, asked))
    assert [answer.content for answer in answers] == [content] * 3
    assert [answer.num_cached_tokens for answer in answers] == [0, hit, hit]
    for run_id, answer in zip((1, 1, 2), answers, strict=True):
        fed = num_tokens - 1 - answer.num_cached_tokens
        assert num_prefilled(folder, run_id, answer.request_id) == fed
    again, later = recorded(folder, events.ChainRestored)
    in_memory, on_disk = (hit, 0) if memory_bytes else (0, hit)
    assert (again.num_memory_tokens, again.num_disk_tokens) == (in_memory, on_disk)
    assert (later.num_memory_tokens, later.num_disk_tokens) == (0, hit)


@pytest.mark.parametrize(
    ("num_tokens", "memory_bytes"),
    [(NUM_TOKENS, 0), (12 * BLOCK_TOKENS, 2**26), (12 * BLOCK_TOKENS + 1, 0)],
)
@pytest.mark.parametrize("model", MODELS)
def test_the_same_prompt_again_and_after_a_restart(
    state_folder: Path, model: str, num_tokens: int, memory_bytes: int
) -> None:
    check_hits(state_folder, model, num_tokens, memory_bytes)


@pytest.mark.parametrize("model", MODELS)
def test_one_zeroed_position_would_be_noticed(
    state_folder: Path, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the tests here rest on: broken KV shows in the log-probabilities."""
    cut = Layout.cut_block

    def defective(layout: Layout, caches: list[object], start: int, length: int) -> Block:
        block = zero_position(cut(layout, caches, start, length))
        mx.eval(block)
        return block

    monkeypatch.setattr(Layout, "cut_block", defective)
    with pytest.raises(AssertionError, match="logprobs"):
        check_hits(state_folder, model, NUM_TOKENS, 0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("model", MODELS)
def test_a_conversation_hits_what_it_said_before(state_folder: Path, model: str) -> None:
    messages: list[dict[str, str]] = []
    before = 0
    with serving(state_folder, model) as server:
        for turn in range(NUM_TURNS):
            messages.append({"role": "user", "content": f"Turn {turn}: what comes next?"})
            body = {"model": "default", "messages": messages, "max_tokens": 3, "temperature": 0}
            answer = server.http.post("/v1/chat/completions", json=body).json()
            messages.append(answer["choices"][0]["message"])
            usage = answer["usage"]
            hit = usage["prompt_tokens_details"]["cached_tokens"]
            assert hit >= before - suffix_tokens(server) - BLOCK_TOKENS, f"turn {turn}"
            before = usage["prompt_tokens"]
    assert before > NUM_TURNS * BLOCK_TOKENS


def suffix_tokens(server: RunningServer) -> int:
    """The tokens with which the template opens an answer."""
    assert server.service.served is not None
    tokenizer = server.service.served.tokenizer
    messages = [{"role": "user", "content": "Hello"}]
    with_suffix, without = (
        tokenizer.encode(tokenizer.render_chat(messages, tools=None, add_generation_prompt=opens))
        for opens in (True, False)
    )
    return len(with_suffix) - len(without)


@pytest.mark.parametrize("model", MODELS)
def test_twins_cost_one_prefill(
    state_folder: Path, model: str, held_writers: threading.Event
) -> None:
    asked = prompt(2)
    with serving(state_folder, model) as server, ThreadPoolExecutor() as pool:
        twins = [pool.submit(ask, server, asked) for _ in range(2)]
        (deferred,) = wait_for(state_folder, events.RequestDeferred)
        held_writers.set()
        first, second = sorted((twin.result() for twin in twins), key=lambda a: a.num_cached_tokens)
    assert first.content == second.content
    assert deferred.request_id == second.request_id
    hit = hit_of(model, NUM_TOKENS)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, hit)
    fed = [num_prefilled(state_folder, 1, a.request_id) for a in (first, second)]
    assert fed == [NUM_TOKENS - 1, NUM_TOKENS - 1 - hit]


def test_blocks_that_found_no_writer_are_saved_later(
    state_folder: Path, held_writers: threading.Event
) -> None:
    """The prefill does not wait for the disk, what waits stays within its bound, and nothing is
    lost.
    """
    bound = 2 * BLOCK_TOKENS * 2048
    body = {"prompt": prompt(3), "max_tokens": 3000, "ignore_eos": True, "model": "default"}
    with serving(state_folder, "tiny-plain", writing_bytes=bound) as server:
        with ThreadPoolExecutor() as pool:
            going_on = pool.submit(server.http.post, "/v1/completions", json=body)
            request_id = server.wait_for_phase("decoding")
            cache = server.http.get("/v1/cache").json()
            assert (cache["num_blocks"], cache["writing_bytes"]) == (0, bound)
            held_writers.set()
            while server.http.get("/v1/cache").json()["num_blocks"] < NUM_TOKENS // BLOCK_TOKENS:
                assert not going_on.done(), "what its row holds is saved while it goes on"
            server.http.delete(f"/v1/requests/{request_id}")
        assert ask(server, prompt(3)).num_cached_tokens == hit_of("tiny-plain", NUM_TOKENS)
