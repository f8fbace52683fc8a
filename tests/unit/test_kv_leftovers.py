"""Files that a disk does not let go of: tried again, unless they are written anew."""

import errno
from pathlib import Path

import pytest

from scheduler.kvcache import leftovers
from scheduler.kvcache.leftovers import Leftovers
from scheduler.kvcache.store import BlockStore, Saved
from tests.kvcache.faults import FaultyFiles
from tests.kvcache.pieces import BLOCK, STATE, files_below, piece


@pytest.fixture
def files() -> FaultyFiles:
    """Nothing can be removed until it is healed."""
    faulty = FaultyFiles()
    faulty.fail("unlink", 0, errno.EROFS)
    return faulty


@pytest.fixture
def store(tmp_path: Path, files: FaultyFiles) -> BlockStore:
    """A block and a state are there."""
    store = BlockStore(tmp_path, files)
    for file in (BLOCK, STATE):
        assert isinstance(store.save(file, piece()), Saved)
    return store


def test_what_stays_is_removed_when_it_can_be(store: BlockStore, files: FaultyFiles) -> None:
    left = Leftovers(store)
    for file in (BLOCK, STATE):
        left.remove(file)
    assert (left.try_again(), len(left)) == (0, 2)
    files.heal()
    assert (left.try_again(), len(left)) == (2, 0)
    assert files_below(store.folder) == []


def test_what_is_removed_at_once_is_not_tried_again(store: BlockStore, files: FaultyFiles) -> None:
    files.heal()
    left = Leftovers(store)
    left.remove(BLOCK)
    assert len(left) == 0
    assert files_below(store.folder) == [STATE.path]


def test_a_file_that_is_written_anew_stays(store: BlockStore, files: FaultyFiles) -> None:
    left = Leftovers(store)
    for file in (BLOCK, STATE):
        left.remove(file)
    left.keep(BLOCK)
    files.heal()
    assert isinstance(store.save(BLOCK, piece(fill=9)), Saved)
    assert left.try_again() == 1
    assert files_below(store.folder) == [BLOCK.path]


def test_no_more_than_its_bound_is_remembered(
    store: BlockStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leftovers, "MAX_LEFTOVERS", 1)
    left = Leftovers(store)
    for file in (BLOCK, STATE):
        left.remove(file)
    assert len(left) == 1
