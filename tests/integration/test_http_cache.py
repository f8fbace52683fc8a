"""The prefix cache as clients see it: what usage, SQL and /metrics say of the same requests."""

import re
import sqlite3
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from journal import audit, sums
from journal.events import RequestReceived
from journal.reader import JournalReader
from journal.verify import verify as findings_of
from scheduler.kvcache.store import BlockStore
from tests.integration.events import stream
from tests.integration.http_server import TIMEOUT_S, RunningServer, running

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
    deadline = time.monotonic() + TIMEOUT_S
    while server.http.get("/v1/cache").json()["num_blocks"] < num_blocks:
        assert time.monotonic() < deadline, "the blocks were not saved"


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


def test_a_request_that_does_not_finish_is_in_no_sum(state_folder: Path) -> None:
    """Its prompt was restored and computed in part: the parts would not add up to prompts."""
    with (
        running(state_folder, kv=KV, fake={"step_ms": 5}) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        ask(server)
        wait_for_saves(server, NUM_TOKENS // 16)
        body = {"model": "default", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
        going_on = pool.submit(server.http.post, TEXT, json=body)
        server.http.delete(f"/v1/requests/{server.wait_for_phase('decoding')}")
        assert going_on.result().status_code == 410
        ask(server)
        found = server.http.get("/v1/cache").json()["since_start"]
        restored = metric(server, "fermata_hit_tokens_total")
        prefilled = metric(server, "fermata_prefilled_tokens_total")
    with JournalReader.open(state_folder) as reader:
        (hits,) = sums.cache_hits(reader)
    assert hits.num_prompt_tokens == 2 * NUM_TOKENS
    assert (restored, prefilled) == (NUM_TOKENS - 1, NUM_TOKENS + 1)
    parts = ("num_memory_tokens", "num_disk_tokens", "num_prefilled_tokens")
    assert [found[name] for name in parts] == [getattr(hits, name) for name in parts]
    assert found["hit_rate"] == hits.hit_rate


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


def test_the_cache_is_shown_in_numbers(state_folder: Path) -> None:
    with running(state_folder, kv={**KV, "max_bytes": 10**9}) as server:
        empty = server.http.get("/v1/cache").json()
        assert (empty["num_blocks"], empty["disk_bytes"]) == (0, 0)
        assert empty["since_start"]["hit_rate"] is None
        ask(server)
        wait_for_saves(server, NUM_TOKENS // 16)
        ask(server)
        shown = server.http.get("/v1/cache").json()
        files = list((state_folder / "kv").rglob("*.safetensors"))
        assert shown["num_blocks"] == len(files) == NUM_TOKENS // 16
        assert shown["disk_bytes"] == sum(file.stat().st_size for file in files)
        assert (shown["enabled"], shown["block_tokens"]) == (True, 16)
        assert (shown["max_bytes"], shown["stopped"]) == (10**9, None)
        assert shown["num_used_blocks"] == NUM_TOKENS // 16 - 1, "only the last one may go"
        assert shown["free_bytes"] > 0
        assert len(shown["domain"]) == 64
        hit_rate = (NUM_TOKENS - 1) / (2 * NUM_TOKENS)
        assert shown["since_start"]["hit_rate"] == round(hit_rate, 4)
        assert metric(server, "fermata_kv_blocks") == NUM_TOKENS // 16
        assert metric(server, "fermata_kv_disk_bytes") == shown["disk_bytes"]
        assert server.http.get("/health").json()["saving"] == {
            "enabled": True,
            "stopped": False,
            "reason": None,
            "detail": None,
        }


def test_clear_sends_away_what_no_request_holds(state_folder: Path) -> None:
    fake = {"step_ms": 5}
    with running(state_folder, kv=KV, fake=fake) as server, ThreadPoolExecutor(1) as pool:
        ask(server, "Something else that was asked before this.")
        wait_for_saves(server, 2)
        body = {"model": "default", "prompt": PROMPT, "max_tokens": 400, "ignore_eos": True}
        held = pool.submit(server.http.post, TEXT, json=body)
        request_id = server.wait_for_phase("decoding")
        wait_for_saves(server, NUM_TOKENS // 16 + 2)
        answer = server.http.post("/v1/cache/clear")
        assert answer.status_code == 200
        body = answer.json()
        assert (body["done"], body["num_cleared_blocks"]) == (True, 2)
        assert body["num_blocks"] >= NUM_TOKENS // 16, "a running request keeps its blocks"
        server.http.delete(f"/v1/requests/{request_id}")
        assert held.result().status_code == 410
        everything = server.http.post("/v1/cache/clear").json()
        assert (everything["done"], everything["num_blocks"]) == (True, 0)
        assert list((state_folder / "kv").rglob("*.safetensors")) == []
        assert cached(ask(server)) == 0
    with JournalReader.open(state_folder) as reader:
        last = list(audit.cache_misses(reader))[-1]
        assert (last.parted_at_tokens, last.parted_because) == (0, "evicted")


def test_a_server_that_saves_nothing_says_so(state_folder: Path) -> None:
    with running(state_folder, kv={"enabled": False}) as server:
        ask(server)
        assert cached(ask(server)) == 0
        assert server.http.get("/v1/cache").json()["enabled"] is False
        assert server.http.get("/health").json()["saving"]["enabled"] is False
        refused = server.http.post("/v1/cache/clear")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "cache_disabled")
    with JournalReader.open(state_folder) as reader:
        assert {row.parted_because for row in audit.cache_misses(reader)} == {"off"}


def test_a_full_disk_stops_saving_and_nothing_else(state_folder: Path) -> None:
    with running(state_folder, kv={**KV, "reserve_bytes": 2**62}) as server:
        ask(server)
        deadline = time.monotonic() + TIMEOUT_S
        while not server.http.get("/health").json()["saving"]["stopped"]:
            assert time.monotonic() < deadline, "saving did not stop"
        saving = server.http.get("/health").json()["saving"]
        assert saving["reason"] == "disk_full"
        assert "bytes are free" in saving["detail"]
        assert server.http.get("/v1/cache").json()["stopped"] == "disk_full"
        assert metric(server, "fermata_kv_save_failures_total") > 0
        assert server.http.get("/ready").status_code == 200
        ask(server)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_bug_in_a_writer_is_seen_and_stops_nothing_else(
    state_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("a defect")

    with running(state_folder, kv=KV) as server:
        monkeypatch.setattr(BlockStore, "save", broken)
        ask(server)
        deadline = time.monotonic() + TIMEOUT_S
        while not server.http.get("/ready").json()["saving"]["stopped"]:
            assert time.monotonic() < deadline, "nothing says that saving has stopped"
        for path in ("/health", "/ready"):
            answer = server.http.get(path)
            saving = answer.json()["saving"]
            assert (answer.status_code, saving["reason"]) == (200, "bug")
            assert saving["detail"] == "KeyError: 'a defect'"
        shown = server.http.get("/v1/cache").json()
        assert (shown["stopped"], shown["writing_bytes"]) == ("bug", 0)
        ask(server)
    monkeypatch.undo()
    with running(state_folder, kv=KV) as server:
        ask(server)
        wait_for_saves(server, NUM_TOKENS // 16)
        assert server.http.get("/ready").json()["saving"]["stopped"] is False


def test_the_journal_knows_the_suffix_of_a_chat(state_folder: Path) -> None:
    with running(state_folder, kv=KV) as server:
        messages = [{"role": "user", "content": "hello"}]
        body = {"model": "default", "messages": messages, "max_tokens": 2}
        assert server.http.post("/v1/chat/completions", json=body).status_code == 200
        ask(server)
    with JournalReader.open(state_folder) as reader:
        received = [r.event for r in reader.read() if isinstance(r.event, RequestReceived)]
    assert [event.num_suffix_tokens for event in received] == [1 + len("assistant\n"), 0]
    assert [event.keep_output for event in received] == [True, True]
