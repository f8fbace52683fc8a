"""What a disk that fails under the journal does to a server. A full one is waited for, and nothing
is sent meanwhile. After any other failure nothing more is tried: streams are cut so that clients
ask again, and the process ends with status 3; the next one goes on from what was committed.
"""

import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from journal.database import READER_PRAGMAS
from tests.failing_sqlite import SqliteFailures, failing_sqlite
from tests.integration.events import Event, parse_event, stream
from tests.integration.http_server import TIMEOUT_S, RunningServer, assert_replays, running

COMPLETIONS = "/v1/completions"
BODY: dict[str, Any] = {"model": "fake", "prompt": "hello", "ignore_eos": True, "temperature": 0}
GROUPS: dict[str, Any] = {
    "fake": {"turn_tokens": 0, "step_ms": 1},
    "journal": {"gather_steps": 8, "snapshot_events": 100, "upkeep_s": 1, "full_wait_ms": 1},
    "requests": {"retention_s": 0},
}


@pytest.fixture
def sqlite() -> Iterator[SqliteFailures]:
    with failing_sqlite() as failures:
        yield failures


class DoomedServer(RunningServer):
    """Ends by itself, with status 3."""

    def join(self) -> None:
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive(), "the server did not end"
        self.http.close()
        self.openai.close()
        assert self.outcome is not None
        assert self.outcome.status == 3


def read_until_cut(server: RunningServer, begun: threading.Event) -> tuple[str, list[Event]]:
    """A stream, up to where its connection ends in the middle, and its request."""
    blocks = [""]
    body = BODY | {"max_tokens": 100_000, "stream": True}
    with server.http.stream("POST", COMPLETIONS, json=body) as answer:
        try:
            for line in answer.iter_lines():
                blocks[-1] += f"{line}\n"
                if not line:
                    blocks.append("")
                if len(blocks) > 5:
                    begun.set()
        except httpx.RemoteProtocolError:
            request_id: str = answer.headers["x-request-id"]
            return request_id, [parse_event(block.strip()) for block in blocks[:-1]]
    raise AssertionError("the stream came to an end of its own")


def failed(folder: Path, sqlite: SqliteFailures, failing: str, code: int) -> tuple[str, str]:
    """A server whose journal fails while it sends a stream. Returns the request and its text."""
    server = DoomedServer(folder, **GROUPS)
    begun = threading.Event()
    found: list[tuple[str, list[Event]]] = []
    reader = threading.Thread(target=lambda: found.append(read_until_cut(server, begun)))
    reader.start()
    assert begun.wait(TIMEOUT_S)
    sqlite.fail(failing, code)
    server.join()
    reader.join(TIMEOUT_S)
    sqlite.heal()
    assert_replays(folder)
    [(request_id, events)] = found
    assert all(event.data != "[DONE]" and "error" not in event.data for event in events)
    return request_id, "".join(event.text for event in events)


def goes_on(folder: Path, request_id: str, text: str) -> None:
    """The next server has all that was sent, and goes on with it."""
    with running(folder, **GROUPS) as server:
        with server.http.stream("GET", f"/v1/requests/{request_id}/stream") as answer:
            seen = ""
            lines = answer.iter_lines()
            while len(seen) <= len(text):
                line = next(lines)
                seen += parse_event(line).text if line.startswith("data: ") else ""
        server.http.delete(f"/v1/requests/{request_id}").raise_for_status()
    assert seen.startswith(text)


STATEMENTS = (
    "BEGIN IMMEDIATE",
    "INSERT INTO events",
    "INSERT INTO step_tokens",
    "INSERT INTO token_ids",
    "INSERT OR REPLACE INTO snapshots",
    "COMMIT",
    "PRAGMA wal_checkpoint",
)
CODES = (sqlite3.SQLITE_IOERR_WRITE, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN)


