"""Real processes on disks that really fail: file sizes that are limited, system calls that a tracer
lets fail, and small file systems, where they may be had.
"""

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.integration.http_server import TIMEOUT_S, assert_replays
from tools.server_file import read_server_file

ROOT = Path(__file__).resolve().parents[2]
LINUX = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these means")
BODY = {"model": "fake", "prompt": "x" * 40, "ignore_eos": True, "stream": True}
SERVER = (sys.executable, "-m", "tests.power.traced_server")


@dataclass
class Served:
    """A server's process, or that of its tracer, and where it answers."""

    process: "subprocess.Popen[str]"
    client: httpx.Client
    folder: Path

    @property
    def pid(self) -> int:
        return read_server_file(self.folder).pid

    def ended(self) -> tuple[int, str]:
        """Its exit status, and what it said at last."""
        _, errors = self.process.communicate(timeout=TIMEOUT_S)
        return self.process.returncode, errors


@contextmanager
def served(folder: Path, tracer: Sequence[str] = ()) -> Iterator[Served]:
    """A server that has answered once."""
    process = subprocess.Popen(
        [*tracer, *SERVER, str(folder)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    address = process.stdout.readline().removeprefix("listening on ").strip()
    try:
        with httpx.Client(base_url=address, timeout=TIMEOUT_S) as client:
            answer = client.post("/v1/completions", json=BODY | {"max_tokens": 3})
            assert answer.status_code == 200
            yield Served(process, client, folder)
    finally:
        if process.poll() is None:
            os.kill(read_server_file(folder).pid, signal.SIGKILL)
            process.communicate()


def read_until_cut(client: httpx.Client, line_of_change: int, change: object) -> list[str]:
    """The lines of a stream whose connection is cut; `change` is called in its middle."""
    assert callable(change)
    lines: list[str] = []
    with client.stream("POST", "/v1/completions", json=BODY | {"max_tokens": 100_000}) as answer:
        try:
            for line in answer.iter_lines():
                lines.append(line)
                if len(lines) == line_of_change:
                    change()
        except httpx.RemoteProtocolError:
            return lines
    raise AssertionError("the stream was not cut")


def last_position(lines: list[str]) -> int:
    """How many tokens a client has seen."""
    return max(int(line.removeprefix("id: ")) for line in lines if line.startswith("id: "))


def assert_goes_on(folder: Path, lines: list[str]) -> None:
    """All that was sent was committed, and the next process goes on with it."""
    assert_replays(folder)
    with served(folder) as server:
        [view] = server.client.get("/v1/requests").json()["data"]
        assert view["num_output_tokens"] >= last_position(lines)


@LINUX
def test_a_journal_that_may_not_grow_ends_the_process(tmp_path: Path) -> None:
    with served(tmp_path) as server:
        size = (tmp_path / "journal.db-wal").stat().st_size

        def limit() -> None:
            resource.prlimit(server.pid, resource.RLIMIT_FSIZE, (size, size))

        lines = read_until_cut(server.client, 30, limit)
        status, errors = server.ended()
    assert status == 3
    assert errors.splitlines()[-1] == f"fermata: {tmp_path / 'journal.db'}: disk I/O error"
    assert_goes_on(tmp_path, lines)


FLUSH = re.compile(r"fdatasync\(\d+<.*/journal\.db(.*)>\) += (.*)")


@LINUX
def test_a_flush_that_fails_is_not_tried_again(tmp_path: Path) -> None:
    """With power for every commit, so that each is one flush of the log. The first process flushes
    more often than twenty times; nothing is flushed after the one that fails.
    """
    trace = tmp_path / "trace"
    inject = "inject=fdatasync:error=EIO:when=20+"
    tracer = ("strace", "-f", "--seccomp-bpf", "-y", "-qq", "-o", str(trace))
    tracer += ("-e", "trace=fdatasync", "-e", inject)
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    tried = subprocess.run([*tracer, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"nothing may be traced here: {tried.stderr.strip()}")
    folder = tmp_path / "state"
    with pytest.MonkeyPatch.context() as context:
        context.setenv("FERMATA_JOURNAL__DURABILITY", "power")
        with served(folder, tracer) as server:
            lines = read_until_cut(server.client, 1, lambda: None)
            status, errors = server.ended()
    assert status == 3
    assert errors.splitlines()[-1] == f"fermata: {folder / 'journal.db'}: disk I/O error"
    flushes = FLUSH.findall(trace.read_text())
    failed = [at for at, (_, result) in enumerate(flushes) if "EIO" in result]
    assert failed == [len(flushes) - 1], "the one that failed was the last"
    assert_goes_on(folder, lines)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 16 MiB, on which a journal has room for its log."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux may mount a file system")
    mount = ("mount", "-t", "tmpfs", "-o", "size=16M", "tmpfs", str(tmp_path))
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(("umount", "-l", str(tmp_path)), check=True)


def fill(folder: Path) -> Path:
    """Takes all the space that there is."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file:
        status = os.statvfs(folder)
        file.write(bytes(status.f_bavail * status.f_frsize))
    return ballast


def test_a_real_disk_that_is_full_heals_without_a_restart(small_disk: Path) -> None:
    with served(small_disk / "state") as server:
        body = BODY | {"max_tokens": 600}
        numbers: list[int] = []
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            while len(numbers) < 5:
                numbers += position_in(next(lines))
            ballast = fill(small_disk)
            while server.client.get("/ready").json()["reason"] != "journal_full":
                pass
            refused = server.client.post("/v1/completions", json=BODY)
            assert (refused.status_code, refused.json()["error"]["reason"]) == (503, "journal_full")
            ballast.unlink()
            for line in lines:
                numbers += position_in(line)
        assert numbers == sorted(numbers)
        assert numbers[-1] == 600
        assert server.client.get("/ready").status_code == 200
        os.kill(server.pid, signal.SIGTERM)
        assert server.ended()[0] == 0
    assert_replays(small_disk / "state")


def position_in(line: str) -> list[int]:
    return [int(line.removeprefix("id: "))] if line.startswith("id: ") else []


def test_a_start_without_space_says_so(small_disk: Path) -> None:
    fill(small_disk)
    command = [*SERVER, str(small_disk / "state")]
    ended = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert ended.returncode == 2
    [line] = ended.stderr.splitlines()
    assert "no space" in line.lower()
