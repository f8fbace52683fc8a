"""Each tail that is to be saved gets exactly one answer, whatever becomes of it; and a start finds
the tails that the journal knows, and removes all others. With the fake codec.
"""

import errno
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from journal import events
from journal.events import Fact, PlannedBlock
from scheduler.engine.base import BadFile, RestoreRow, RowRestored, SaveTail, Tail
from scheduler.engine.fake_row import FakeCache
from scheduler.keptfiles import known_files
from scheduler.kvcache.fake_codec import FakeBlock, FakeCodec
from scheduler.kvcache.naming import TailFile
from scheduler.kvstore import KvStore
from scheduler.prefix import Block, BlockIndex, KeptTail, add_tail
from scheduler.settings import KvSettings
from tests.kvcache.faults import FaultyFiles

BLOCK, END = 16, 39
START = END - END % BLOCK
NAMES = ("a" * 64, "b" * 64)
WAIT_S = 20


class Store:
    """A store for fake rows over files that can fail, with one writer, and what it reported."""

    def __init__(self, folder: Path, *, stateful: bool, **settings: Any) -> None:
        self.facts: list[Fact] = []
        self.reported = threading.Condition()
        self.stateful = stateful
        self.files = FaultyFiles()
        self.kv = KvStore(
            folder,
            KvSettings(**{"num_writers": 1, "reserve_bytes": 0, "memory_bytes": 0, **settings}),
            FakeCodec(),
            block_tokens=BLOCK,
            fingerprint="f" * 64,
            deliver=self.deliver,
        )
        self.kv.store.files = self.files
        self.kv.compared.set()
        self.kv.describe([self.row(1)], 1)

    def deliver(self, fact: Fact) -> None:
        with self.reported:
            self.facts.append(fact)
            self.reported.notify_all()

    def row(self, end: int) -> FakeCache:
        """A row's cache that was fed so many tokens."""
        cache = FakeCache(state=0 if self.stateful else None)
        cache.feed(cache.tokens.__class__("I", range(100, 100 + end)))
        return cache

    def save_tail(self, end: int = END, number: int = 1) -> None:
        command = SaveTail(number, f"req_{number}", end - end % BLOCK)
        self.kv.save_tail([self.row(end)], command, end)

    def save_blocks(self) -> None:
        planned = [PlannedBlock(index=i, hash=name, part="block") for i, name in enumerate(NAMES)]
        self.kv.save([self.row(END)], planned)
        self.wait(events.BlockSaved, len(planned))

    def wait(self, kind: type[Fact], count: int = 1) -> list[Any]:
        """The facts of a kind, once there are so many."""

        def found() -> list[Fact]:
            return [fact for fact in self.facts if isinstance(fact, kind)]

        with self.reported:
            assert self.reported.wait_for(lambda: len(found()) >= count, WAIT_S), self.facts
            return found()

    def answers(self) -> list[tuple[int, str]]:
        """All answers to tails: the row's number, and `saved` or the reason why not."""
        found: list[tuple[int, str]] = []
        for fact in self.facts:
            match fact:
                case events.ChainSaved():
                    found.append((fact.number, "saved"))
                case events.ChainSaveFailed():
                    found.append((fact.number, fact.reason))
                case _:
                    pass
        return found

    def restore(self, *, states: tuple[int, ...] = ()) -> tuple[FakeCache, RowRestored]:
        row = self.row(0)
        tail = Tail("req_1", START, END)
        restoring = self.kv.restore(
            [row], RestoreRow(1, NAMES, END, states, tail), END, lambda: None
        )
        while (result := restoring.advance(wait=True)) is None:
            pass
        return row, result

    def path(self, end: int = END, number: int = 1) -> Path:
        return self.kv.store.path(TailFile(self.kv.domain, f"req_{number}", end))


Make = Callable[..., Store]


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[Make]:
    """Stores on one folder, closed at the end."""
    stores: list[Store] = []

    def make(*, stateful: bool = False, **settings: Any) -> Store:
        stores.append(Store(tmp_path, stateful=stateful, **settings))
        return stores[-1]

    yield make
    for store in stores:
        store.files.may_write.set()
        store.kv.close(WAIT_S)


