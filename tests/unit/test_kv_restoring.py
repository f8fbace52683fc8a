"""How a restore begins: the disk is read while the memory of the row is made ready."""

import os
import threading
from array import array
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from scheduler.engine.base import RestoreRow
from scheduler.kvcache import files
from scheduler.kvcache.codec import Filler
from scheduler.kvcache.fake_codec import FakeBlock, FakeFiller
from scheduler.kvcache.files import OsFiles
from scheduler.kvcache.naming import BlockFile, KeptFile
from scheduler.kvcache.readahead import Read, announce_nothing, examine_nothing
from scheduler.restoring import Restore

WAIT_S = 20
BLOCK_TOKENS = 4
COMMAND = RestoreRow(7, ("a" * 64, "b" * 64), 2 * BLOCK_TOKENS, ())


class Blocks:
    """A source of blocks that notes when it is first asked, and when its thread ends."""

    def __init__(self) -> None:
        self.asked = threading.Event()
        self.ended = threading.Event()

    def fetch(self, file: KeptFile) -> Read:
        self.asked.set()
        return Read(file, FakeBlock(array("I", range(BLOCK_TOKENS))), "ssd", 1, 16)

    def restore(self, make_filler: Callable[[], Filler]) -> Restore:
        return Restore(
            COMMAND,
            make_filler,
            fetch=self.fetch,
            used=lambda _: None,
            files=lambda name, _: BlockFile("d" * 64, name),
            domain="d" * 64,
            has_state=False,
            block_tokens=BLOCK_TOKENS,
            ready=lambda: None,
            end_thread=self.ended.set,
            announce=announce_nothing,
            examine=examine_nothing,
        )


def test_blocks_are_read_while_the_row_gets_its_memory() -> None:
    blocks, cache = Blocks(), SimpleNamespace(tokens=array("I"), state=None)

    def make_filler() -> Filler:
        assert blocks.asked.wait(WAIT_S), "nothing is read before there is a filler"
        return FakeFiller([cache])

    restore = blocks.restore(make_filler)
    while (result := restore.advance(wait=True)) is None:
        pass
    assert result.num_tokens == 2 * BLOCK_TOKENS
    assert cache.tokens == array("I", [*range(BLOCK_TOKENS)] * 2)


def test_a_row_that_gets_no_memory_leaves_no_reader() -> None:
    blocks = Blocks()

    def make_filler() -> Filler:
        raise MemoryError("[malloc] Unable to allocate")

    with pytest.raises(MemoryError):
        blocks.restore(make_filler)
    assert blocks.ended.is_set()


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system has no such call")
@pytest.mark.parametrize("num_bytes", [0, 1, 4096, 10_000])
def test_all_of_a_file_is_announced_in_small_pieces(
    num_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a larger piece Linux would begin to read its start only."""
    calls: list[tuple[int, int]] = []

    def note(_: int, start: int, length: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_WILLNEED
        calls.append((start, length))

    monkeypatch.setattr(files, "ANNOUNCED_AT_ONCE_BYTES", 4096)
    monkeypatch.setattr(os, "posix_fadvise", note)
    path = tmp_path / "block"
    path.write_bytes(bytes(num_bytes))
    descriptor = OsFiles().open(path)
    OsFiles().read_soon(descriptor)
    OsFiles().close(descriptor)
    assert calls == [(start, 4096) for start in range(0, num_bytes, 4096)]
