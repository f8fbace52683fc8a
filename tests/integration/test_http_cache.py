"""The prefix cache as clients see it: what usage, SQL and /metrics say of the same requests."""

import re
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from journal.reader import JournalReader
from journal.verify import verify as findings_of
from tests.integration.events import stream
from tests.integration.http_server import RunningServer, running

TEXT = "/v1/completions"
KV = {"block_tokens": 16, "reserve_bytes": 0}
PROMPT = "The same words again and again. " * 8
NUM_TOKENS = len(PROMPT)


def ask(server: RunningServer, prompt: str = PROMPT, **more: object) -> httpx.Response:
    """A completion of two tokens, whole."""
    body = {"model": "default", "prompt": prompt, "max_tokens": 2, "ignore_eos": True}
    answer = server.http.post(TEXT, json=body | more)
    assert answer.status_code == 200, answer.text
    return answer


def cached(answer: httpx.Response) -> int:
    """The restored tokens of the prompt, as the client is told."""
    return cached_of(answer.json())


def cached_of(body: dict[str, Any]) -> int:
    return body["usage"]["prompt_tokens_details"]["cached_tokens"]


def wait_for_saves(server: RunningServer, num_blocks: int) -> None:
    """Returns once so many blocks are on disk."""
    server.wait_until(lambda view: view.num_blocks >= num_blocks)


def metric(server: RunningServer, name: str) -> float:
    """The sum of a metric over its labels."""
    lines = server.http.get("/metrics").text.splitlines()
    found = [line for line in lines if re.match(rf"{name}(\{{.*\}})? ", line)]
    assert found, f"there is no metric {name}"
    return sum(float(line.rpartition(" ")[2]) for line in found)


@pytest.mark.parametrize("memory_bytes", [0, 2**20])
def test_usage_sql_and_metrics_agree(state_folder: Path, memory_bytes: int) -> None:
    with running(state_folder, kv={**KV, "memory_bytes": memory_bytes}) as server:
        first = ask(server)
        wait_for_saves(server, NUM_TOKENS // 16)
        again = ask(server)
        longer = ask(server, PROMPT + "And now for something else.")
        answers = [first, again, longer]
        assert [cached(answer) for answer in answers] == [0, NUM_TOKENS - 1, NUM_TOKENS]
        told = sum(cached(answer) for answer in answers)
        prompts = sum(answer.json()["usage"]["prompt_tokens"] for answer in answers)
        assert metric(server, "fermata_hit_tokens_total") == told
        assert metric(server, "fermata_prefilled_tokens_total") == prompts - told
        assert metric(server, "fermata_prompt_tokens_total") == prompts
    tier = "num_memory_tokens" if memory_bytes else "num_disk_tokens"
    query = (
        f"SELECT sum(num_prompt_tokens), sum(num_memory_tokens + num_disk_tokens), sum({tier}),"
        " sum(num_prefilled_tokens) FROM requests"
    )
    with closing(sqlite3.connect(state_folder / "journal.db")) as database:
        assert database.execute(query).fetchone() == (prompts, told, told, prompts - told)
    with JournalReader.open(state_folder) as reader, reader.transaction() as run:
        assert list(findings_of(run)) == []


def test_a_stream_says_the_same_while_it_comes_later_and_after_a_restart(
    state_folder: Path,
) -> None:
    body = {"model": "default", "prompt": PROMPT, "max_tokens": 2, "ignore_eos": True}
    body |= {"stream_options": {"include_usage": True}}
    with running(state_folder, kv=KV) as server:
        ask(server)
        wait_for_saves(server, NUM_TOKENS // 16)
        live = stream(server.http, TEXT, body)
        assert cached_of(live[-2].data) == NUM_TOKENS - 1
        with JournalReader.open(state_folder) as reader, reader.transaction() as run:
            query = "SELECT request_id FROM request ORDER BY number DESC LIMIT 1"
            request_id = run(query).scalar_one()
        again = server.http.get(f"/v1/requests/{request_id}/stream?after=1").text
        assert f'"cached_tokens":{NUM_TOKENS - 1}' in again
    with running(state_folder, kv=KV) as server:
        again = server.http.get(f"/v1/requests/{request_id}/stream?after=1").text
        assert f'"cached_tokens":{NUM_TOKENS - 1}' in again
        shown = server.http.get(f"/v1/requests/{request_id}").json()
        assert shown["num_memory_tokens"] + shown["num_disk_tokens"] == NUM_TOKENS - 1
        assert cached(ask(server)) == NUM_TOKENS - 1, "the blocks have survived"