@pytest.mark.parametrize("stateful", [False, True])
def test_a_fake_row_comes_back_with_its_tail(make_store: Make, *, stateful: bool) -> None:
    store = make_store(stateful=stateful)
    store.save_blocks()
    store.save_tail()
    [saved] = store.wait(events.ChainSaved)
    assert (saved.tail_start, saved.num_tokens) == (START, END)
    assert saved.tail_bytes == store.path().stat().st_size
    row, result = store.restore()
    assert row == store.row(END)
    assert (result.num_tokens, result.num_disk_tokens, result.bad) == (END, END, ())


@pytest.mark.parametrize("stateful", [False, True])
def test_an_empty_tail_needs_a_file_only_for_state(make_store: Make, *, stateful: bool) -> None:
    store = make_store(stateful=stateful)
    store.files.may_write.clear()
    store.save_tail(START)
    assert store.answers() == ([] if stateful else [(1, "saved")])
    store.files.may_write.set()
    [saved] = store.wait(events.ChainSaved)
    assert (saved.num_tokens, saved.tail_bytes > 0) == (START, stateful)
    assert store.path(START).exists() == stateful


@pytest.mark.parametrize("stateful", [False, True])
def test_without_its_tail_a_fake_row_has_its_blocks(make_store: Make, *, stateful: bool) -> None:
    store = make_store(stateful=stateful)
    store.save_blocks()
    row, result = store.restore()
    kept = 0 if stateful else START
    assert row == store.row(kept)
    assert result.num_tokens == kept
    assert result.bad == (BadFile(f"req_1-{END}", "tail", "missing", result.bad[0].detail),)


@pytest.mark.parametrize("position", [END, END - 1])
def test_a_fake_row_goes_on_from_a_state_when_its_tail_is_of_another_position(
    make_store: Make, position: int
) -> None:
    store = make_store(stateful=True)
    store.save_blocks()
    store.kv.save([store.row(START)], [PlannedBlock(index=1, hash=NAMES[1], part="state")])
    store.wait(events.BlockSaved, 3)
    tokens = store.row(END).tokens[START:]
    tail = FakeBlock(tokens, store.kv.codec.cut_state([store.row(position)], position).state)
    file = TailFile(store.kv.domain, "req_1", END)
    store.kv.store.save(file, store.kv.codec.tensors(tail))
    row, result = store.restore(states=(2,))
    assert [bad.reason for bad in result.bad] == (["corrupt"] if position < END else [])
    assert row == store.row(START if position < END else END)


# What else may come of it


def test_a_full_disk_and_what_is_offered_after_it(make_store: Make) -> None:
    store = make_store()
    store.files.quota_bytes = 100
    store.save_tail()
    store.wait(events.SavingStopped)
    store.save_tail(number=2)
    store.save_tail(number=3)
    assert store.answers() == [(number, "disk_full") for number in (1, 2, 3)]
    assert not store.path().exists()
    store.files.heal()
    store.kv.writers.probe()
    store.wait(events.SavingResumed)
    store.save_tail(number=2)
    assert store.wait(events.ChainSaved)[0].number == 2


@pytest.mark.parametrize("operation", ["create", "write", "flush", "rename", "flush_folder"])
def test_a_failing_disk(make_store: Make, operation: str) -> None:
    store = make_store()
    store.files.fail(operation, 0, errno.EIO)
    store.save_tail()
    [failed] = store.wait(events.ChainSaveFailed)
    assert (failed.request_id, failed.number, failed.reason) == ("req_1", 1, "io_error")


def test_a_folder_in_its_place(make_store: Make) -> None:
    store = make_store()
    (store.path() / "inside").mkdir(parents=True)
    store.save_tail()
    assert store.wait(events.ChainSaveFailed)[0].reason == "io_error"


def test_a_tail_that_waits_behind_a_failure_is_given_up_with_it(make_store: Make) -> None:
    store = make_store()
    store.files.may_write.clear()
    store.save_tail(number=1)
    store.save_tail(number=2)
    store.files.quota_bytes = 300
    store.files.may_write.set()
    store.wait(events.ChainSaveFailed, 2)
    assert store.answers() == [(1, "disk_full"), (2, "disk_full")]


