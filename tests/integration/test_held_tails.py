"""A real model's request that is held in the middle of its text, and what becomes of its tail."""

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from journal import events
from tests.integration.http_server import TIMEOUT_S, RunningServer
from tests.integration.kv_serving import (
    BLOCK_TOKENS,
    MODELS,
    Answer,
    ask,
    expected,
    num_prefilled,
    prompt,
    recorded,
    serving,
)

pytestmark = pytest.mark.engine

NUM_PROMPT, MAX_TOKENS = 75, 200


def keep(tail: Path) -> None:
    assert tail.is_file()


def flip(tail: Path) -> None:
    data = bytearray(tail.read_bytes())
    data[-20] ^= 4
    tail.write_bytes(data)


def delete(tail: Path) -> None:
    tail.unlink()


def wait_for_output(server: RunningServer) -> str:
    """The one open request, once it has put some tokens out."""
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for view in server.http.get("/v1/requests").json()["data"]:
            if view["state"] == "decoding" and view["num_output_tokens"] >= 9:
                return view["id"]
    raise AssertionError("nothing was put out")


def ask_and_hold(server: RunningServer, folder: Path, change: Callable[[Path], None]) -> Answer:
    """A completion that is held by hand for a moment, in which its tail is changed."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server, prompt(1, NUM_PROMPT), MAX_TOKENS)
        path = f"/v1/requests/{wait_for_output(server)}"
        assert server.http.post(f"{path}/pause").json()["state"] == "paused"
        [tail] = folder.glob("kv/*/tails/*.safetensors")
        change(tail)
        server.http.post(f"{path}/resume").raise_for_status()
        return asked.result(TIMEOUT_S)


@pytest.mark.parametrize("change", [keep, flip, delete])
@pytest.mark.parametrize("model", MODELS)
def test_a_held_request_ends_as_it_would_have(
    tmp_path: Path, model: str, change: Callable[[Path], None]
) -> None:
    with serving(tmp_path, model, memory_bytes=0) as server:
        answer = ask_and_hold(server, tmp_path, change)
        [saved] = recorded(tmp_path, events.ChainSaved)
        # Steps that were under way may have filled a block: then that is in the tail.
        ends = [saved.num_tokens - came for came in range(3)]
        assert saved.tail_start in [end // BLOCK_TOKENS * BLOCK_TOKENS for end in ends]
        [resumed] = recorded(tmp_path, events.RequestResumed)
        failed = recorded(tmp_path, events.ChainRestoreFailed)
        fed = num_prefilled(tmp_path, 1, answer.request_id)
        left = list(tmp_path.glob("kv/*/tails/*"))
    assert answer.content == expected(model, 1, NUM_PROMPT, MAX_TOKENS)
    if change is keep:
        assert (resumed.num_cached_tokens, resumed.num_lost_tokens) == (saved.num_tokens, 0)
        assert (failed, fed) == ([], NUM_PROMPT - 1)
    else:
        assert [event.reason for event in failed] == ["corrupt" if change is flip else "missing"]
        assert resumed.num_cached_tokens <= saved.tail_start
        assert fed == NUM_PROMPT - 1 + saved.num_tokens - resumed.num_cached_tokens
    assert left == []
