"""Reading: checked before use, one block ahead, and never more than two in memory."""

import errno
import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from scheduler.kvcache import readahead
from scheduler.kvcache.arrays import CODES, Block, settle, tensors
from scheduler.kvcache.filling import RowFiller
from scheduler.kvcache.layout import Layout, layout_of
from scheduler.kvcache.naming import KeptFile
from scheduler.kvcache.readahead import Read, ReadAhead
from scheduler.kvcache.reading import read
from scheduler.kvcache.store import BlockStore, ReadFailed, Saved
from scheduler.kvcache.writers import WriterResult, Writers
from tests.kvcache.faults import FaultyFiles
from tests.kvcache.models import CASES
from tests.kvcache.rows import block_content, block_file, fed_row, make_store, save

pytestmark = pytest.mark.engine


def made(fill: int, size: int = 64) -> Block:
    values = mx.arange(fill, fill + size)
    return settle({"0.keys": values.astype(mx.bfloat16), "0.codes": values.astype(mx.uint32)})


def saved_store(folder: Path, count: int) -> BlockStore:
    store = make_store(folder)
    for number in range(count):
        save(store, block_file(number), made(number))
    return store


def content(result: Read | ReadFailed | None) -> dict[str, bytes]:
    assert isinstance(result, Read), result
    return block_content(result.block)


@pytest.mark.parametrize("dtype", CODES)
def test_every_number_format_comes_back(dtype: mx.Dtype, tmp_path: Path) -> None:
    store = make_store(tmp_path)
    block = settle({"a": mx.arange(6).reshape(2, 3).astype(dtype), "b": mx.zeros((1, 0), dtype)})
    save(store, block_file(0), block)
    found = read(store, block_file(0))
    assert isinstance(found, Read)
    assert content(found) == block_content(block)
    assert {name: (array.shape, array.dtype) for name, array in found.block.items()} == {
        "a": ((2, 3), dtype),
        "b": ((1, 0), dtype),
    }


def test_mlx_reads_the_files_as_they_are(tmp_path: Path) -> None:
    store = saved_store(tmp_path, 1)
    loaded: Any = mx.load(str(store.path(block_file(0))), return_metadata=True)
    arrays, metadata = loaded
    assert metadata["name"] == block_file(0).name
    assert block_content(settle(arrays)) == block_content(made(0))


def test_a_file_without_arrays_is_an_empty_block(tmp_path: Path) -> None:
    """The blocks of a model that has nothing but state layers."""
    store = make_store(tmp_path)
    save(store, block_file(0), {})
    assert content(read(store, block_file(0))) == {}


@pytest.mark.parametrize("offset", [0, 9, 60, 300, -300, -1])
def test_a_changed_bit_is_corrupt(offset: int, tmp_path: Path) -> None:
    store = saved_store(tmp_path, 1)
    path = store.path(block_file(0))
    damaged = bytearray(path.read_bytes())
    damaged[offset] ^= 1
    path.write_bytes(damaged)
    failed = read(store, block_file(0))
    assert isinstance(failed, ReadFailed)
    assert failed.kind == "corrupt"


def test_the_bytes_that_are_checked_are_those_that_are_used(tmp_path: Path) -> None:
    """Memory that differs from the file is noticed, whatever the file says by then."""
    store = saved_store(tmp_path, 1)
    failed = read(store, block_file(0), load=lambda _: made(1))
    assert isinstance(failed, ReadFailed)
    assert failed.kind == "corrupt"


def test_a_reading_error_is_no_damage(tmp_path: Path) -> None:
    store = saved_store(tmp_path, 1)

    def broken(_: str) -> Block:
        raise RuntimeError("[read] Unable to read from file")

    failed = read(store, block_file(0), load=broken)
    assert isinstance(failed, ReadFailed)
    assert (failed.kind, failed.detail) == ("io_error", "[read] Unable to read from file")


