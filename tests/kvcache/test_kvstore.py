"""The engine's port to saved KV, with the real codec: rows go to disk and come back to the bit."""

import errno
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from journal import events
from journal.events import Fact, PlannedBlock
from scheduler.effects import RemoveFiles
from scheduler.engine.base import BadFile, RestoreRow, RowRestored
from scheduler.kvcache.layout import Layout
from scheduler.kvcache.mlx_codec import MlxCodec
from scheduler.kvstore import KvStore, file_of
from scheduler.settings import KvSettings
from tests.kvcache.faults import FaultyFiles
from tests.kvcache.models import CASES, Case
from tests.kvcache.rows import fed_row, logprobs, numbers, whole_row, zero_position

pytestmark = pytest.mark.engine

BLOCK_TOKENS = 16
NUM_BLOCKS = 6
POSITION = NUM_BLOCKS * BLOCK_TOKENS
STATES = (2, 4, 6)
NAMES = tuple(f"{index + 1:02x}" * 32 for index in range(NUM_BLOCKS))
PLAIN, HYBRID = CASES["KVCache"], CASES["ArraysCache and KVCache"]
WINDOWS = CASES["RotatingKVCache and KVCache"]
WAIT_S = 20


class Port:
    """A store in a folder, for rows of one model. `facts` is what it has reported."""

    def __init__(self, folder: Path, case: Case, **settings: Any) -> None:
        self.case = case
        self.facts: list[Fact] = []
        self.reported = threading.Condition()
        self.codec = MlxCodec()
        self.kv = KvStore(
            folder,
            KvSettings(**{"reserve_bytes": 0, "memory_bytes": 0, **settings}),
            self.codec,
            block_tokens=BLOCK_TOKENS,
            fingerprint="f0" * 32,
            deliver=self.deliver,
        )
        self.kv.compared.set()
        self.kv.describe(fed_row(case, 3, 0), 3)
        self.stateful = bool(self.codec.layout.state_layers)

    def deliver(self, fact: Fact) -> None:
        with self.reported:
            self.facts.append(fact)
            self.reported.notify_all()

    def wait_for(self, kind: type[Fact], count: int) -> list[Any]:
        """The facts of a kind, once there are so many."""

        def found() -> list[Fact]:
            return [fact for fact in self.facts if isinstance(fact, kind)]

        with self.reported:
            assert self.reported.wait_for(lambda: len(found()) >= count, WAIT_S), self.facts
            return found()

    def save_row(self) -> list[Any]:
        """A row that was fed block by block and saved on the way; each block is on disk."""
        row = self.case.make_caches()
        num_files = 0
        for index in range(NUM_BLOCKS):
            start = index * BLOCK_TOKENS
            self.case.feed(row, numbers(start, start + BLOCK_TOKENS))
            parts = [plan(index)]
            if self.stateful and index + 1 in STATES:
                parts.append(PlannedBlock(index=index, hash=NAMES[index], part="state"))
            self.kv.save(row, parts)
            num_files += len(parts)
            self.wait_for(events.BlockSaved, num_files)
        return row

    def path(self, index: int, *, is_state: bool = False) -> Path:
        """The file of a block, or of the state at its end."""
        return self.kv.store.path(file_of(self.kv.domain, NAMES[index], is_state=is_state))

    def restore(self, num_tokens: int = POSITION) -> tuple[list[Any], RowRestored]:
        """Fills a new row; returns it with the result."""
        caches = self.case.make_caches()
        states = STATES if self.stateful else ()
        command = RestoreRow(7, NAMES[: -(-num_tokens // BLOCK_TOKENS)], num_tokens, states)
        restoring = self.kv.restore(caches, command, num_tokens + 10, lambda: None)
        while (result := restoring.advance(wait=True)) is None:
            pass
        return caches, result

    def content(self, row: list[Any], position: int) -> dict[str, bytes]:
        return whole_row(self.codec.layout, row, position)


def plan(index: int) -> PlannedBlock:
    return PlannedBlock(index=index, hash=NAMES[index], part="block")


@pytest.fixture
def make_port(tmp_path: Path) -> Iterator[Callable[..., Port]]:
    """Ports on one folder, closed at the end."""
    ports: list[Port] = []

    def make(case: Case, **settings: Any) -> Port:
        ports.append(Port(tmp_path, case, **settings))
        return ports[-1]

    yield make
    for port in ports:
        port.kv.close(WAIT_S)


def check_goes_on(port: Port, position: int, restored: list[Any]) -> None:
    """The restored row is the one that was never away, and stays it."""
    original = fed_row(port.case, position, 0)
    assert port.content(restored, position) == port.content(original, position)
    for chunk in (numbers(5, 6), numbers(6, 25)):
        assert logprobs(port.case.feed(restored, chunk)) == logprobs(
            port.case.feed(original, chunk)
        )


@pytest.mark.parametrize("memory_bytes", [0, 2**24])
@pytest.mark.parametrize("case", [PLAIN, HYBRID, WINDOWS])
def test_a_row_comes_back_to_the_bit(
    make_port: Callable[..., Port], case: Case, memory_bytes: int
) -> None:
    port = make_port(case, memory_bytes=memory_bytes)
    row = port.save_row()
    restored, result = port.restore()
    assert port.content(restored, POSITION) == port.content(row, POSITION)
    check_goes_on(port, POSITION, restored)
    assert (result.number, result.num_tokens, result.bad) == (7, POSITION, ())
    in_memory, on_disk = (POSITION, 0) if memory_bytes else (0, POSITION)
    assert (result.num_memory_tokens, result.num_disk_tokens) == (in_memory, on_disk)
    assert (result.read_bytes > 0) == (memory_bytes == 0)


def test_the_last_block_is_trimmed(make_port: Callable[..., Port]) -> None:
    port = make_port(PLAIN)
    port.save_row()
    restored, result = port.restore(POSITION - 1)
    assert (result.num_tokens, result.num_disk_tokens) == (POSITION - 1, POSITION - 1)
    check_goes_on(port, POSITION - 1, restored)


@pytest.mark.parametrize("case", [PLAIN, HYBRID])
def test_a_zeroed_position_would_be_noticed(
    make_port: Callable[..., Port], case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = Layout.cut_block

    def defective(layout: Layout, caches: list[Any], start: int, length: int) -> Any:
        block = zero_position(cut(layout, caches, start, length))
        mx.eval(block)
        return block

    monkeypatch.setattr(Layout, "cut_block", defective)
    port = make_port(case)
    port.save_row()
    restored, _ = port.restore()
    with pytest.raises(AssertionError):
        check_goes_on(port, POSITION, restored)


def truncate(path: Path, other: Path) -> None:
    del other
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def flip_in_header(path: Path, other: Path) -> None:
    del other
    flip(path, 100)


def flip_in_data(path: Path, other: Path) -> None:
    del other
    flip(path, -9)


def exchange(path: Path, other: Path) -> None:
    ours, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(ours)


def delete(path: Path, other: Path) -> None:
    del other
    path.unlink()


def make_folder(path: Path, other: Path) -> None:
    del other
    path.unlink()
    path.mkdir()


def forbid(path: Path, other: Path) -> None:
    """Root may read all files, but nobody reads through a link to itself."""
    del other
    if os.geteuid():
        path.chmod(0)
    else:
        path.unlink()
        path.symlink_to(path.name)


DAMAGES = (truncate, flip_in_header, flip_in_data, exchange, delete, make_folder, forbid)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("case", [PLAIN, HYBRID])
def test_a_row_ends_before_a_bad_block(
    make_port: Callable[..., Port], case: Case, damage: Callable[[Path, Path], None]
) -> None:
    port = make_port(case)
    port.save_row()
    damage(port.path(3), port.path(4))
    restored, result = port.restore()
    depth = 2 if port.stateful else 3
    assert result.num_tokens == result.num_disk_tokens == depth * BLOCK_TOKENS
    ((name, part, reason),) = [(bad.hash, bad.part, bad.reason) for bad in result.bad]
    assert (name, part) == (NAMES[3], "block")
    assert reason == ("missing" if damage is delete else "corrupt")
    check_goes_on(port, depth * BLOCK_TOKENS, restored)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_row_goes_on_from_the_deepest_good_state(
    make_port: Callable[..., Port], damage: Callable[[Path, Path], None]
) -> None:
    port = make_port(HYBRID)
    port.save_row()
    damage(port.path(5, is_state=True), port.path(3, is_state=True))
    depth = 2 if damage is exchange else 4
    restored, result = port.restore()
    assert result.num_tokens == depth * BLOCK_TOKENS
    bad = [(NAMES[5], "state")] + [(NAMES[3], "state")] * (damage is exchange)
    assert [(each.hash, each.part) for each in result.bad] == bad
    check_goes_on(port, depth * BLOCK_TOKENS, restored)


def test_a_row_without_any_good_file_is_empty(make_port: Callable[..., Port]) -> None:
    port = make_port(HYBRID)
    port.save_row()
    port.path(0).unlink()
    restored, result = port.restore()
    assert (result.num_tokens, result.num_disk_tokens) == (0, 0)
    assert result.bad == (BadFile(NAMES[0], "block", "missing", result.bad[0].detail),)
    expected = port.case.feed(port.case.make_caches(), numbers(0, 9))
    assert logprobs(port.case.feed(restored, numbers(0, 9))) == logprobs(expected)


def hold_back(port: Port, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Lets writers wait before each file until the event is set."""
    may_write, save = threading.Event(), port.kv.store.save

    def held(*arguments: Any) -> Any:
        assert may_write.wait(WAIT_S)
        return save(*arguments)

    monkeypatch.setattr(port.kv.store, "save", held)
    return may_write


def test_memory_has_what_a_writer_still_holds(
    make_port: Callable[..., Port], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = make_port(PLAIN, memory_bytes=2**24)
    may_write = hold_back(port, monkeypatch)
    row = fed_row(PLAIN, POSITION, 0)
    port.kv.save(row, [plan(index) for index in range(NUM_BLOCKS)])
    assert not port.path(0).exists()
    restored, result = port.restore()
    assert (result.num_tokens, result.num_memory_tokens) == (POSITION, POSITION)
    check_goes_on(port, POSITION, restored)
    may_write.set()
    port.wait_for(events.BlockSaved, NUM_BLOCKS)


def test_a_writer_that_is_held_back_loses_nothing_and_holds_no_more_than_its_bound(
    make_port: Callable[..., Port], monkeypatch: pytest.MonkeyPatch
) -> None:
    block_bytes = BLOCK_TOKENS * 2 * 2 * 32 * 4  # two layers of keys and values, float32
    port = make_port(PLAIN, writing_bytes=block_bytes)  # a state may go over it once: twice that
    assert port.codec.layout.bytes_per_token * BLOCK_TOKENS == block_bytes
    may_write = hold_back(port, monkeypatch)
    row = fed_row(PLAIN, POSITION, 0)
    port.kv.save(row, [plan(index) for index in range(NUM_BLOCKS)])
    assert port.kv.writers.held_bytes == 2 * block_bytes
    refused = port.wait_for(events.BlockSaveFailed, NUM_BLOCKS - 2)
    assert [(fact.hash, fact.reason) for fact in refused] == [
        (name, "not_taken") for name in NAMES[2:]
    ]
    may_write.set()
    port.wait_for(events.BlockSaved, 2)
    for index in range(2, NUM_BLOCKS):
        port.kv.save(row, [plan(index)])
        port.wait_for(events.BlockSaved, index + 1)
    assert port.kv.writers.held_bytes == 0
    restored, result = port.restore()
    assert result.num_tokens == POSITION
    assert port.content(restored, POSITION) == port.content(row, POSITION)


def test_a_file_that_could_not_be_removed_goes_later_unless_it_is_saved_again(
    make_port: Callable[..., Port],
) -> None:
    port = make_port(PLAIN, measure_s=1)
    port.save_row()
    files = FaultyFiles()
    files.fail("unlink", 0, errno.EROFS)
    port.kv.store.files = files
    port.kv.remove(RemoveFiles(1, port.kv.domain, NAMES, ()))
    paths = [port.path(index) for index in range(NUM_BLOCKS)]
    assert all(path.exists() for path in paths)
    port.kv.save(fed_row(PLAIN, POSITION, 0), [plan(0)])
    port.wait_for(events.BlockSaved, NUM_BLOCKS + 1)
    files.heal()
    folder = port.kv.store.folder
    port.kv.begin({str(path.relative_to(folder)): path.stat().st_size for path in paths})
    while any(path.exists() for path in paths[1:]):
        pass
    assert paths[0].exists()


def test_a_block_that_can_never_be_taken_is_answered(make_port: Callable[..., Port]) -> None:
    """A file larger than all that the writers may hold must not end the engine's thread."""
    port = make_port(PLAIN, writing_bytes=1)
    port.kv.save(fed_row(PLAIN, POSITION, 0), [plan(0), plan(1)])
    failed = port.wait_for(events.BlockSaveFailed, 2)
    assert [(fact.hash, fact.reason) for fact in failed] == [
        (name, "not_taken") for name in NAMES[:2]
    ]


def test_a_restore_takes_the_row_and_two_blocks_at_most(make_port: Callable[..., Port]) -> None:
    port = make_port(PLAIN)
    port.save_row()
    layout = port.codec.layout
    row_bytes = 256 * layout.bytes_per_token  # the caches grow by 256 tokens
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    restored, result = port.restore()
    peak = mx.get_peak_memory() - before
    assert result.num_tokens == POSITION
    assert peak <= row_bytes + 2 * BLOCK_TOKENS * layout.bytes_per_token
    assert mx.get_active_memory() - before <= row_bytes
    check_goes_on(port, POSITION, restored)


def test_a_restore_that_is_given_up_leaves_nothing(make_port: Callable[..., Port]) -> None:
    port = make_port(PLAIN)
    port.save_row()
    before = mx.get_active_memory()
    command = RestoreRow(7, NAMES, POSITION, ())
    restoring = port.kv.restore(port.case.make_caches(), command, POSITION, lambda: None)
    assert restoring.advance(wait=True) is None
    restoring.close()
    del restoring
    assert mx.get_active_memory() == before
