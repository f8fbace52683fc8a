"""`fermata ps` against a scripted server."""

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tools.ps import run
from tools.server_file import (
    ServerFile,
    read_server_file,
    remove_server_file,
    write_server_file,
)

ENTRY: dict[str, object] = {
    "id": "req_0123456789abcdefghjkmnpqrs",
    "state": "decoding",
    "num_known_tokens": 1204,
    "num_cached_tokens": 1203,
    "num_saved_tokens": 0,
    "num_output_tokens": 4,
    "max_tokens": 64,
    "row_bytes": 12_345_678,
    "num_pauses": 0,
    "held_ms": 0,
    "age_ms": 61_500,
    "wait": None,
    "solo": False,
    "orphaned_by": None,
    "orphaned_ms": 0,
}
HELD: dict[str, object] = ENTRY | {
    "id": "req_0123457zzzzzzzzzzzzzzzzzzz",
    "state": "paused",
    "num_cached_tokens": 0,
    "num_saved_tokens": 1200,
    "row_bytes": 0,
    "num_pauses": 2,
    "held_ms": 3_723_000,
    "wait": {
        "reason": "memory",
        "text": "needs 2.0GB of memory, 1.5GB are free",
        "request_id": None,
    },
}
DEFERRED: dict[str, object] = ENTRY | {
    "id": "req_1123457zzzzzzzzzzzzzzzzzzz",
    "state": "waiting",
    "wait": {
        "reason": "blocks",
        "text": "another is computing what it needs too",
        "request_id": ENTRY["id"],
    },
}
LOST: dict[str, object] = ENTRY | {
    "state": "paused",
    "wait": {"reason": "client", "text": "nobody has come back", "request_id": None},
    "orphaned_by": "client_gone",
    "orphaned_ms": 12_900,
}
FOUND: dict[str, object] = HELD | {"orphaned_by": "restart", "orphaned_ms": 61_000}
MEMORY: dict[str, object] = {
    "ceiling_bytes": 48_000_000_000,
    "usage_bytes": 45_100_000_000,
    "level": "high",
}
ANSWER: dict[str, object] = {
    "object": "list",
    "data": [ENTRY, HELD, DEFERRED],
    "memory": MEMORY,
}


class Scripted(BaseHTTPRequestHandler):
    """Answers what `body` says to whoever knows the key."""

    body: bytes = b""
    key = "secret"

    def do_GET(self) -> None:
        known = self.headers["Authorization"] == f"Bearer {self.key}"
        self.send_response(200 if known and self.path == "/v1/requests" else 401)
        self.end_headers()
        self.wfile.write(self.body)

    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """Says nothing."""


@pytest.fixture
def address() -> Iterator[str]:
    Scripted.body = json.dumps(ANSWER).encode()
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_server_of_a_state_folder_is_found_and_its_requests_are_a_table(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_server_file(tmp_path, ServerFile(address, os.getpid(), 3))
    assert run(tmp_path, None, "secret", as_json=False) == 0
    header, first, second, third, empty, memory = capsys.readouterr().out.splitlines()
    assert header.split() == [
        *["request", "state", "cached", "output", "memory", "held", "age", "waits", "for"]
    ]
    assert first.split() == ["req_0123456", "decoding", "1203/1204", "4/64", "12.3MB", "1m01s"]
    held = ["req_0123457", "paused", "1200/1204", "4/64", "1h02m", "1m01s"]
    assert second.split()[:6] == held
    assert second.endswith("  needs 2.0GB of memory, 1.5GB are free")
    assert third.endswith("  another is computing what it needs too: req_0123456")
    assert empty == ""
    assert memory == "memory: 45.1GB of 48.0GB, over the high mark"
    assert max(len(line) for line in (header, first, second)) <= 120


def test_a_request_without_a_client_says_for_how_long(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Scripted.body = json.dumps(ANSWER | {"data": [LOST, FOUND, ENTRY]}).encode()
    assert run(tmp_path, address, "secret", as_json=False) == 0
    lost, found, attached = capsys.readouterr().out.splitlines()[1:4]
    assert lost.endswith("  1m01s  no client for 12s: it was lost")
    held = "needs 2.0GB of memory, 1.5GB are free"
    assert found.endswith(f"  {held}; no client for 1m01s: since the server's start")
    assert attached.endswith("  1m01s")


def test_without_a_ceiling_nothing_is_said_of_memory(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing = {"object": "list", "data": [], "memory": MEMORY | {"ceiling_bytes": None}}
    Scripted.body = json.dumps(nothing).encode()
    assert run(tmp_path, address, "secret", as_json=False) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_json_is_the_answer_on_one_line(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, address + "/", "secret", as_json=True) == 0
    assert json.loads(capsys.readouterr().out) == ANSWER


@pytest.mark.parametrize("body", [b"hello", b"[1]", b'{"object": "cache"}', b'{"data": []}'])
def test_an_answer_that_is_no_object_is_named(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], body: bytes
) -> None:
    Scripted.body = body
    assert run(tmp_path, address, "secret", as_json=False) == 2
    assert capsys.readouterr().err == (
        f"fermata ps: what answers at {address} (--url) is no Fermata\n"
    )


def test_a_key_that_is_missing_is_asked_for(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, address, None, as_json=False) == 2
    assert "wants its API key: set FERMATA_SERVER__API_KEY" in capsys.readouterr().err


def test_without_a_server_one_line_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, None, None, as_json=False) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"start one with `fermata serve --state {tmp_path}`" in error


def test_what_a_dead_server_left_behind_is_named(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_server_file(tmp_path, ServerFile("http://127.0.0.1:1", 4711, 3))
    assert run(tmp_path, None, None, as_json=False) == 2
    assert f"no server answers at http://127.0.0.1:1 (from {tmp_path}, process 4711)" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("url", ["http://127.0.0.1:1/a b", "http://127.0.0.1:x", "http://["])
def test_an_address_that_cannot_be_asked_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], url: str
) -> None:
    assert run(tmp_path, url, None, as_json=False) == 2
    error = capsys.readouterr().err
    assert url in error
    assert error.count("\n") == 1


def test_a_key_that_no_header_can_carry_is_named(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, address, "one\ntwo", as_json=False) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fermata ps: {address} (--url) cannot be asked")
    assert "one" not in error.removeprefix("fermata ps: ")


def test_a_file_is_no_state_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "journal.db"
    file.write_bytes(b"")
    assert run(file, None, None, as_json=False) == 2
    assert capsys.readouterr().err == (
        f"fermata ps: {file} is no folder: --state takes a server's folder\n"
    )


def test_the_server_file_is_private_and_comes_back_as_written(tmp_path: Path) -> None:
    server = ServerFile("http://127.0.0.1:8321", 17, 4)
    write_server_file(tmp_path, server)
    assert [path.name for path in tmp_path.iterdir()] == ["server.json"]
    assert (tmp_path / "server.json").stat().st_mode & 0o777 == 0o600
    assert read_server_file(tmp_path) == server
    remove_server_file(tmp_path)
    remove_server_file(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_broken_server_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "server.json").write_text('{"address": "http://127.0.0.1:1"}')
    assert run(tmp_path, None, None, as_json=False) == 2
    assert f"{tmp_path / 'server.json'} cannot be read" in capsys.readouterr().err
