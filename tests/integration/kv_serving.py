"""Servers on the tiny models that save KV, and what their journals say of it."""

import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from journal import events
from journal.reader import JournalReader
from scheduler.engine.models import MlxSource
from tests.integration.http_server import TIMEOUT_S, RunningServer, running

BLOCK_TOKENS = 16
NUM_TOKENS = 200
MODELS = ("tiny-plain", "tiny-hybrid")

E = TypeVar("E", bound=events.Event)


@contextmanager
def serving(
    folder: Path, model: str, *, scheduler: object = None, memory: object = None, **kv: object
) -> Iterator[RunningServer]:
    """A server on a tiny model, with small blocks; `kv` are settings of saved KV. Without `memory`
    it has no ceiling.
    """
    groups = {"block_tokens": BLOCK_TOKENS, "reserve_bytes": 0, **kv}
    source = MlxSource(model, "stock")
    more = {"scheduler": scheduler or {}, "memory": memory or {"ceiling": "none"}}
    with running(folder, source, model=model, kv=groups, **more) as server:
        yield server


def prompt(number: int, num_tokens: int = NUM_TOKENS) -> list[int]:
    """Tokens of a text of its own, from the first one on."""
    return [(31 * i + i * i // 7 + 97 * number + 5) % 300 for i in range(num_tokens)]


@dataclass(frozen=True)
class Answer:
    """`content` is all that must be equal when the same is asked again: text, log-probabilities of
    the chosen and the likeliest tokens, and why it ended.
    """

    request_id: str
    content: Any
    num_cached_tokens: int


def ask(server: RunningServer, token_ids: list[int], max_tokens: int = 4) -> Answer:
    """A completion, whole."""
    body = {
        "model": "default",
        "prompt": token_ids,
        "max_tokens": max_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "logprobs": 3,
    }
    answer = server.http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return Answer(
        request_id="req_" + found["id"].partition("-")[2],
        content=found["choices"],
        num_cached_tokens=found["usage"]["prompt_tokens_details"]["cached_tokens"],
    )


@cache
def expected(model: str, number: int, num_tokens: int = NUM_TOKENS, max_tokens: int = 4) -> Any:
    """What a server that saves nothing answers to a prompt."""
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(Path(folder), model, enabled=False) as server,
    ):
        answer = ask(server, prompt(number, num_tokens), max_tokens)
    assert answer.num_cached_tokens == 0
    return answer.content


def recorded(folder: Path, kind: type[E], run_id: int = 0) -> list[E]:
    """The events of a kind, of one run or of all."""
    with JournalReader.open(folder) as reader:
        return [
            record.event
            for record in reader.read()
            if isinstance(record.event, kind) and run_id in (0, record.run_id)
        ]


def wait_for(folder: Path, kind: type[E], count: int = 1) -> list[E]:
    """Returns once so many events of a kind are in the journal."""
    deadline = time.monotonic() + TIMEOUT_S
    while len(found := recorded(folder, kind)) < count:
        assert time.monotonic() < deadline, f"{len(found)} {kind.__name__}, not {count}"
    return found


def wait_for_blocks(server: RunningServer, num_blocks: int) -> None:
    """Returns once so many blocks are on disk, and the writers have nothing more."""
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        cache = server.http.get("/v1/cache").json()
        if cache["num_blocks"] >= num_blocks and cache["writing_bytes"] == 0:
            return
        assert time.monotonic() < deadline, f"the blocks were not saved: {cache}"


def num_prefilled(folder: Path, run_id: int, request_id: str) -> int:
    """The tokens of a request that were computed in a run, as its committed chunks have it."""
    committed = {
        event.num_cached_tokens
        for event in recorded(folder, events.PrefillChunkCommitted, run_id)
        if event.request_id == request_id
    }
    return sum(
        event.length
        for event in recorded(folder, events.PrefillChunkDone, run_id)
        if event.request_id == request_id and event.start + event.length in committed
    )


def files_below(folder: Path) -> list[Path]:
    """All files of the store, in order."""
    return sorted(path for path in (folder / "kv").rglob("*") if path.is_file())