class Fetched:
    """Reads from a store and notes what was asked for."""

    def __init__(self, store: BlockStore) -> None:
        self.files: list[KeptFile] = []
        self.announced: list[KeptFile] = []
        self._store = store
        self.ready = threading.Semaphore(0)
        self.unreadable: KeptFile | None = None

    def __call__(self, file: KeptFile) -> Read | ReadFailed:
        self.files.append(file)
        return read(self._store, file)

    def announce(self, file: KeptFile) -> int:
        self.announced.append(file)
        return self._store.read_soon(file)

    def examine(self, file: KeptFile) -> ReadFailed | None:
        if file == self.unreadable:
            return ReadFailed(file, "io_error", "the disk fails")
        return self._store.glance(file)

    def start(self, count: int, num_others: int = 0) -> ReadAhead:
        files = [block_file(n) for n in range(count + num_others)]
        return ReadAhead(
            self,
            files[:count],
            self.ready.release,
            mx.clear_streams,
            announce=self.announce,
            examine=self.examine,
            others=files[count:],
        )


def test_blocks_come_in_order_and_one_ahead(tmp_path: Path) -> None:
    fetched = Fetched(saved_store(tmp_path, 4))
    ahead = fetched.start(4)
    for number in range(4):
        assert fetched.ready.acquire(timeout=20)
        # The one that waits to be taken is the last that was asked for.
        assert fetched.files == [block_file(n) for n in range(number + 1)]
        assert content(ahead.take(wait=False)) == block_content(made(number))
    ahead.close()
    assert ahead.take(wait=False) is None


def test_nothing_to_take_yet_is_nothing(tmp_path: Path) -> None:
    gate = threading.Event()
    store = saved_store(tmp_path, 1)

    def slow(file: KeptFile) -> Read | ReadFailed:
        gate.wait()
        return read(store, file)

    ahead = ReadAhead(slow, [block_file(0)], lambda: None, mx.clear_streams)
    assert ahead.take(wait=False) is None
    gate.set()
    assert content(ahead.take(wait=True)) == block_content(made(0))
    ahead.close()


def test_files_are_announced_in_order_within_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = saved_store(tmp_path, 8)
    file_bytes = store.path(block_file(0)).stat().st_size
    monkeypatch.setattr(readahead, "ANNOUNCED_BYTES", 3 * file_bytes)
    fetched = Fetched(store)
    ahead = fetched.start(8)
    for number in range(8):
        assert content(ahead.take(wait=True))
        # When this one was fetched, it and two more were announced; two fetches may follow it.
        assert min(8, number + 3) <= len(fetched.announced) <= number + 5
    ahead.close()
    assert fetched.announced == [block_file(n) for n in range(8)]


def test_a_file_that_cannot_be_announced_is_still_read(tmp_path: Path) -> None:
    files = FaultyFiles()
    store = BlockStore(tmp_path, files)
    save(store, block_file(0), made(0))
    assert store.read_soon(block_file(0)) == store.path(block_file(0)).stat().st_size
    assert store.read_soon(block_file(1)) == 0
    files.fail("open", 1, errno.EIO)
    assert store.read_soon(block_file(0)) == 0
    assert content(read(store, block_file(0))) == block_content(made(0))


def test_a_chain_ends_at_the_first_block_that_fails(tmp_path: Path) -> None:
    store = saved_store(tmp_path, 3)
    store.path(block_file(1)).write_bytes(b"")
    fetched = Fetched(store)
    ahead = fetched.start(3)
    assert content(ahead.take(wait=True))
    failed = ahead.take(wait=True)
    assert isinstance(failed, ReadFailed)
    assert (failed.file, failed.kind) == (block_file(1), "corrupt")
    ahead._thread.join(timeout=20)
    assert fetched.files == [block_file(0), block_file(1)]
    assert ahead.take(wait=False) is None
    assert ahead.also_bad == []


@pytest.mark.parametrize("can_be_read", [True, False])
def test_what_else_is_bad_is_known_when_the_first_failure_is(
    tmp_path: Path, can_be_read: bool
) -> None:
    store = saved_store(tmp_path, 7)
    for number in (1, 2, 6):
        store.path(block_file(number)).unlink()
    store.path(block_file(4)).write_bytes(b"")
    fetched = Fetched(store)
    fetched.unreadable = None if can_be_read else block_file(3)
    ahead = fetched.start(5, num_others=2)
    assert content(ahead.take(wait=True))
    assert isinstance(ahead.take(wait=True), ReadFailed)
    found = [(failed.file, failed.kind) for failed in ahead.also_bad]
    missing = [(block_file(2), "missing")]
    after = [(block_file(4), "corrupt"), (block_file(6), "missing")]
    assert found == (missing + after if can_be_read else missing)


