"""What a disk that fails under saved KV does to a server: it saves nothing until a probe comes
through, says so, and serves on; requests that are held go on from what there is.
"""

import errno
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from journal import events
from scheduler.kvcache.files import OsFiles
from tests.integration.http_server import TIMEOUT_S, RunningServer, running
from tests.integration.kv_serving import files_below, recorded, wait_for
from tests.kvcache.faults import FaultyFiles

BLOCK_TOKENS = 16
NUM_PROMPT = 5 * BLOCK_TOKENS + 3
MAX_TOKENS = 400
GROUPS: dict[str, Any] = {
    "kv": {
        "block_tokens": BLOCK_TOKENS,
        "reserve_bytes": 0,
        "memory_bytes": 0,
        "probe_s": 1,
        "measure_s": 1,
    },
    "fake": {"turn_tokens": 0, "step_ms": 1},
}
BODY: dict[str, Any] = {"model": "fake", "ignore_eos": True, "temperature": 0}


@dataclass
class Disk:
    """A server, its folder, and one that sends to it."""

    server: RunningServer
    pool: ThreadPoolExecutor

    @property
    def folder(self) -> Path:
        return self.server.folder

    def send(self, letter: str, max_tokens: int = MAX_TOKENS) -> Future[httpx.Response]:
        """A prompt of a text of its own, sent from a thread."""
        body = BODY | {"prompt": letter * NUM_PROMPT, "max_tokens": max_tokens}
        return self.pool.submit(self.server.http.post, "/v1/completions", json=body)

    def served(self, asked: Future[httpx.Response], max_tokens: int = MAX_TOKENS) -> int:
        """The answer is whole. Returns how many of its tokens were cached."""
        usage = asked.result(TIMEOUT_S).json()["usage"]
        assert usage["completion_tokens"] == max_tokens
        return usage["prompt_tokens_details"]["cached_tokens"]

    def hold(self) -> str:
        """Holds the request that is decoding."""
        request_id = self.server.wait_for_phase("decoding")
        path = f"/v1/requests/{request_id}/pause"
        assert self.server.http.post(path).json()["state"] == "paused"
        return request_id

    def release(self, request_id: str) -> None:
        self.server.http.post(f"/v1/requests/{request_id}/resume").raise_for_status()

    def wait_for_saving(self, reason: str | None) -> None:
        """Returns once /health says why nothing is saved, or that something is."""

        def said(_: object) -> bool:
            saving = self.server.http.get("/health").json()["saving"]
            return (saving["stopped"], saving["reason"]) == (reason is not None, reason)

        self.server.wait_until(said)
        assert self.server.http.get("/ready").status_code == 200

    def wait_until_saved(self, count: int) -> None:
        """Returns once so many blocks were saved, in all."""
        wait_for(self.folder, events.BlockSaved, count)


@contextmanager
def serving(folder: Path) -> Iterator[Disk]:
    with running(folder, **GROUPS) as server, ThreadPoolExecutor(2) as pool:
        yield Disk(server, pool)


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> FaultyFiles:
    """What the servers of this test work with."""
    faulty = FaultyFiles()
    monkeypatch.setattr("scheduler.kvstore.default_files", lambda: faulty)
    return faulty


