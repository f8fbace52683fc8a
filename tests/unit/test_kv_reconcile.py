"""What a start does with the files that it finds, and with those that it does not."""

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest

from scheduler.kvcache.reconcile import Batch, compare, sweep
from scheduler.kvcache.store import BlockStore, Saved
from tests.kvcache.faults import FaultyFiles
from tests.kvcache.pieces import STATE, TAIL, block, files_below, piece


def sizes(store: BlockStore, numbers: range) -> dict[str, int]:
    """Saves blocks; what a journal would know of them."""
    known: dict[str, int] = {}
    for number in numbers:
        saved = store.save(block(number), piece())
        assert isinstance(saved, Saved)
        known[block(number).path] = saved.file_bytes
    return known


def reconcile(store: BlockStore, known: dict[str, int], entries: int = 1000) -> Iterator[Batch]:
    """Both directions, as a start has them."""
    yield from compare(store, known, entries)
    store.begin_sweep()
    yield from sweep(store, known, entries)
    store.end_sweep()


def total(batches: list[Batch]) -> Batch:
    """All batches as one."""
    result = Batch()
    for batch in batches:
        result.num_kept += batch.num_kept
        result.kept_bytes += batch.kept_bytes
        result.num_temporary += batch.num_temporary
        result.num_swept += batch.num_swept
        result.swept_bytes += batch.swept_bytes
        result.vanished += batch.vanished
        result.resized += batch.resized
        result.stuck += batch.stuck
    return result


def test_nothing_known_and_nothing_there(tmp_path: Path) -> None:
    assert total(list(reconcile(BlockStore(tmp_path / "none"), {}))) == Batch()


def test_files_and_journal_agree(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    known = sizes(store, range(5))
    for file in (STATE, TAIL):
        saved = store.save(file, piece())
        assert isinstance(saved, Saved)
        known[file.path] = saved.file_bytes
    found = total(list(reconcile(store, known)))
    assert found == Batch(num_kept=7, kept_bytes=sum(known.values()))
    assert files_below(tmp_path) == sorted(known)


def test_what_no_event_knows_is_removed(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    known = sizes(store, range(2))
    unknown = sizes(store, range(2, 5))
    (tmp_path / "probe").write_bytes(b"12")
    temporary = store.path(block(0)).with_name("x.safetensors.0123456789abcdef-1.tmp")
    temporary.write_bytes(b"123")
    store.path(block(9)).symlink_to("/dev/null")
    found = total(list(reconcile(store, known)))
    assert (found.num_kept, found.num_temporary, found.num_swept) == (2, 1, 5)
    assert found.swept_bytes == sum(unknown.values()) + 2 + 3 + len("/dev/null")
    assert files_below(tmp_path) == sorted(known)


def test_what_the_disk_has_lost_is_named(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    known = sizes(store, range(4))
    store.remove(block(1))
    store.path(block(2)).write_bytes(b"")
    store.remove(block(3))
    store.path(block(3)).mkdir()
    known[block(3).path] = store.path(block(3)).stat().st_size
    found = total(list(reconcile(store, known)))
    assert found.vanished == [block(1).path]
    assert sorted(found.resized) == [block(2).path, block(3).path]
    assert found.num_swept == 0


@pytest.mark.parametrize("inner", ["strange", "abababab/00/strange", "abababab/strange", "ab"])
def test_a_strange_folder_is_left_alone(inner: str, tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    known = sizes(store, range(1))
    (tmp_path / inner).mkdir(parents=True)
    (tmp_path / inner / "file").write_bytes(b"1")
    found = total(list(reconcile(store, known)))
    assert [path for path, _ in found.stuck] == [inner]
    assert (tmp_path / inner / "file").exists()


def test_a_batch_is_bounded(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    known = sizes(store, range(10))
    lost = {f"lost-{number}": 1 for number in range(10)}
    sizes(store, range(10, 20))
    batches = list(reconcile(store, known | lost, entries=4))
    worked = [batch.num_kept + batch.num_swept + len(batch.vanished) for batch in batches]
    assert sum(worked) == 30
    assert max(worked) <= 4


def test_nothing_is_removed_before_it_is_asked_for(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    sizes(store, range(3))
    batches = reconcile(store, {}, entries=1)
    assert len(files_below(tmp_path)) == 3
    next(batches)
    assert len(files_below(tmp_path)) == 2


def test_what_cannot_be_removed_or_listed_is_said(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = BlockStore(tmp_path, files)
    sizes(store, range(1))
    files.fail("unlink", 0, errno.EIO)
    found = total(list(reconcile(store, {})))
    assert [path for path, _ in found.stuck] == [block(0).path]
    files.fail("list_folder", 2, errno.EACCES)
    found = total(list(reconcile(store, {block(0).path: 1})))
    assert [path for path, _ in found.stuck] == ["abababab"]
    assert found.resized == [block(0).path], "it was looked at by its name"
