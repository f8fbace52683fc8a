"""A deterministic engine without mlx, for tests, simulation and the model named `fake`.

It keeps every rule of base.py: rows with caches that are counted, one step ahead, drops, ends and
failures. Its token is a function of the prompt, the output index and a nonce that is drawn per
engine life and journaled, so an output token that was delivered and is generated again after a
restart comes out as another one, and is caught.

Without a thread (`threaded=False`) a test drives it piece by piece with `work`, and nothing sleeps.
"""

import sys
import threading
from array import array
from collections import deque
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Literal, assert_never

from journal.events import ModelFacts
from scheduler.engine.base import (
    ChunkDone,
    Deliver,
    DropRow,
    EngineCommand,
    EngineDied,
    EngineLoaded,
    KvPort,
    MemoryReading,
    MemoryReturned,
    ReclaimMemory,
    ReleaseStep,
    RestoreRow,
    Restoring,
    RowFailed,
    RowFreed,
    RowTokens,
    RunChunk,
    SaveBlocks,
    SaveTail,
    SetBatch,
    StartRow,
    StepDone,
)
from scheduler.engine.fake_memory import FakeAllocator
from scheduler.engine.fake_row import (
    Failure,
    FakeCache,
    FakeRow,
    Phase,
    assert_boundary,
    draw,
    fake_logprobs,
    fake_token,
    make_row,
)
from scheduler.engine.fake_settings import FakeSettings
from scheduler.engine.fake_tokenizer import END_OF_TURN, FakeTokenizer
from scheduler.engine.model import ModelDescription
from scheduler.memory import row_bytes

SIZES = {
    "context_tokens",
    "weights_bytes",
    "kv_bytes_per_token",
    "kv_step_tokens",
    "state_bytes",
    "transient_bytes_per_token",
}


def fake_facts(settings: FakeSettings) -> ModelFacts:
    """The model, with the sizes that are set. With other sizes it is another model."""
    sizes = settings.model_dump(include=SIZES)
    fingerprint = sha256(f"fake {sizes}".encode()).hexdigest()
    return ModelFacts(name="fake", fingerprint=fingerprint, window_layers=(), **sizes)


