"""SIGKILL in prefill and in decode: the request goes on from the longest prefix that was saved."""

import sqlite3
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from journal import events
from journal.reader import JournalReader
from tests.integration.http_server import TIMEOUT_S
from tests.integration.kv_serving import (
    BLOCK_TOKENS,
    MODELS,
    num_prefilled,
    prompt,
    recorded,
    serving,
)
from tools.server_process import ServerProcess

pytestmark = [pytest.mark.engine, pytest.mark.crash]

NUM_TOKENS = 1200
MAX_TOKENS = 120
SETTINGS = {
    "FERMATA_ENGINE__BLAS": "stock",
    "FERMATA_KV__BLOCK_TOKENS": str(BLOCK_TOKENS),
    "FERMATA_KV__RESERVE_BYTES": "0",
    "FERMATA_KV__STATE_EVERY_BLOCKS": "4",
    "FERMATA_SCHEDULER__CHUNK_TOKENS": "32",
}
BODY: dict[str, Any] = {
    "model": "default",
    "prompt": prompt(5, NUM_TOKENS),
    "max_tokens": MAX_TOKENS,
    "ignore_eos": True,
    "temperature": 0,
    "logprobs": 3,
    "stream": True,
}

Outcome = tuple[list[int], Any]


def output(folder: Path, request_id: str) -> Outcome:
    """The output tokens and their log-probabilities, as the journal has them."""
    with JournalReader.open(folder) as reader:
        tokens, logprobs = reader.output_tokens(request_id)
    return tokens.tolist(), logprobs


def count(folder: Path, kind: str) -> int:
    """How many events of a kind there are, told fast enough to catch a moment."""
    with closing(sqlite3.connect(f"file:{folder / 'journal.db'}?mode=ro", uri=True)) as database:
        query = "SELECT count(*) FROM events WHERE kind = ?"
        return database.execute(query, (kind,)).fetchone()[0]


def in_prefill(folder: Path) -> bool:
    assert count(folder, "tokens_decoded") == 0, "the kill comes too late"
    return count(folder, "block_saved") > 10


def in_decode(folder: Path) -> bool:
    return count(folder, "tokens_decoded") > 40 and count(folder, "block_saved") > 10


MOMENTS = {"prefill": in_prefill, "decode": in_decode}


def killed(folder: Path, model: str, moment: Callable[[Path], bool]) -> None:
    """A server that is killed at this moment of its only request."""
    server = ServerProcess(model, folder, SETTINGS)

    def listen(address: str) -> None:
        with (
            httpx.Client(timeout=TIMEOUT_S) as client,
            client.stream("POST", f"{address}/v1/completions", json=BODY) as stream,
        ):
            for _ in stream.iter_lines():
                pass

    try:
        with ThreadPoolExecutor() as pool:
            address = server.address()
            while httpx.get(f"{address}/ready", timeout=TIMEOUT_S).status_code != 200:
                assert server.process.poll() is None
            listening = pool.submit(listen, address)
            while not moment(folder):
                assert not listening.done()
            server.kill()
            assert isinstance(listening.exception(TIMEOUT_S), httpx.RemoteProtocolError)
    finally:
        server.close()


def longest_saved(folder: Path, model: str, num_known: int) -> int:
    """The positions that a row can be filled to, by the facts in the journal."""
    hashes = [name for event in recorded(folder, events.BlocksNamed) for name in event.hashes]
    saved = {(event.hash, event.part) for event in recorded(folder, events.BlockSaved)}
    depth = 0
    while depth < len(hashes) and (hashes[depth], "block") in saved:
        depth += 1
    if model == "tiny-plain":
        return min(depth * BLOCK_TOKENS, num_known - 1)
    depth = min(depth, (num_known - 1) // BLOCK_TOKENS)
    while depth and (hashes[depth - 1], "state") not in saved:
        depth -= 1
    return depth * BLOCK_TOKENS


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Outcome]:
    """The outcome of a run that nobody killed, on a server that saves nothing."""
    known: dict[str, Outcome] = {}

    def get(model: str) -> Outcome:
        if model not in known:
            folder = tmp_path_factory.mktemp(model) / "state"
            with serving(folder, model, enabled=False) as server:
                server.http.post("/v1/completions", json=BODY)
            (received,) = recorded(folder, events.RequestReceived)
            known[model] = output(folder, received.request_id)
        return known[model]

    return get


@pytest.mark.timeout(120)
@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("model", MODELS)
def test_a_killed_request_goes_on_from_its_chain(
    state_folder: Path, model: str, moment: str, uninterrupted: Callable[[str], Outcome]
) -> None:
    killed(state_folder, model, MOMENTS[moment])
    (received,) = recorded(state_folder, events.RequestReceived)
    tokens, logprobs = output(state_folder, received.request_id)
    num_known = NUM_TOKENS + len(tokens)
    saved = longest_saved(state_folder, model, num_known)
    assert saved >= 4 * BLOCK_TOKENS
    settings = {"state_every_blocks": 4}
    with serving(state_folder, model, **settings) as server:
        server.wait_for_end(received.request_id)
    (restored,) = recorded(state_folder, events.ChainRestored, run_id=2)
    assert restored.num_tokens == restored.num_disk_tokens == saved
    assert num_prefilled(state_folder, 2, received.request_id) == num_known - 1 - saved
    found = output(state_folder, received.request_id)
    assert len(found[0]) == MAX_TOKENS
    assert found[0][: len(tokens)] == tokens
    assert found[1][: len(tokens)] == (logprobs or [])
    assert found == uninterrupted(model)
