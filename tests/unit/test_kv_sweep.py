"""Unknown files go while the server works; what it writes meanwhile stays."""

import os
import threading
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from journal import events
from journal.events import Fact, PlannedBlock
from scheduler.kvcache.fake_codec import FakeCodec
from scheduler.kvcache.naming import BlockFile, domain_digest
from scheduler.kvcache.readahead import Read
from scheduler.kvcache.reconcile import sweep
from scheduler.kvcache.store import BlockStore, Saved
from scheduler.kvstore import KvStore
from scheduler.settings import KvSettings
from tests.kvcache.faults import FaultyFiles
from tests.kvcache.pieces import block, files_below, piece

WAIT_S = 20


class HeldFiles(FaultyFiles):
    """Files of which one operation waits, once told to, before it is done. `reached` says that it
    has come there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.held = ""
        self.reached = threading.Event()
        self.let_go = threading.Event()

    def hold(self, operation: str) -> None:
        """Lets the next call of this operation wait."""
        self.held = operation

    def unlink(self, path: Path) -> None:
        self._stop_at("unlink")
        super().unlink(path)

    def rename(self, old: Path, new: Path) -> None:
        self._stop_at("rename")
        super().rename(old, new)

    def list_folder(self, folder: Path) -> Iterable[os.DirEntry[str]]:
        self._stop_at("list_folder")
        return super().list_folder(folder)

    def _stop_at(self, operation: str) -> None:
        if self.held == operation:
            self.held = ""
            self.reached.set()
            assert self.let_go.wait(WAIT_S), f"{operation} was never let go"


@dataclass
class Found:
    """A store that has found files of an earlier run, and its sweep at work."""

    files: HeldFiles
    store: BlockStore
    num_swept: int = 0

    def save(self, number: int, fill: int) -> Saved:
        saved = self.store.save(block(number), piece(fill=fill))
        assert isinstance(saved, Saved), saved
        return saved

    def verified(self) -> list[int]:
        """The blocks that are there, each of them whole."""
        numbers = [n for n in range(8) if isinstance(self.store.verify(block(n)), int)]
        assert files_below(self.store.folder) == sorted(block(n).path for n in numbers)
        return numbers

    def sweep(self) -> None:
        """The whole sweep."""
        self.num_swept += sum(batch.num_swept for batch in sweep(self.store, {}))


OLD, NEW = 1, 2


@pytest.fixture
def found(tmp_path: Path) -> Found:
    """Three blocks that no event knows."""
    old = BlockStore(tmp_path)
    for number in range(3):
        old.save(block(number), piece(fill=OLD))
    files = HeldFiles()
    store = BlockStore(tmp_path, files)
    store.begin_sweep()
    return Found(files, store)


def in_thread(body: object) -> threading.Thread:
    assert callable(body)
    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


def test_a_block_that_is_saved_anew_after_it_was_listed_stays(found: Found) -> None:
    batches = sweep(found.store, {}, batch_entries=1)
    first = next(batches)
    assert first.num_swept == 1
    for number in range(3):
        found.save(number, NEW)
    assert sum(batch.num_swept for batch in batches) == 0
    assert found.verified() == [0, 1, 2]


def test_a_block_that_is_being_written_stays(found: Found) -> None:
    """Its old file, its temporary one and then the new one: the sweep meets the first two."""
    found.files.hold("rename")
    writer = in_thread(lambda: found.save(0, NEW))
    assert found.files.reached.wait(WAIT_S)
    found.sweep()
    assert found.num_swept == 2
    found.files.let_go.set()
    writer.join(WAIT_S)
    assert found.verified() == [0]


def test_a_save_waits_for_the_removal_of_its_old_file(found: Found) -> None:
    """The sweep has looked at the name, found it unknown, and is about to remove the file."""
    found.files.hold("unlink")
    sweeper = in_thread(found.sweep)
    assert found.files.reached.wait(WAIT_S)
    assert found.store._sweeping.locked(), "nobody can note a name now"
    writers = [in_thread(lambda number=number: found.save(number, NEW)) for number in range(3)]
    found.files.let_go.set()
    for thread in (sweeper, *writers):
        thread.join(WAIT_S)
    assert found.verified() == [0, 1, 2]


def test_a_file_that_the_server_removes_itself_is_no_trouble(found: Found) -> None:
    batches = sweep(found.store, {}, batch_entries=1)
    next(batches)
    for number in range(3):
        assert found.store.remove(block(number)) is None
    assert [batch.stuck for batch in batches if batch.stuck] == []


def test_what_an_earlier_process_was_writing_goes(found: Found) -> None:
    """Also if it had the same process id."""
    left = found.store.path(block(7)).with_name(f"{'7' * 64}.safetensors.{os.getpid()}-1.tmp")
    left.write_bytes(b"1")
    found.sweep()
    assert files_below(found.store.folder) == []


def test_what_is_written_is_not_remembered_longer_than_needed(found: Found) -> None:
    found.sweep()
    found.save(5, NEW)
    found.store.end_sweep()
    found.save(6, NEW)
    with pytest.raises(AssertionError):
        found.store.sweep(block(5).path)
    assert found.verified() == [5, 6]


@dataclass
class Row:
    """A row of the fake engine."""

    tokens: "array[int]"
    state: int | None = None


TOKENS = 16
NAMES = [f"{number:02x}" * 32 for number in range(4)]


class Server:
    """A store as a server has it, over a folder with unknown files, and what it reported."""

    def __init__(self, folder: Path) -> None:
        self.facts: list[Fact] = []
        self.reported = threading.Condition()
        self.files = HeldFiles()
        self.kv = KvStore(
            folder,
            KvSettings(reserve_bytes=0, memory_bytes=0),
            FakeCodec(),
            block_tokens=TOKENS,
            fingerprint="f" * 64,
            deliver=self.deliver,
        )
        self.kv.store.files = self.files
        self.row = Row(array("I", range(TOKENS * len(NAMES))))

    def deliver(self, fact: Fact) -> None:
        with self.reported:
            self.facts.append(fact)
            self.reported.notify_all()

    def count(self, kind: type[Fact]) -> int:
        return sum(isinstance(fact, kind) for fact in self.facts)

    def save(self) -> None:
        """Saves all blocks of the row, and waits until that has been reported."""
        blocks = [PlannedBlock(index=n, hash=name, part="block") for n, name in enumerate(NAMES)]
        self.kv.save([self.row], blocks)
        with self.reported:
            done = self.reported.wait_for(
                lambda: self.count(events.BlockSaved) == len(NAMES), WAIT_S
            )
        assert done, self.facts


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.files.let_go.set()
    server.kv.close(WAIT_S)


def test_a_server_serves_before_the_sweep_has_begun(server: Server) -> None:
    """It knows what is lost, and saves what nobody knows; the sweep finds all of that later."""
    kv = server.kv
    layout = FakeCodec().describe([server.row], len(server.row.tokens))
    domain = domain_digest(kv.fingerprint, layout, TOKENS)
    for name in (*NAMES[:2], "8" * 64):
        kv.store.save(BlockFile(domain, name), piece(fill=OLD))
    server.files.hold("list_folder")
    lost = BlockFile(domain, "9" * 64)
    kv.begin({lost.path: 1})
    assert kv.describe([server.row], len(server.row.tokens))
    assert [fact.hashes for fact in server.facts if isinstance(fact, events.BlocksLost)] == [
        (lost.hash,)
    ]
    assert server.files.reached.wait(WAIT_S)
    server.save()
    server.files.let_go.set()
    with server.reported:
        swept = server.reported.wait_for(lambda: server.count(events.StoreMeasured) > 0, WAIT_S)
    assert swept
    assert next(f.num_swept for f in server.facts if isinstance(f, events.StoreMeasured)) == 1
    saved = [BlockFile(domain, name) for name in NAMES]
    assert files_below(kv.store.folder) == sorted(file.path for file in saved)
    assert all(isinstance(FakeCodec().read(kv.store, file), Read) for file in saved)