@dataclass
class FakeEngine:
    """See the module's text. `failures` and `load_error` are what a test scripts."""

    facts: ModelFacts
    nonce: int
    settings: FakeSettings = field(default_factory=FakeSettings)
    threaded: bool = True
    failures: list[Failure] = field(default_factory=list[Failure])
    load_error: str | None = None

    def __post_init__(self) -> None:
        self.rows: dict[int, FakeRow] = {}
        self.batch = SetBatch(0, ())
        self.commands: deque[EngineCommand] = deque()
        self.chunks: deque[RunChunk] = deque()
        self.kv: KvPort | None = None
        self.restores: dict[int, Restoring] = {}
        self.tails: deque[tuple[SaveTail, FakeRow | None]] = deque()
        self.memory = FakeAllocator()
        self.ahead: StepDone | None = None
        self.unreleased = self.loaded = self.restored = False
        self.chunk_is_next = True
        self.num_prefilled_tokens = 0
        self.wake = threading.Event()
        self.stopping = threading.Event()
        self.thread: threading.Thread | None = None

    def start(self, deliver: Deliver, kv: KvPort | None = None) -> None:
        self.deliver = deliver
        self.kv = kv
        if self.threaded:
            self.thread = threading.Thread(target=self.run, name="fermata-fake-engine")
            self.thread.start()

    def submit(self, command: EngineCommand) -> None:
        self.commands.append(command)
        self.wake.set()

    def stop(self) -> None:
        self.stopping.set()
        self.wake.set()
        if self.thread is not None:
            self.thread.join()

    def run(self) -> None:
        """The thread. Whatever ends it unasked is the engine's death."""
        clean = False
        try:
            while not self.stopping.is_set():
                if not self.work():
                    self.wake.wait()
                    self.wake.clear()
            clean = True
        finally:
            if not clean:
                self.deliver(EngineDied(repr(sys.exc_info()[1]), while_loading=not self.loaded))

    def work(self) -> bool:
        """One piece: a command, a delivery, a chunk or a decode step. False: there is nothing."""
        if not self.loaded:
            return self.load()
        restored, self.restored = self.restored, False
        if self.commands:
            self.obey(self.commands.popleft())
        elif self.restores and not restored and self.advance_restores():
            self.restored = True  # something else comes first before the next block
        elif self.tails and self.is_at_rest(self.tails[0][0].number):
            self.save_tail(*self.tails.popleft())
        elif self.ahead is not None and not self.unreleased:
            self.hand_over(self.ahead)
        elif self.chunks and (self.chunk_is_next or not self.can_launch()):
            self.run_chunk(self.chunks.popleft())
        elif self.can_launch():
            self.launch()
        else:
            return restored and self.work()
        return True

    def work_until_idle(self) -> None:
        """All the work that there is. For tests without a thread."""
        while self.work():
            pass

    def load(self) -> bool:
        if self.load_error is not None:
            self.stopping.set()
            self.deliver(EngineDied(self.load_error, while_loading=True))
            self.load_error = None
            return False
        if self.stopping.is_set():
            return False
        self.spend(self.settings.load_ms / 1000)
        self.memory.take(self.facts.weights_bytes)
        self.loaded = True
        sample = self.make_cache()
        sample.feed(array("I", [0]))
        domain = "" if self.kv is None else self.kv.describe([sample], 1)
        self.deliver(EngineLoaded(self.facts, False, "", self.settings.load_ms * 10**6, domain))
        return True

    def make_cache(self) -> FakeCache:
        """An empty one."""
        return FakeCache(state=0 if self.facts.state_bytes else None)

    def spend(self, seconds: float) -> None:
        """Takes as long as a real engine would; a stop ends it early."""
        if seconds > 0 and self.threaded:
            self.stopping.wait(seconds)

    def obey(self, command: EngineCommand) -> None:
        """One arm per command."""
        match command:
            case StartRow():
                self.start_row(command)
            case RunChunk():
                self.chunks.append(command)
            case SetBatch():
                self.set_batch(command)
            case ReleaseStep():
                assert self.unreleased, "a step is released that was not delivered"
                self.unreleased = False
            case DropRow():
                self.drop_row(command.number)
            case SaveBlocks():
                self.save(command)
            case SaveTail():
                self.tails.append((command, self.rows.get(command.number)))
            case ReclaimMemory():
                freed_bytes = self.memory.reclaim()
                self.deliver(MemoryReturned(freed_bytes, self.memory.active_bytes, 0, 0))
            case RestoreRow():
                self.restore(command)
            case _:
                assert_never(command)

    def save(self, command: SaveBlocks) -> None:
        assert self.kv is not None, "blocks are saved where there is a store"
        row = self.rows[command.number]
        if row.failed:
            self.kv.refuse(command.blocks)
        else:
            self.kv.save(row.caches, command.blocks)

    def is_at_rest(self, number: int) -> bool:
        """Whether no step with this row is under way, and what was delivered is committed."""
        ahead = () if self.ahead is None else self.ahead.rows
        comes = any(row.number == number and row.token_ids for row in ahead)
        return not self.unreleased and not comes

    def save_tail(self, command: SaveTail, row: FakeRow | None) -> None:
        assert self.kv is not None, "tails are saved where there is a store"
        if row is None or self.rows.get(row.number) is not row or not row.decodes:
            self.kv.refuse_tail(command, "the row is gone, has ended or has failed")
        else:
            self.kv.save_tail(row.caches, command, row.num_cached_tokens)

    def read_memory(self) -> MemoryReading:
        """See `Engine.read_memory`."""
        return self.memory.read()

    def restore(self, command: RestoreRow) -> None:
        assert self.kv is not None, "rows are restored where there is a store"
        row = self.rows[command.number]
        if not row.failed:
            row.room_tokens = len(row.tokens)
            self.account(row)
            self.restores[command.number] = self.kv.restore(
                row.caches, command, row.room_tokens, self.wake.set
            )

    def advance_restores(self) -> bool:
        """Copies one block for each row that is being filled, if it has been read. Without a thread
        the engine waits for it, so that a test knows when the work is done.
        """
        worked = False
        for number, restoring in list(self.restores.items()):
            result = restoring.advance(wait=not self.threaded)
            if result is not None:
                restoring.close()
                del self.restores[number]
                self.filled(self.rows[number])
                self.deliver(result)
                worked = True
        return worked or (bool(self.restores) and not self.threaded)

    def filled(self, row: FakeRow) -> None:
        """A row that came back empty has let go of its room."""
        if not row.num_cached_tokens:
            row.room_tokens = 0
            self.account(row)

    def start_row(self, command: StartRow) -> None:
        assert command.number not in self.rows, f"row {command.number} is there already"
        row = make_row(command, self.settings.turn_tokens, self.make_cache())
        self.rows[command.number] = row
        self.fails(row, "start", 0)

    def set_batch(self, command: SetBatch) -> None:
        assert command.batch > self.batch.batch, "batch numbers increase"
        self.batch = command
        for number in command.numbers:
            if self.rows[number].decodes:
                assert_boundary(self.rows[number])

    def drop_row(self, number: int) -> None:
        row = self.rows.pop(number, None)
        restoring = self.restores.pop(number, None)
        if restoring is not None:
            restoring.close()
        self.chunks = deque(chunk for chunk in self.chunks if chunk.number != number)
        if self.ahead is not None:
            nothing = RowTokens(number, (), None)
            rows = tuple(nothing if r.number == number else r for r in self.ahead.rows)
            self.ahead = replace(self.ahead, rows=rows)
        freed_bytes = 0 if row is None else row.held_bytes
        self.memory.take(-freed_bytes)
        self.deliver(RowFreed(number, freed_bytes))

    def run_chunk(self, command: RunChunk) -> None:
        row = self.rows[command.number]
        if row.failed:
            return
        assert row.num_cached_tokens == command.start, "a chunk starts where the caches end"
        end = command.start + command.length
        assert end < len(row.tokens), "the last known token is never in a chunk"
        self.chunk_is_next = False
        if self.fails(row, "prefill", command.start):
            return
        rate = self.settings.prefill_tokens_per_s
        self.spend(command.length / rate if rate else 0)
        row.feed(end)
        self.account(row)
        self.num_prefilled_tokens += command.length
        transient_bytes = command.length * self.facts.transient_bytes_per_token
        self.memory.take(transient_bytes)
        peak_bytes = self.memory.active_bytes
        self.memory.take(-transient_bytes)
        self.memory.reclaim()
        self.deliver(
            ChunkDone(
                number=command.number,
                chunk=command.chunk,
                start=command.start,
                length=command.length,
                duration_ns=command.length * 10**9 // rate if rate else 0,
                peak_bytes=peak_bytes,
                active_bytes=self.memory.active_bytes,
            )
        )

    def can_launch(self) -> bool:
        """Whether a decode step can be computed: at most one is ahead, and some row decodes."""
        rows = (self.rows.get(number) for number in self.batch.numbers)
        return self.ahead is None and any(row is not None and row.decodes for row in rows)

    def launch(self) -> None:
        """Computes the next decode step. It stays here until the one before is released."""
        self.chunk_is_next = True
        self.spend(self.settings.step_ms / 1000)
        rows = tuple(self.decode(number) for number in self.batch.numbers)
        self.ahead = StepDone(self.batch.batch, rows, self.settings.step_ms * 10**6)

    def decode(self, number: int) -> RowTokens:
        """Feeds the row's pending token, and draws the next."""
        row = self.rows.get(number)
        if row is None or not row.decodes:
            return RowTokens(number, (), None)
        assert_boundary(row)
        if self.fails(row, "decode", row.num_output_tokens):
            return RowTokens(number, (), None)
        index = row.num_output_tokens
        last_of_turn = row.ends_turn and index + 1 >= self.settings.turn_tokens
        token = END_OF_TURN if last_of_turn else fake_token(row.digest, index, self.nonce)
        row.feed(len(row.tokens))
        self.account(row)
        row.tokens.append(token)
        row.text.add(token)
        row.ended = row.text.ended or ("length" if index + 1 == row.max_tokens else None)
        logprobs = None
        if row.num_top is not None:
            drawn = draw(row.digest, index, self.nonce)
            logprobs = (fake_logprobs(token, drawn, row.num_top),)
        return RowTokens(number, (token,), row.ended, logprobs)

    def hand_over(self, step: StepDone) -> None:
        """Delivers the step, unless all of its rows were dropped since its launch."""
        self.ahead = None
        if any(row.token_ids for row in step.rows):
            self.unreleased = True
            self.deliver(step)

    def fails(self, row: FakeRow, during: Phase, at: int) -> bool:
        """Whether a scripted failure is due. It happens once, and the row does nothing after it."""
        for failure in self.failures:
            if (failure.number, failure.during) == (row.number, during) and at >= failure.at:
                self.failures.remove(failure)
                row.failed = True
                self.deliver(RowFailed(row.number, during, failure.error))
                return True
        return False

    def account(self, row: FakeRow) -> None:
        """What the row's caches take from here on, in whole steps of allocation."""
        num_tokens = max(row.room_tokens, row.num_cached_tokens)
        num_bytes = row_bytes(self.facts, num_tokens) if num_tokens else 0
        self.memory.take(num_bytes - row.held_bytes)
        row.held_bytes = num_bytes


@dataclass(frozen=True)
class FakeSource:
    """The model named `fake`."""

    settings: FakeSettings
    caches: Literal["mlx", "fake"] = "fake"

    def describe(self) -> ModelDescription:
        facts = fake_facts(self.settings)
        return ModelDescription("fake", FakeTokenizer(), facts, blas="none")

    def make_engine(self, description: ModelDescription, nonce: int) -> FakeEngine:
        return FakeEngine(description.facts, nonce, self.settings)