@pytest.mark.parametrize("writing_bytes", [1, 30])
def test_writers_without_room(make_store: Make, writing_bytes: int) -> None:
    """1: it would never find room; 30: twice that is room for two of 28 bytes."""
    store = make_store(writing_bytes=writing_bytes)
    store.files.may_write.clear()
    for number in (1, 2, 3):
        store.save_tail(number=number)
    taken = () if writing_bytes == 1 else (1, 2)
    refused = [(number, "not_taken") for number in (1, 2, 3) if number not in taken]
    assert store.answers() == refused
    store.files.may_write.set()
    store.wait(events.ChainSaved, len(taken))
    assert store.answers() == [*refused, *((number, "saved") for number in taken)]


def test_two_of_one_name_are_never_written_at_once(make_store: Make) -> None:
    store = make_store()
    store.files.may_write.clear()
    store.save_tail()
    store.save_tail()
    assert store.answers() == [(1, "not_taken")]
    store.files.may_write.set()
    store.wait(events.ChainSaved)
    assert store.answers() == [(1, "not_taken"), (1, "saved")]


def test_a_stop_answers_what_is_queued(make_store: Make) -> None:
    store = make_store()
    store.files.may_write.clear()
    begun, free_bytes = threading.Event(), store.files.free_bytes

    def looked(folder: Path) -> int:
        begun.set()
        return free_bytes(folder)

    store.files.free_bytes = looked
    store.save_tail(number=1)
    assert begun.wait(WAIT_S)
    store.save_tail(number=2)
    store.kv.close(0)
    assert store.answers() == [(2, "not_taken")]
    store.save_tail(number=3)
    assert store.answers()[1:] == [(3, "not_taken")]
    store.files.may_write.set()
    store.wait(events.ChainSaved)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_writer_that_dies_of_a_tail(make_store: Make) -> None:
    store = make_store()
    dying: list[threading.Thread] = []

    def broken(descriptor: int) -> None:
        dying.append(threading.current_thread())
        raise RuntimeError("a defect")

    store.files.flush = broken
    store.files.may_write.clear()
    store.save_tail(number=1)
    store.save_tail(number=2)
    store.files.may_write.set()
    store.wait(events.ChainSaveFailed, 2)
    dying[0].join()
    assert store.answers() == [(1, "io_error"), (2, "io_error")]


# A start


def test_a_start_keeps_the_tails_that_it_knows_and_sweeps_the_others(make_store: Make) -> None:
    store = make_store()
    for number in (1, 2, 3, 4):
        store.save_tail(number=number)
    saved = store.wait(events.ChainSaved, 4)
    index = BlockIndex(domain=store.kv.domain)
    for fact in saved[:3]:
        add_tail(index, f"req_{fact.number}-{END}", fact.tail_bytes)
    store.path(number=2).unlink()
    store.path(number=3).write_bytes(b"short")
    store.kv.begin(known_files(index))
    [measured] = store.wait(events.StoreMeasured)
    assert measured.num_swept == 1
    assert [store.path(number=number).exists() for number in (1, 2, 3, 4)] == [1, 0, 1, 0]
    lost = store.wait(events.BlocksLost, 2)
    assert sorted((fact.reason, fact.tails) for fact in lost) == [
        ("corrupt", (f"req_3-{END}",)),
        ("missing", (f"req_2-{END}",)),
    ]
    assert all(not fact.hashes and not fact.states for fact in lost)


def test_the_known_files_are_those_of_blocks_states_and_tails() -> None:
    block = Block(domain="d" * 64, parent="", end_tokens=16, block_bytes=5, state_bytes=6)
    index = BlockIndex(blocks={"a" * 64: block}, tails={"req_1-39": KeptTail("e" * 64, 7)})
    assert known_files(index) == {
        f"{'d' * 8}/aa/{'a' * 64}.safetensors": 5,
        f"{'d' * 8}/aa/{'a' * 64}.state.safetensors": 6,
        f"{'e' * 8}/tails/req_1-39.safetensors": 7,
    }