def test_a_reader_can_be_ended_at_any_time(tmp_path: Path) -> None:
    fetched = Fetched(saved_store(tmp_path, 3))
    ahead = fetched.start(3)
    assert fetched.ready.acquire(timeout=20)
    ahead.close()
    assert len(fetched.files) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_defect_in_reading_does_not_make_anybody_wait(tmp_path: Path) -> None:
    def broken(_: KeptFile) -> Read | ReadFailed:
        raise AssertionError("a defect")

    ahead = ReadAhead(broken, [block_file(0)], lambda: None, mx.clear_streams)
    failed = ahead.take(wait=True)
    assert isinstance(failed, ReadFailed)
    assert failed.kind == "io_error"
    ahead.close()


ROW_TOKENS = 4096
LONG_BLOCK = 512


def long_row() -> tuple[Layout, list[Block]]:
    """A layout, and the blocks of one row of it: 2 MiB in all."""
    case = CASES["KVCache"]
    layout = layout_of(fed_row(case, 1, 0), 1)
    key = mx.random.key(1)
    blocks = [
        settle(
            {
                spec.name: mx.random.normal(spec.shape_of(LONG_BLOCK), key=mx.random.split(key)[0])
                for layer in layout.layers
                for spec in layer.specs
            }
        )
        for _ in range(ROW_TOKENS // LONG_BLOCK)
    ]
    return layout, blocks


def test_a_restore_needs_the_row_and_two_blocks(tmp_path: Path) -> None:
    store = make_store(tmp_path)
    layout, blocks = long_row()
    for number in range(len(blocks)):
        save(store, block_file(number), blocks[number])
    count = len(blocks)
    blocks.clear()

    caches = CASES["KVCache"].make_caches()
    row_bytes, block_bytes = (n * layout.bytes_per_token for n in (ROW_TOKENS, LONG_BLOCK))
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    ahead = Fetched(store).start(count)
    filler = RowFiller(layout, caches, ROW_TOKENS)
    for _ in range(count):
        result = ahead.take(wait=True)
        assert isinstance(result, Read)
        filler.fill(result.block, LONG_BLOCK)
        del result
    filler.finish(ROW_TOKENS)
    ahead.close()
    peak_bytes = mx.get_peak_memory() - before
    assert row_bytes <= peak_bytes <= row_bytes + 2 * block_bytes
    assert mx.get_active_memory() - before <= row_bytes + 2**14


def test_memory_stays_bounded_while_writers_are_held_back(tmp_path: Path) -> None:
    """Blocks that find no room are let go: they can be cut again from the row."""
    files = FaultyFiles()
    files.may_write.clear()
    done = threading.Semaphore(0)
    results: list[WriterResult] = []

    def deliver(result: WriterResult) -> None:
        results.append(result)
        done.release()

    layout, blocks = long_row()
    block_bytes = LONG_BLOCK * layout.bytes_per_token
    writers = Writers(
        BlockStore(tmp_path, files),
        deliver,
        capacity_bytes=3 * block_bytes,
        num_threads=1,
        probe_interval_s=3600,
    )
    before = mx.get_active_memory()
    taken = 0
    for number in range(40):
        copy = settle({name: array + 0 for name, array in blocks[number % len(blocks)].items()})
        taken += writers.offer(block_file(number), tensors(copy))
        del copy
    assert taken == 3
    assert mx.get_active_memory() - before == writers.held_bytes == 3 * block_bytes
    files.may_write.set()
    assert all(done.acquire(timeout=20) for _ in range(taken))
    assert [type(result) for result in results] == [Saved] * 3
    assert mx.get_active_memory() - before == writers.held_bytes == 0
    assert writers.close(3600) == []


def test_an_error_of_the_disk_while_the_header_is_read(tmp_path: Path) -> None:
    saved_store(tmp_path, 1)
    files = FaultyFiles()
    files.fail("read", 1, errno.EIO)
    failed = read(BlockStore(tmp_path / "kv", files), block_file(0))
    assert isinstance(failed, ReadFailed)
    assert failed.kind == "io_error"
