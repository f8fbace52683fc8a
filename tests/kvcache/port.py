"""The engine's port to saved KV over a folder, with the real codec and the rows of tiny models."""

import threading
from pathlib import Path
from typing import Any

import pytest

from journal import events
from journal.events import Fact, PlannedBlock
from scheduler.engine.base import RestoreRow, RowRestored, SaveTail, Tail
from scheduler.keptfiles import file_of
from scheduler.kvcache.mlx_codec import MlxCodec
from scheduler.kvcache.naming import TailFile
from scheduler.kvstore import KvStore
from scheduler.settings import KvSettings
from tests.kvcache.models import CASES, Case
from tests.kvcache.rows import fed_row, logprobs, numbers, whole_row

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

    def save_to(self, end: int) -> list[Any]:
        """A row of `end` tokens whose whole blocks are on disk, as those of a held request are."""
        row = self.case.make_caches()
        for index in range(end // BLOCK_TOKENS):
            start = index * BLOCK_TOKENS
            self.case.feed(row, numbers(start, start + BLOCK_TOKENS))
            self.kv.save(row, [plan(index)])
            self.wait_for(events.BlockSaved, index + 1)
        if end % BLOCK_TOKENS:
            self.case.feed(row, numbers(end - end % BLOCK_TOKENS, end))
        return row

    def save_tail(self, row: list[Any], end: int, request_id: str = "req_1") -> Any:
        """Hands the tail of a row over, and waits for the one answer."""
        num_before = len(self.facts)
        self.kv.save_tail(row, SaveTail(7, request_id, tail_start(end)), end)
        with self.reported:
            assert self.reported.wait_for(lambda: len(self.facts) > num_before, WAIT_S)
            return self.facts[num_before]

    def tail_path(self, end: int, request_id: str = "req_1") -> Path:
        """The file of a tail."""
        return self.kv.store.path(TailFile(self.kv.domain, request_id, end))

    def restore_held(self, end: int, states: tuple[int, ...] = ()) -> tuple[list[Any], RowRestored]:
        """Fills a new row from the chain of a held request, its tail included."""
        start = tail_start(end)
        has_tail = end > start or self.stateful
        tail = Tail("req_1", start, end) if has_tail else None
        return self.fill(RestoreRow(7, NAMES[: start // BLOCK_TOKENS], end, states, tail))

    def restore(self, num_tokens: int = POSITION) -> tuple[list[Any], RowRestored]:
        """Fills a new row; returns it with the result."""
        states = STATES if self.stateful else ()
        return self.fill(RestoreRow(7, NAMES[: -(-num_tokens // BLOCK_TOKENS)], num_tokens, states))

    def fill(self, command: RestoreRow) -> tuple[list[Any], RowRestored]:
        """Fills a new row; returns it with the result."""
        caches = self.case.make_caches()
        restoring = self.kv.restore(caches, command, command.num_tokens + 10, lambda: None)
        while (result := restoring.advance(wait=True)) is None:
            pass
        return caches, result

    def content(self, row: list[Any], position: int) -> dict[str, bytes]:
        return whole_row(self.codec.layout, row, position)


def tail_start(end: int) -> int:
    """Where the tail of a row with so many positions begins."""
    return end - end % BLOCK_TOKENS


def plan(index: int) -> PlannedBlock:
    return PlannedBlock(index=index, hash=NAMES[index], part="block")


def check_goes_on(port: Port, position: int, restored: list[Any]) -> None:
    """The restored row is the one that was never away, and stays it."""
    original = fed_row(port.case, position, 0)
    assert port.content(restored, position) == port.content(original, position)
    for chunk in (numbers(5, 6), numbers(6, 25)):
        assert logprobs(port.case.feed(restored, chunk)) == logprobs(
            port.case.feed(original, chunk)
        )


def hold_back(port: Port, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Lets writers wait before each file until the event is set."""
    may_write, save = threading.Event(), port.kv.store.save

    def held(*arguments: Any) -> Any:
        assert may_write.wait(WAIT_S)
        return save(*arguments)

    monkeypatch.setattr(port.kv.store, "save", held)
    return may_write