def check_a_failing_disk(
    disk: Disk, reason: str, fail: Callable[[], object], heal: Callable[[], object]
) -> None:
    """Serves, holds and releases while nothing can be saved, and saves again afterwards."""
    assert disk.served(disk.send("a", 2), 2) == 0
    disk.wait_until_saved(NUM_PROMPT // BLOCK_TOKENS)
    asked = disk.send("b")
    fail()
    request_id = disk.hold()
    disk.wait_for_saving(reason)
    assert files_with(disk.folder, ".tmp") == []
    [_] = recorded(disk.folder, events.KvDropped)
    disk.release(request_id)
    disk.served(asked)
    [stopped] = recorded(disk.folder, events.SavingStopped)
    assert stopped.reason == reason
    heal()
    disk.wait_for_saving(None)
    [_] = recorded(disk.folder, events.SavingResumed)
    num_saved = len(recorded(disk.folder, events.BlockSaved))
    disk.served(disk.send("c", 2), 2)
    disk.wait_until_saved(num_saved + NUM_PROMPT // BLOCK_TOKENS)
    assert disk.served(disk.send("c", 2), 2) == NUM_PROMPT // BLOCK_TOKENS * BLOCK_TOKENS


def files_with(folder: Path, ending: str) -> list[Path]:
    return [path for path in files_below(folder) if path.name.endswith(ending)]


@pytest.mark.parametrize(
    ("operation", "error", "reason"),
    [
        ("create", errno.EROFS, "io_error"),
        ("write", errno.ENOSPC, "disk_full"),
        ("flush", errno.EIO, "io_error"),
        ("rename", errno.ENOSPC, "disk_full"),
        ("flush_folder", errno.EIO, "io_error"),
    ],
)
def test_an_operation_that_fails_stops_saving_and_nothing_else(
    state_folder: Path, files: FaultyFiles, operation: str, error: int, reason: str
) -> None:
    with serving(state_folder) as disk:
        check_a_failing_disk(disk, reason, lambda: files.fail(operation, 0, error), files.heal)


@pytest.mark.parametrize("number", [1, 6, 12])
def test_what_cannot_be_read_is_computed_again(
    state_folder: Path, files: FaultyFiles, number: int
) -> None:
    """The first file of a restore, or one in its middle, once; the request gets to its end."""
    with serving(state_folder) as disk:
        asked = disk.send("a")
        request_id = disk.hold()
        [saved] = recorded(state_folder, events.ChainSaved)
        files.fail("read", number, errno.EIO)
        disk.release(request_id)
        disk.served(asked)
        [resumed] = recorded(state_folder, events.RequestResumed)
        bad = recorded(state_folder, events.ChainRestoreFailed)
        reasons = [event.reason for event in (*bad, *recorded(state_folder, events.BlockCorrupt))]
        assert reasons == ["io_error"]
        assert resumed.num_lost_tokens == saved.num_tokens - resumed.num_cached_tokens > 0
        assert disk.server.http.get("/ready").status_code == 200
        assert recorded(state_folder, events.SavingStopped) == []


def test_a_folder_that_vanishes_while_a_request_is_held(state_folder: Path) -> None:
    with serving(state_folder) as disk:
        asked = disk.send("a")
        request_id = disk.hold()
        shutil.rmtree(state_folder / "kv")
        disk.release(request_id)
        disk.served(asked)
        [resumed] = recorded(state_folder, events.RequestResumed)
        assert resumed.num_cached_tokens == 0
        num_saved = len(recorded(state_folder, events.BlockSaved))
        disk.served(disk.send("b", 2), 2)
        disk.wait_until_saved(num_saved + NUM_PROMPT // BLOCK_TOKENS)
        assert recorded(state_folder, events.SavingStopped) == []


@pytest.fixture
def own_disk(state_folder: Path) -> Iterator[Path]:
    """The folder of saved KV as a file system of its own."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux may mount a file system")
    folder = state_folder / "kv"
    folder.mkdir(parents=True)
    mount = ("mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", str(folder))
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        folder.rmdir()
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(("umount", "-l", str(folder)), check=True)


def test_a_disk_that_becomes_read_only(state_folder: Path, own_disk: Path) -> None:
    def remount(how: str) -> None:
        """Fails while a file is open for writing."""
        command = ("mount", "-o", f"remount,{how}", str(own_disk))
        while subprocess.run(command, capture_output=True, check=False).returncode:
            pass

    with serving(state_folder) as disk:
        check_a_failing_disk(disk, "io_error", lambda: remount("ro"), lambda: remount("rw"))
        remount("ro")
        disk.server.http.post("/v1/cache/clear").raise_for_status()
        disk.server.wait_until(lambda _: not disk.server.http.get("/v1/cache").json()["num_blocks"])
        assert files_below(state_folder) != [], "they could not be removed"
        remount("rw")
        disk.server.wait_until(lambda _: files_below(state_folder) == [])


def test_files_that_cannot_be_removed_are_removed_later(
    state_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = OsFiles.unlink
    is_broken: list[bool] = []

    def failing(files: OsFiles, path: Path) -> None:
        if is_broken:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        unlink(files, path)

    monkeypatch.setattr(OsFiles, "unlink", failing)
    with serving(state_folder) as disk:
        disk.served(disk.send("a", 2), 2)
        disk.wait_until_saved(NUM_PROMPT // BLOCK_TOKENS)
        is_broken.append(True)
        disk.server.http.post("/v1/cache/clear").raise_for_status()
        disk.server.wait_until(lambda _: not disk.server.http.get("/v1/cache").json()["num_blocks"])
        assert len(files_below(state_folder)) == NUM_PROMPT // BLOCK_TOKENS
        is_broken.clear()
        disk.server.wait_until(lambda _: files_below(state_folder) == [])
