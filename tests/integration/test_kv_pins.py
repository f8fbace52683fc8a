"""What a held request has on disk stays there, whatever else must go, and goes after its end."""

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
    files_below,
    num_prefilled,
    prompt,
    recorded,
    serving,
    wait_for_blocks,
)
from tests.integration.test_held_tails import wait_for_output
from tests.integration.test_http_clients import send
from tools import cache

pytestmark = pytest.mark.engine

BLOCK_BYTES = BLOCK_TOKENS * 2048
NUM_PROMPT, MAX_TOKENS = 75, 200
SETTINGS = {"max_bytes": 24 * BLOCK_BYTES, "writing_bytes": 4 * BLOCK_BYTES, "memory_bytes": 0}
ASKED = {
    "model": "default",
    "prompt": prompt(1, NUM_PROMPT),
    "max_tokens": MAX_TOKENS,
    "ignore_eos": True,
    "temperature": 0,
}


@contextmanager
def held(folder: Path) -> Iterator[tuple[RunningServer, str]]:
    """A server that holds a request, whose client leaves when the server ends."""
    with serving(folder, "tiny-plain", **SETTINGS) as server:
        connection = send(server, ASKED, "/v1/completions")
        request_id = wait_for_output(server)
        assert server.http.post(f"/v1/requests/{request_id}/pause").json()["state"] == "paused"
        yield server, request_id
    connection.close()


def contents(folder: Path) -> dict[Path, bytes]:
    """All files of the store."""
    return {path: path.read_bytes() for path in files_below(folder)}


def clear(server: RunningServer) -> None:
    """`fermata cache clear`, once the writers have nothing more."""
    wait_for_blocks(server, 0)
    assert cache.clear(server.folder, server.url, None, as_json=False) == 0


def fill(server: RunningServer, first: int) -> None:
    """Other prompts, until blocks have gone for the budget."""
    num_before = num_for_budget(server.folder)
    for number in range(first, first + 20):
        ask(server, prompt(number))
        if num_for_budget(server.folder) > num_before:
            return
    raise AssertionError("the budget was not used up")


def num_for_budget(folder: Path) -> int:
    """How often blocks have gone for the budget."""
    return sum(event.reason == "budget" for event in recorded(folder, events.BlocksEvicted))


@pytest.mark.parametrize("goes_on", [True, False])
def test_what_is_pinned_stays_until_its_request_has_ended(
    state_folder: Path, goes_on: bool
) -> None:
    with held(state_folder) as (server, request_id):
        clear(server)
        kept = contents(state_folder)
        [pinned] = recorded(state_folder, events.ChainPinned)
        names = next(e for e in recorded(state_folder, events.BlocksNamed)).hashes
        assert len(kept) == pinned.num_blocks + 1
        assert sum(path.stem in names for path in kept) == len(names) == NUM_PROMPT // BLOCK_TOKENS
        [tail] = [path for path in kept if path.parent.name == "tails"]
        fill(server, 2)
        assert kept.items() <= contents(state_folder).items()
    assert kept.items() <= contents(state_folder).items()
    with serving(state_folder, "tiny-plain", **SETTINGS) as server:
        server.wait_until(lambda view: view.engine_ready)
        fill(server, 30)
        clear(server)
        assert contents(state_folder) == kept
        if goes_on:
            server.http.post(f"/v1/requests/{request_id}/resume").raise_for_status()
            assert server.wait_for_end(request_id)["state"] == "finished"
        else:
            assert server.http.delete(f"/v1/requests/{request_id}").json()["state"] == "cancelled"
        server.wait_until(lambda view: view.leaving_bytes == 0)
        assert not tail.exists()
        clear(server)
        assert files_below(state_folder) == []
    resumed = recorded(state_folder, events.RequestResumed)
    assert [event.num_lost_tokens for event in resumed] == [0] * goes_on


def ask_and_lose(server: RunningServer) -> Answer:
    """A completion that loses all of its files while it is held."""
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask, server, prompt(1, NUM_PROMPT), MAX_TOKENS)
        path = f"/v1/requests/{wait_for_output(server)}"
        assert server.http.post(f"{path}/pause").json()["state"] == "paused"
        shutil.rmtree(server.folder / "kv")
        server.http.post(f"{path}/resume").raise_for_status()
        return asked.result(TIMEOUT_S)


@pytest.mark.parametrize("model", MODELS)
def test_a_held_request_that_has_lost_its_files_saves_them_again(
    state_folder: Path, model: str
) -> None:
    with serving(state_folder, model, memory_bytes=0, state_every_blocks=1) as server:
        answer = ask_and_lose(server)
        [saved] = recorded(state_folder, events.ChainSaved)
        again = ask(server, prompt(1, NUM_PROMPT), MAX_TOKENS)
    assert answer.content == again.content == expected(model, 1, NUM_PROMPT, MAX_TOKENS)
    fed = num_prefilled(state_folder, 1, answer.request_id)
    assert fed == NUM_PROMPT - 1 + saved.num_tokens, "all of it was computed again"
    assert again.num_cached_tokens == NUM_PROMPT // BLOCK_TOKENS * BLOCK_TOKENS
    [first] = recorded(state_folder, events.BlockCorrupt)
    [lost] = recorded(state_folder, events.BlocksLost)
    assert (first.reason, lost.reason) == ("missing", "missing")
    assert len(lost.hashes) == saved.tail_start // BLOCK_TOKENS - 1
    assert len(lost.tails) == 1
