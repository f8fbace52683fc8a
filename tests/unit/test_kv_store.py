"""The block store on a disk that fails in every way that it can."""

import errno
from collections.abc import Callable
from pathlib import Path

import pytest

from scheduler.kvcache.naming import KeptFile
from scheduler.kvcache.store import BlockStore, ReadFailed, Saved, SaveFailed
from tests.kvcache.faults import Crashed, FaultyFiles
from tests.kvcache.pieces import BLOCK, DOMAIN, STATE, TAIL, block, files_below, piece

ORDER = ["create", "write", "flush", "close", "rename", "flush_folder"]


def saved_store(folder: Path, file: KeptFile = BLOCK) -> BlockStore:
    store = BlockStore(folder, FaultyFiles())
    assert isinstance(store.save(file, piece()), Saved)
    return store


def faults(store: BlockStore) -> FaultyFiles:
    assert isinstance(store.files, FaultyFiles)
    return store.files


@pytest.mark.parametrize("file", [BLOCK, STATE, TAIL])
def test_a_saved_file_is_whole_and_private(file: KeptFile, tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    saved = store.save(file, piece())
    assert isinstance(saved, Saved)
    path = store.path(file)
    assert files_below(tmp_path) == [file.path]
    assert store.verify(file) == saved.file_bytes == path.stat().st_size
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700


def test_the_order_of_a_save(tmp_path: Path) -> None:
    """Bytes are durable before they get their name, and the name before the save is said."""
    store = saved_store(tmp_path)
    faults(store).calls.clear()
    assert isinstance(store.save(BLOCK, piece(fill=9)), Saved)
    assert faults(store).calls == ["free_bytes", *ORDER]


def test_a_new_folder_is_durable_before_its_file_is(tmp_path: Path) -> None:
    store = saved_store(tmp_path / "state" / "kv")
    # One for the state folder, two each for the store's three, and one for the file's name.
    assert faults(store).calls.count("flush_folder") == 8
    assert faults(store).calls[-6:] == ORDER


def test_short_writes_are_continued(tmp_path: Path) -> None:
    store = BlockStore(tmp_path, FaultyFiles(most_at_once=5))
    assert isinstance(store.save(BLOCK, piece(1000)), Saved)
    assert isinstance(store.verify(BLOCK), int)


@pytest.mark.parametrize("operation", ORDER)
@pytest.mark.parametrize(("error", "kind"), [(errno.ENOSPC, "disk_full"), (errno.EIO, "io_error")])
def test_a_failed_save_leaves_nothing(
    operation: str, error: int, kind: str, tmp_path: Path
) -> None:
    store = saved_store(tmp_path, block(0))
    faults(store).fail(operation, 0, error)
    failed = store.save(block(256), piece())
    assert isinstance(failed, SaveFailed)
    assert failed.kind == kind
    faults(store).heal()
    assert files_below(tmp_path) == [block(0).path]


def test_a_failed_flush_is_not_tried_again(tmp_path: Path) -> None:
    store = saved_store(tmp_path)
    faults(store).fail("flush", 1, errno.EIO)
    faults(store).calls.clear()
    assert isinstance(store.save(BLOCK, piece()), SaveFailed)
    assert faults(store).calls.count("flush") == 1


@pytest.mark.parametrize("number", range(1, 10))
def test_a_crash_leaves_a_file_whole_or_absent(number: int, tmp_path: Path) -> None:
    saved_store(tmp_path, block(0))
    store = BlockStore(tmp_path, FaultyFiles(crash_after=number, most_at_once=200))
    with pytest.raises(Crashed):
        store.save(block(256), piece(300))
    after = BlockStore(tmp_path)
    found = after.verify(block(256))
    left = [path for path in files_below(tmp_path) if path != block(0).path]
    if isinstance(found, int):
        assert left == [block(256).path]
    else:
        assert found.kind == "missing"
        assert all(path.endswith(".tmp") for path in left)
    assert isinstance(after.verify(block(0)), int)
    assert isinstance(after.save(block(256), piece(300)), Saved)


def test_the_reserve_stays_free(tmp_path: Path) -> None:
    files = FaultyFiles(quota_bytes=11_000)
    store = BlockStore(tmp_path, files, reserve_bytes=5_000)
    results = [store.save(block(number), piece(2000)) for number in range(3)]
    assert [type(result) for result in results] == [Saved, Saved, SaveFailed]
    assert isinstance(results[2], SaveFailed)
    assert results[2].kind == "disk_full"
    assert "5000 stay free" in results[2].detail
    assert store.free_bytes() >= 5_000


def test_a_disk_that_fills_up_and_gets_space_again(tmp_path: Path) -> None:
    files = FaultyFiles(quota_bytes=6_000)
    store = BlockStore(tmp_path, files)
    results = [store.save(block(number), piece(2000)) for number in range(4)]
    kinds = [result.kind for result in results if isinstance(result, SaveFailed)]
    assert kinds == ["disk_full"] * len(kinds)
    assert 0 < len(kinds) < 4
    assert store.probe(2000) is not None
    assert store.remove(block(0)) is None
    assert store.probe(2000) is None
    assert isinstance(store.save(block(9), piece(2000)), Saved)
    assert len(files_below(tmp_path)) == 4 - len(kinds)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def flip(offset: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        content = bytearray(path.read_bytes())
        content[offset] ^= 4
        path.write_bytes(content)

    return damage


def another_block(path: Path) -> None:
    other = BlockStore(path.parents[2])
    assert isinstance(other.save(block(0), piece(fill=1)), Saved)
    other.path(block(0)).rename(path)


def another_domain(path: Path) -> None:
    """The same eight digits, and a different domain behind them."""
    file = type(BLOCK)(DOMAIN[:8] + "0" * 56, BLOCK.hash)
    assert isinstance(BlockStore(path.parents[2]).save(file, piece()), Saved)


def folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link(path: Path) -> None:
    moved = path.with_suffix(".moved")
    path.rename(moved)
    path.symlink_to(moved)


def lengthen(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"1")


def empty(path: Path) -> None:
    path.write_bytes(b"")


DAMAGES: dict[str, Callable[[Path], None]] = {
    "truncated": truncate,
    "truncated to nothing": empty,
    "a byte too many": lengthen,
    "a bit of the length": flip(1),
    "a bit of the metadata": flip(20),
    "a bit of the checksum": flip(50),
    "a bit of the header's end": flip(300),
    "a bit of the data": flip(-2),
    "another block's file": another_block,
    "another domain's file": another_domain,
    "a folder": folder,
    "a link": link,
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_file_is_corrupt(name: str, tmp_path: Path) -> None:
    store = saved_store(tmp_path)
    DAMAGES[name](store.path(BLOCK))
    failed = store.verify(BLOCK)
    assert isinstance(failed, ReadFailed)
    assert failed.kind == "corrupt"
    assert failed.detail
    assert store.remove(BLOCK) is None
    assert isinstance(store.save(BLOCK, piece()), Saved)
    assert isinstance(store.verify(BLOCK), int)


@pytest.mark.parametrize(
    ("operation", "error", "kind"),
    [
        ("open", errno.EACCES, "corrupt"),
        ("open", errno.EIO, "io_error"),
        ("open", errno.EMFILE, "io_error"),
        ("read", errno.EIO, "io_error"),
    ],
)
def test_a_file_that_cannot_be_read(operation: str, error: int, kind: str, tmp_path: Path) -> None:
    store = saved_store(tmp_path)
    faults(store).fail(operation, 0, error)
    failed = store.verify(BLOCK)
    assert isinstance(failed, ReadFailed)
    assert failed.kind == kind
    faults(store).heal()
    assert isinstance(store.verify(BLOCK), int)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    failed = BlockStore(tmp_path / "none").verify(BLOCK)
    assert isinstance(failed, ReadFailed)
    assert failed.kind == "missing"


def test_what_is_not_there_is_removed_already(tmp_path: Path) -> None:
    store = saved_store(tmp_path)
    assert store.remove(BLOCK) is None
    assert store.remove(BLOCK) is None
    assert files_below(tmp_path) == []


def test_a_folder_with_content_is_nobody_s_to_remove(tmp_path: Path) -> None:
    store = BlockStore(tmp_path)
    (store.path(BLOCK) / "inner").mkdir(parents=True)
    assert isinstance(store.remove(BLOCK), OSError)
    failed = store.save(BLOCK, piece())
    assert isinstance(failed, SaveFailed)
    assert failed.kind == "obstructed"
    assert (store.path(BLOCK) / "inner").is_dir()


@pytest.mark.parametrize("depth", [0, 1])
def test_a_file_in_place_of_a_folder_is_in_the_way_of_its_blocks_only(
    depth: int, tmp_path: Path
) -> None:
    store = BlockStore(tmp_path / "kv")
    obstacle = store.path(BLOCK).parents[depth]
    obstacle.parent.mkdir(parents=True)
    obstacle.write_bytes(b"")
    failed = store.save(BLOCK, piece())
    assert isinstance(failed, SaveFailed)
    assert failed.kind == "obstructed"
    assert store.probe(10) is None
    other = type(BLOCK)("0" * 64, BLOCK.hash)
    assert isinstance(store.save(other, piece()), Saved)


def test_a_file_in_place_of_the_store_s_own_folder_is_in_the_way_of_all(tmp_path: Path) -> None:
    store = BlockStore(tmp_path / "kv")
    store.folder.write_bytes(b"")
    failed = store.save(BLOCK, piece())
    assert isinstance(failed, SaveFailed)
    assert failed.kind == "io_error"
    assert store.probe(10) is not None
    with pytest.raises(NotADirectoryError):
        store.free_bytes()
