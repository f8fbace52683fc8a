"""A real file system that fills up, where one may be mounted; the others use a quota."""

import queue
from pathlib import Path

from scheduler.kvcache.files import OsFiles
from scheduler.kvcache.store import BlockStore, Saved, SaveFailed
from scheduler.kvcache.writers import SavingResumed, SavingStopped, WriterResult, Writers
from tests.kvcache.pieces import block, files_below, piece

DISK_BYTES = 2**20
PIECE_BYTES = 100_000


def test_saving_stops_when_the_disk_is_full_and_returns_with_space(small_disk: Path) -> None:
    store = BlockStore(small_disk / "kv")
    results: queue.SimpleQueue[WriterResult] = queue.SimpleQueue()
    writers = Writers(
        store, results.put, capacity_bytes=2**20, num_threads=1, probe_interval_s=3600
    )

    def offer(number: int) -> WriterResult:
        assert writers.offer(block(number), piece(PIECE_BYTES))
        return results.get(timeout=20)

    outcomes = [offer(0)]
    while isinstance(outcomes[-1], Saved):
        outcomes.append(offer(len(outcomes)))
    failed, stopped = outcomes[-1], results.get(timeout=20)
    assert isinstance(failed, SaveFailed)
    assert failed.kind == "disk_full"
    assert isinstance(stopped, SavingStopped)
    num_saved = len(outcomes) - 1
    assert files_below(store.folder) == [block(number).path for number in range(num_saved)]
    assert all(isinstance(store.verify(block(number)), int) for number in range(num_saved))
    assert not writers.offer(block(num_saved), piece(PIECE_BYTES))

    assert store.remove(block(0)) is None
    writers.probe()
    assert isinstance(results.get(timeout=20), SavingResumed)
    assert isinstance(offer(num_saved), Saved)
    assert writers.close(limit_s=20) == []


class Blind(OsFiles):
    """Sees space where there is none."""

    def free_bytes(self, folder: Path) -> int:
        return max(2**40, super().free_bytes(folder))


def test_a_write_that_breaks_off_in_the_middle_leaves_nothing(small_disk: Path) -> None:
    """Without the look at free space beforehand, which another program can outdate."""
    store = BlockStore(small_disk / "kv", Blind())
    failed = store.save(block(0), piece(2 * DISK_BYTES))
    assert isinstance(failed, SaveFailed)
    assert failed.kind == "disk_full"
    assert files_below(store.folder) == []
    assert isinstance(store.save(block(0), piece(DISK_BYTES // 2)), Saved)
