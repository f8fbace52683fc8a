"""Power cuts that follow the death of a process or another thread's work: a folder, or the key,
that is there is not durable for that.
"""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest

from journal.files import make_durable_folder
from scheduler.kvcache.naming import load_key
from scheduler.kvcache.powerloss import Disk, RecordingFiles, State, disks_of
from scheduler.kvcache.store import BlockStore, Saved
from tests.kvcache.faults import Crashed
from tests.kvcache.pieces import block, piece

WAIT_S = 20
NUM_OPERATIONS = 16
"""From an empty folder to a saved block."""


class MortalFiles(RecordingFiles):
    """Files of a process that ends before its operation of this number, until another begins."""

    def __init__(self, root: Path, last: int) -> None:
        super().__init__(root)
        self.left = last

    def live(self) -> None:
        self.left -= 1
        if self.left < 0:
            raise Crashed

    def create(self, path: Path) -> int:
        self.live()
        return super().create(path)

    def write(self, descriptor: int, buffers: Sequence[memoryview]) -> int:
        self.live()
        return super().write(descriptor, buffers)

    def flush(self, descriptor: int) -> None:
        self.live()
        super().flush(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        self.live()
        super().rename(old, new)

    def flush_folder(self, folder: Path) -> None:
        self.live()
        super().flush_folder(folder)


def end_of(files: RecordingFiles) -> Disk:
    """The disk after all operations."""
    *_, (_, disk) = disks_of(files.history)
    return disk


def states_of(files: RecordingFiles) -> list[State]:
    return list(end_of(files).all_states())


def save_first(files: RecordingFiles) -> None:
    """The first block of an installation."""
    load_key(files.root / "key", files)
    BlockStore(files.root / "kv", files).save(block(0), piece(600))


@pytest.mark.parametrize("last", range(NUM_OPERATIONS))
def test_what_is_saved_after_a_death_is_durable(tmp_path: Path, last: int) -> None:
    files = MortalFiles(tmp_path, last)
    with pytest.raises(Crashed):
        save_first(files)
    files.left = NUM_OPERATIONS
    secret = load_key(tmp_path / "key", files).secret
    store = BlockStore(tmp_path / "kv", files)
    assert isinstance(store.save(block(0), piece(600)), Saved)
    whole = store.path(block(0)).read_bytes()
    for state in states_of(files):
        assert state["key"] == secret
        assert state[f"kv/{block(0).path}"] == whole


def test_a_process_that_lives_needs_all_of_these_operations(tmp_path: Path) -> None:
    """So the test above ends a process before each of them."""
    files = MortalFiles(tmp_path, NUM_OPERATIONS)
    save_first(files)
    assert files.left == 0


class HeldFolder(RecordingFiles):
    """The first thread that makes a folder is held back before it can be durable."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.made = threading.Event()
        self.may_flush = threading.Event()

    def flush_folder(self, folder: Path) -> None:
        if not self.made.is_set() and any(path.is_dir() for path in folder.iterdir()):
            self.made.set()
            assert self.may_flush.wait(WAIT_S)
        super().flush_folder(folder)


def test_a_folder_that_another_thread_is_making_is_durable_with_a_file_in_it(
    tmp_path: Path,
) -> None:
    files = HeldFolder(tmp_path)
    store = BlockStore(tmp_path / "kv", files)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(store.save, block(0), piece(600))
        assert files.made.wait(WAIT_S)
        with mock.patch.object(files, "made", threading.Event()) as made:
            made.set()
            assert isinstance(store.save(block(0), piece(600)), Saved)
        states = states_of(files)
        files.may_flush.set()
        assert isinstance(first.result(WAIT_S), Saved)
    assert all(f"kv/{block(0).path}" in state for state in states)


def test_a_key_is_never_torn(tmp_path: Path) -> None:
    files = RecordingFiles(tmp_path)
    secret = load_key(tmp_path / "key", files).secret
    keys = [state.get("key") for _, disk in disks_of(files.history) for state in disk.all_states()]
    assert {*keys} == {None, secret}


def test_a_new_state_folder_is_durable_in_those_above_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr("journal.files.flush", flushed.append)
    make_durable_folder(tmp_path / "a" / "b")
    assert flushed == [tmp_path, tmp_path / "a"]
    make_durable_folder(tmp_path / "a" / "b")
    assert len(flushed) == 2, "what is there is left as it is"
