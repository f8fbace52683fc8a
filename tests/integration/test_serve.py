"""`fermata serve` as a process, and how it says that it cannot start."""

import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import structlog

from journal.journal import Journal
from tests.integration.http_server import assert_replays
from tests.integration.seen import seen
from tests.loop_driver import LoopDriver
from tools import export, serve
from tools.server_file import read_server_file

COMMAND = (
    sys.executable,
    "-c",
    "from tools.cli import main; main()",
    "serve",
    "--model",
    "fake",
    "--port",
    "0",
    "--state",
)
BODY = {"model": "default", "prompt": "once", "max_tokens": 100_000, "ignore_eos": True}


@pytest.fixture(autouse=True)
def _process_state() -> Iterator[None]:
    """Puts back what a run in this process changes."""
    before = {number: signal.getsignal(number) for number in serve.STOP_SIGNALS}
    logging = structlog.get_config()
    yield
    structlog.configure(**logging)
    for number, handler in before.items():
        signal.signal(number, handler)


def start(state: Path, **environment: str) -> tuple["subprocess.Popen[str]", str]:
    """A server process, and its address from the one line that it prints."""
    process = subprocess.Popen(
        [*COMMAND, str(state)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | environment,
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("listening on http://127.0.0.1:")
    return process, line.removeprefix("listening on ").strip()


def test_server_stops_cleanly_at_a_signal(tmp_path: Path) -> None:
    process, url = start(tmp_path)
    assert httpx.get(f"{url}/v1/models", timeout=20).status_code == 200
    server = read_server_file(tmp_path)
    assert (server.address, server.pid) == (url, process.pid)
    assert stat.S_IMODE((tmp_path / "server.json").stat().st_mode) == 0o600
    process.send_signal(signal.SIGTERM)
    rest, errors = process.communicate(timeout=20)
    assert (process.returncode, rest, errors) == (0, "", "")
    assert not (tmp_path / "server.json").exists()
    assert_replays(tmp_path)


def test_second_signal_stops_at_once_and_the_request_goes_on_later(tmp_path: Path) -> None:
    process, url = start(tmp_path, FERMATA_FAKE__STEP_MS="5")
    lines: list[str] = []
    with httpx.stream("POST", f"{url}/v1/completions", json=BODY | {"stream": True}) as answer:
        request_id = answer.headers["x-request-id"]
        try:
            for line in answer.iter_lines():
                lines.append(line)
                if line == "id: 3":
                    process.send_signal(signal.SIGINT)
                if line == "id: 5":
                    process.send_signal(signal.SIGINT)
        except httpx.RemoteProtocolError:
            lines.append("cut")
    assert lines[-1] == "cut"
    process.communicate(timeout=20)
    assert process.returncode == 0
    process, url = start(tmp_path)
    shown = httpx.get(f"{url}/v1/requests/{request_id}", timeout=20).json()
    assert shown["num_output_tokens"] >= 5
    process.kill()
    process.communicate(timeout=20)


def refusal(capfd: pytest.CaptureFixture[str], state: Path, **overrides: object) -> str:
    """The line of a server that cannot start."""
    given = {"model": "fake", "server.port": 0, "state": state, **overrides}
    assert serve.run(None, given) == 2
    errors = capfd.readouterr().err
    assert errors.startswith("fermata: ")
    assert errors.count("\n") == 1, errors
    return errors


def test_unknown_model_is_named(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "'no-such-model'" in refusal(capfd, tmp_path, model="no-such-model")


def test_broken_model_folder_is_named(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    assert str(folder) in refusal(capfd, tmp_path / "state", model=str(folder))


def test_state_folder_that_cannot_be_written(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    line = refusal(capfd, tmp_path / "file" / "state")
    assert "--state" in line


def test_key_that_cannot_be_used_is_found_before_anybody_is_told_of_the_server(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    key = tmp_path / "key"
    key.write_bytes(b"short")
    assert serve.run(None, {"model": "fake", "server.port": 0, "state": tmp_path}) == 2
    said = capfd.readouterr()
    assert (said.out, f"{key} has 5 bytes" in said.err) == ("", True)
    key.unlink()
    key.mkdir()
    assert str(key) in refusal(capfd, tmp_path)
    unused = refusal(capfd, tmp_path, **{"kv.enabled": False})
    assert str(key) in unused, "it is the key to more than saved KV"


def test_port_in_use(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        line = refusal(capfd, tmp_path, **{"server.port": other.getsockname()[1]})
    assert "--port" in line


def test_unknown_host(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "--host" in refusal(capfd, tmp_path, **{"server.host": "256.256.256.256"})


def test_bad_setting_is_named(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "memory.ceiling" in refusal(capfd, tmp_path, **{"memory.ceiling": "much"})


def test_journal_of_another_process(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    try:
        assert str(os.getpid()) in refusal(capfd, tmp_path)
    finally:
        journal.close()
    assert not (tmp_path / "server.json").exists()


def test_a_bundle_is_not_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever looks into an incident may take it for a state folder."""
    driver = LoopDriver(tmp_path / "server")
    driver.submit("hello", 5)
    driver.run_until_idle()
    driver.journal.close()
    state = tmp_path / "state"
    state.mkdir()
    assert export.run(tmp_path / "server", state / "journal.db", export.Wanted()) == 0
    before = seen(state)
    capsys.readouterr()
    assert serve.run(None, {"model": "fake", "state": state, "server.port": 0}) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f"fermata: {state}/journal.db: a bundle, which is read and not served; choose another "
        "--state folder\n"
    )
    assert seen(state) == before