@pytest.mark.parametrize(
    ("failing", "code"),
    [*((failing, sqlite3.SQLITE_IOERR_FSYNC) for failing in STATEMENTS)]
    + [("COMMIT", code) for code in CODES],
)
def test_a_broken_journal_ends_the_process(
    tmp_path: Path,
    sqlite: SqliteFailures,
    monkeypatch: pytest.MonkeyPatch,
    failing: str,
    code: int,
) -> None:
    monkeypatch.setattr("journal.journal.CHECKPOINT_BYTES", 300_000)
    request_id, text = failed(tmp_path, sqlite, failing, code)
    assert len(sqlite.tried) == 1, "nothing is tried a second time"
    if failing in ("COMMIT", "PRAGMA wal_checkpoint") and code == sqlite3.SQLITE_IOERR_FSYNC:
        goes_on(tmp_path, request_id, text)


@pytest.mark.parametrize("failing", ["INSERT INTO events", "INSERT INTO token_ids", "COMMIT"])
def test_a_full_disk_is_waited_for(tmp_path: Path, sqlite: SqliteFailures, failing: str) -> None:
    with running(tmp_path, **GROUPS) as server, ThreadPoolExecutor(1) as pool:
        body = BODY | {"max_tokens": 500}
        asked = pool.submit(stream, server.http, COMPLETIONS, body)
        server.wait_for_phase("decoding")
        sqlite.fail(failing, sqlite3.SQLITE_FULL)
        assert sqlite.happened.wait(TIMEOUT_S)
        server.wait_until(lambda _: server.http.get("/ready").json()["reason"] == "journal_full")
        refused = server.http.post(COMPLETIONS, json=BODY)
        assert refused.status_code == 503
        assert refused.json()["error"]["reason"] == "journal_full"
        assert server.http.get("/health").json()["state"] == "journal_full"
        position = server.samples()["fermata_output_tokens_total"]
        num_tried = len(sqlite.tried)
        server.wait_until(lambda _: len(sqlite.tried) > num_tried)
        assert server.samples()["fermata_output_tokens_total"] == position
        sqlite.heal()
        events = asked.result(TIMEOUT_S)
        assert server.http.get("/ready").status_code == 200
        assert server.http.post(COMPLETIONS, json=BODY | {"max_tokens": 2}).status_code == 200
    positions = [event.position for event in events if event.position is not None]
    assert positions == sorted(positions)
    assert positions[-1] == 500
    assert len(sqlite.tried) > 1


@pytest.mark.parametrize("code", [sqlite3.SQLITE_IOERR_READ, sqlite3.SQLITE_CANTOPEN])
def test_a_journal_that_cannot_be_read_hurts_its_readers_only(
    tmp_path: Path, sqlite: SqliteFailures, code: int
) -> None:
    groups: dict[str, Any] = GROUPS | {"requests": {"max_lingering": 0}}
    with running(tmp_path, **groups) as server:
        answer = server.http.post(COMPLETIONS, json=BODY | {"max_tokens": 2})
        path = f"/v1/requests/{answer.headers['x-request-id']}"
        reader = READER_PRAGMAS[0]
        sqlite.fail(reader, code)
        for url in (path, f"{path}/events", f"{path}/stream"):
            failed = server.http.get(url)
            assert failed.status_code == 503
            assert failed.json()["error"]["code"] == "journal_unreadable"
            assert failed.json()["error"]["retryable"]
            assert int(failed.headers["retry-after"]) > 0
        assert server.http.post(COMPLETIONS, json=BODY | {"max_tokens": 2}).status_code == 200
        assert server.http.get("/ready").status_code == 200
        sqlite.heal()
        for url in (path, f"{path}/events", f"{path}/stream"):
            assert server.http.get(url).status_code == 200


@pytest.mark.parametrize(
    ("code", "status"), [(sqlite3.SQLITE_IOERR_WRITE, 3), (sqlite3.SQLITE_FULL, 0)]
)
def test_upkeep_on_a_failing_disk(
    tmp_path: Path, sqlite: SqliteFailures, code: int, status: int
) -> None:
    server = (DoomedServer if status else RunningServer)(tmp_path, **GROUPS)
    sqlite.fail("DELETE FROM token_ids", code, times=1)
    assert server.http.post(COMPLETIONS, json=BODY | {"max_tokens": 2}).status_code == 200
    assert sqlite.happened.wait(TIMEOUT_S)
    if not status:
        assert server.http.post(COMPLETIONS, json=BODY | {"max_tokens": 2}).status_code == 200
        server.begin_stop()
    server.join()
    assert len(sqlite.tried) == 1
