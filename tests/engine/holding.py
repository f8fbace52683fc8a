"""Rows that are held and go on: what the core and the loop would do, with the real store of KV."""

import queue
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import make_prompt_cache

from journal import events
from journal.events import Fact, PlannedBlock
from scheduler.engine.base import (
    DropRow,
    ReleaseStep,
    RestoreRow,
    RowFreed,
    RowRestored,
    SaveBlocks,
    SaveTail,
    SetBatch,
    StartRow,
    Tail,
)
from scheduler.kvcache.mlx_codec import MlxCodec
from scheduler.kvstore import KvStore
from scheduler.settings import KvSettings
from tests.engine.driver import Driver
from tests.engine.models import Array, TinyModel, held

BLOCK = 16
WAIT_S = 20


def chain(tokens: Sequence[int], num_blocks: int) -> tuple[str, ...]:
    """Names of the first blocks, by all tokens up to their ends."""
    ends = range(BLOCK, BLOCK * num_blocks + 1, BLOCK)
    return tuple(sha256(array("I", tokens[:end]).tobytes()).hexdigest() for end in ends)


@dataclass(frozen=True)
class Held:
    """A row that is held: all that its request is, and where its KV lies."""

    start: StartRow
    hashes: tuple[str, ...]
    tail: Tail | None
    num_tokens: int
    content: list[Array]


class Holding:
    """`driver` runs the engine over a store in a folder."""

    def __init__(self, model: TinyModel, folder: Path, end_of_turn_ids: Sequence[int] = ()) -> None:
        self.codec = MlxCodec()
        self.facts: queue.SimpleQueue[Fact] = queue.SimpleQueue()
        self.kv = KvStore(
            folder,
            KvSettings(reserve_bytes=0, memory_bytes=0),
            self.codec,
            block_tokens=BLOCK,
            fingerprint="f0" * 32,
            deliver=self.facts.put,
        )
        self.kv.compared.set()
        sample = make_prompt_cache(model.model)
        model.model(mx.array([[1, 2, 3]]), cache=sample)
        self.kv.describe(sample, 3)
        self.driver = Driver(model, end_of_turn_ids, self.kv)
        self.read: queue.SimpleQueue[object] = queue.SimpleQueue()
        self.driver.worker._saved.wake = self.read.put
        self.saved: set[str] = set()

    def save(self, number: int, *, with_state: bool = False) -> None:
        """Saves the row's whole blocks that are not saved, and waits for them."""
        row = self.driver.row(number)
        names = chain(row.tokens, row.cached // BLOCK)
        planned = [
            PlannedBlock(index=index, hash=name, part="block")
            for index, name in enumerate(names)
            if name not in self.saved
        ]
        if with_state and self.codec.has_state:
            planned.append(PlannedBlock(index=len(names) - 1, hash=names[-1], part="state"))
        self.driver.worker.obey(SaveBlocks(number, tuple(planned)))
        for _ in planned:
            assert isinstance(self.facts.get(timeout=WAIT_S), events.BlockSaved)
        self.saved |= set(names)

    def pause(self, number: int, *others: int) -> Held:
        """The row leaves the batch, which are the others from here on, and its launched step comes
        in. Its blocks and its tail are saved, and it is dropped.
        """
        driver, row = self.driver, self.driver.row(number)
        driver.num_batches += 1
        driver.work(SetBatch(driver.num_batches, others), ReleaseStep())
        self.save(number)
        start = row.cached // BLOCK * BLOCK
        driver.work(SaveTail(number, row.start.request_id, start), ReleaseStep())
        return self.end_pause(number, start)

    def end_pause(self, number: int, start: int) -> Held:
        """Waits for the tail and drops the row, whose memory is free then."""
        driver, row = self.driver, self.driver.row(number)
        saved = self.facts.get(timeout=WAIT_S)
        assert isinstance(saved, events.ChainSaved), saved
        assert (saved.tail_start, saved.num_tokens) == (start, row.cached)
        tail = Tail(row.start.request_id, start, row.cached)
        content = held(row.caches)
        size = sum(cache.nbytes for cache in row.caches)
        known = StartRow(
            number,
            row.start.request_id,
            tuple(row.tokens),
            row.start.num_prompt_tokens,
            row.start.max_tokens,
            row.start.sampling,
        )
        before = mx.get_active_memory()
        driver.work(DropRow(number))
        freed = driver.of(RowFreed)[-1]
        assert before - mx.get_active_memory() >= 0.95 * size > 0
        assert freed.freed_bytes >= 0.95 * size
        hashes = chain(known.token_ids, start // BLOCK)
        return Held(known, hashes, tail if saved.tail_bytes else None, tail.end, content)

    def resume(self, row: Held) -> RowRestored:
        """The row is filled again, from files alone: it holds what it held, and nothing is fed."""
        driver, number = self.driver, row.start.number
        num_fed = driver.worker.num_prefilled_tokens
        result = self.restore(
            row.start, RestoreRow(number, row.hashes, row.num_tokens, (), row.tail)
        )
        assert result.bad == ()
        assert result.num_tokens == result.num_disk_tokens == row.num_tokens
        assert result.read_bytes == sum(array.nbytes for array in row.content) + self.counters()
        restored = held(driver.row(number).caches)
        for found, expected in zip(restored, row.content, strict=True):
            assert found.dtype == expected.dtype
            assert np.array_equal(found, expected)
        assert driver.worker.num_prefilled_tokens == num_fed
        return result

    def counters(self) -> int:
        """The bytes of what a state says beside its arrays."""
        layers = self.codec.layout.state_layers
        specs = [spec for layer in layers for spec in layer.specs]
        return sum(spec.bytes_of(0) for spec in specs if spec.name.endswith("numbers"))

    def restore(self, start: StartRow, command: RestoreRow) -> RowRestored:
        """Starts a row and fills it."""
        driver = self.driver
        num_before = len(driver.of(RowRestored))
        driver.work(start)
        driver.worker.obey(command)
        while len(driver.of(RowRestored)) == num_before:
            ready = self.read.get(timeout=WAIT_S)
            driver.worker.obey(ready)  # pyright: ignore[reportArgumentType]
        return driver.of(RowRestored)[-1]
