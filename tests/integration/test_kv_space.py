"""Saved KV and the disk: a budget that holds, a disk that is full, blocks that nobody can use."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from journal import events
from scheduler.kvcache.files import OsFiles
from tests.integration.http_server import RunningServer
from tests.integration.kv_serving import (
    BLOCK_TOKENS,
    NUM_TOKENS,
    ask,
    expected,
    files_below,
    prompt,
    recorded,
    serving,
    wait_for,
    wait_for_blocks,
)

pytestmark = pytest.mark.engine

MODEL = "tiny-plain"
BLOCK_BYTES = BLOCK_TOKENS * 2048
NUM_BLOCKS = NUM_TOKENS // BLOCK_TOKENS
DISK_BYTES = 2**20


def used_bytes(folder: Path) -> int:
    """The bytes of all files below a folder. A file may go while this looks."""
    total = 0
    for path in (folder / "kv").rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue
    return total


def test_the_budget_holds_at_every_moment(
    state_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    flush = OsFiles.flush

    def measured(files: OsFiles, descriptor: int) -> None:
        flush(files, descriptor)
        seen.append(used_bytes(state_folder))

    monkeypatch.setattr(OsFiles, "flush", measured)
    max_bytes = 16 * BLOCK_BYTES
    settings = {"max_bytes": max_bytes, "memory_bytes": 0, "writing_bytes": 2 * BLOCK_BYTES}
    with serving(state_folder, MODEL, **settings) as server:
        for number in (1, 2, 3, 4, 1):
            assert ask(server, prompt(number), 40).content == expected(MODEL, number, max_tokens=40)
    assert 8 * BLOCK_BYTES < max(seen) <= max_bytes
    evicted = recorded(state_folder, events.BlocksEvicted)
    assert {event.reason for event in evicted} == {"budget"}
    assert sum(len(event.hashes) for event in evicted) > NUM_BLOCKS
    assert recorded(state_folder, events.SavingStopped) == []


def test_blocks_that_this_server_cannot_use_go_first(state_folder: Path) -> None:
    with serving(state_folder, MODEL, block_tokens=2 * BLOCK_TOKENS) as server:
        ask(server, prompt(1))
        wait_for_blocks(server, NUM_BLOCKS // 2)
        other = server.http.get("/v1/cache").json()["domain"]
    num_others = NUM_BLOCKS // 2
    max_bytes = (2 * NUM_BLOCKS + 6) * BLOCK_BYTES
    with serving(state_folder, MODEL, max_bytes=max_bytes, writing_bytes=DISK_BYTES) as server:
        for number in (1, 2, 3):
            ask(server, prompt(number))
            wait_for_cache(server, "writing_bytes", 0)
        ours = server.http.get("/v1/cache").json()["domain"]
        assert server.http.get("/v1/cache").json()["num_other_blocks"] == 0
    assert other != ours
    gone = [e.domain for e in recorded(state_folder, events.BlocksEvicted) for _ in e.hashes]
    assert gone[:num_others] == [other] * num_others
    assert set(gone[num_others:]) <= {ours}


def wait_for_cache(server: RunningServer, name: str, value: object) -> None:
    """Returns once /v1/cache says so."""
    while server.http.get("/v1/cache").json()[name] != value:
        pass


@pytest.fixture
def small_disk(state_folder: Path) -> Iterator[Path]:
    """The folder of saved KV, on a file system of 1 MiB."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux may mount a file system")
    folder = state_folder / "kv"
    folder.mkdir(parents=True)
    mount = ("mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder))
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        subprocess.run(("rmdir", str(folder)), check=True)
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(("umount", "-l", str(folder)), check=True)


def check_a_full_disk(server: RunningServer, folder: Path, fill: object, free: object) -> None:
    """Serves on a full disk, and saves again when there is space."""
    assert callable(fill)
    assert callable(free)
    ask(server, prompt(1))
    wait_for_blocks(server, NUM_BLOCKS)
    fill()
    assert ask(server, prompt(2)).content == expected(MODEL, 2)
    stopped, *_ = wait_for(folder, events.SavingStopped)
    assert stopped.reason == "disk_full"
    wait_for_saving(server, "disk_full")
    assert server.http.get("/ready").status_code == 200
    again = ask(server, prompt(1))
    assert again.content == expected(MODEL, 1)
    assert again.num_cached_tokens == NUM_BLOCKS * BLOCK_TOKENS
    num_saved = len(recorded(folder, events.BlockSaved))
    free()
    wait_for(folder, events.SavingResumed)
    wait_for_saving(server, None)
    assert ask(server, prompt(3)).content == expected(MODEL, 3)
    wait_for(folder, events.BlockSaved, num_saved + NUM_BLOCKS)
    assert ask(server, prompt(3)).num_cached_tokens == NUM_BLOCKS * BLOCK_TOKENS


def wait_for_saving(server: RunningServer, reason: str | None) -> None:
    """Returns once /health says that saving has stopped for this reason, or goes on."""
    while (saving := server.http.get("/health").json()["saving"])["reason"] != reason:
        pass
    assert saving["stopped"] == (reason is not None)


def test_a_full_file_system(state_folder: Path, small_disk: Path) -> None:
    ballast = small_disk / "ballast"

    def fill() -> None:
        with ballast.open("wb", buffering=0) as file:
            status = os.statvfs(small_disk)
            file.write(bytes(status.f_bavail * status.f_frsize - BLOCK_BYTES))

    with serving(state_folder, MODEL, memory_bytes=0, probe_s=1, measure_s=1) as server:
        check_a_full_disk(server, state_folder, fill, ballast.unlink)
    assert [path for path in files_below(state_folder) if path.suffix == ".tmp"] == []


def test_a_file_system_that_says_it_is_full(
    state_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same where nothing can be mounted."""
    free_bytes = OsFiles.free_bytes
    is_full: list[bool] = []
    monkeypatch.setattr(
        OsFiles, "free_bytes", lambda files, folder: 0 if is_full else free_bytes(files, folder)
    )
    with serving(state_folder, MODEL, memory_bytes=0, probe_s=1, measure_s=1) as server:
        check_a_full_disk(server, state_folder, lambda: is_full.append(True), is_full.clear)
