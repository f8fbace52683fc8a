"""The engine on MLX: one thread that loads the model, prefills chunks and decodes batches.

At most two decode steps are unread at a time. While step k is being computed the graph of step
k + 1 is built on its lazy tokens, so that the device does not wait for Python; when k is read and
delivered, k + 1 is under way. It stays inside until `ReleaseStep` says that k is committed, and
k + 2 is not launched before that. Where the reading of k shows that a row ended, the position
that k + 1 fed for it is taken back, and its token is not delivered.
"""

import math
import queue
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import mlx.core as mx

from scheduler.engine import attention
from scheduler.engine.allocator import Allocator
from scheduler.engine.arrays import floats, integers
from scheduler.engine.base import (
    ChunkDone,
    Deliver,
    DropRow,
    EngineCommand,
    EngineDied,
    KvPort,
    MemoryReading,
    MemoryReturned,
    ReclaimMemory,
    ReleaseStep,
    RestoreRow,
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
from scheduler.engine.decoding import ROW_ERRORS, Decoder, Step
from scheduler.engine.loading import LoadedModel
from scheduler.engine.model import ModelError, Tokenizer
from scheduler.engine.rows import Row, make_row, row_tokens
from scheduler.engine.saved import Ready, SavedKv

CLEAR_EVERY_STEPS = 256
"""How often decoding gives the allocator's unused buffers back, as mlx-lm does."""


class MlxEngine:
    """Implements `scheduler.engine.base.Engine`.

    `load` is called in the engine's thread. The tokenizer says where a turn ends, and turns tokens
    into text for rows with stop strings.
    """

    def __init__(self, load: Callable[[], LoadedModel], tokenizer: Tokenizer) -> None:
        self._load = load
        self._tokenizer = tokenizer
        self._commands: Commands = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._allocator = Allocator()
        self._loaded = threading.Event()

    def start(self, deliver: Deliver, kv: KvPort | None = None) -> None:
        """Starts the thread; `EngineLoaded` or `EngineDied` follows."""
        assert self._thread is None, "an engine starts once"
        target = partial(self._run, deliver, kv)
        self._thread = threading.Thread(target=target, name="engine", daemon=True)
        self._thread.start()

    def submit(self, command: EngineCommand) -> None:
        """Hands over a command. Never waits; the loop bounds what is outstanding."""
        self._commands.put(command)

    def read_memory(self) -> MemoryReading:
        """See `Engine.read_memory`."""
        return self._allocator.read() if self._loaded.is_set() else MemoryReading(0, 0, 0)

    def stop(self) -> None:
        """Ends the thread after the work in hand, and waits for it."""
        if self._thread is not None:
            self._commands.put(None)
            self._thread.join()

    def _run(self, deliver: Deliver, kv: KvPort | None) -> None:
        loading = True
        try:
            loaded = self._load()
            domain = kv.describe(loaded.sample, loaded.num_sample_tokens) if kv else ""
            self._loaded.set()
            deliver(replace(loaded.result, kv_domain=domain))
            loading = False
            loaded = replace(loaded, sample=[])
            worker = EngineWorker(loaded, deliver, self._tokenizer, kv, self._allocator)
            worker.serve(self._commands)
        except ModelError as error:
            deliver(EngineDied(str(error), loading))
        # The thread's edge: whatever ends it has to reach the loop, or the server hangs.
        except Exception as error:  # noqa: BLE001
            deliver(EngineDied("".join(traceback.format_exception(error)), loading))
        finally:
            mx.clear_streams()


Commands = queue.SimpleQueue[EngineCommand | Ready | None]


class EngineWorker:
    """What the engine's thread does: commands in order, and between them one piece of work at a
    time. No method is called from another thread.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        deliver: Deliver,
        tokenizer: Tokenizer,
        kv: KvPort | None = None,
        allocator: Allocator | None = None,
    ) -> None:
        self._allocator = allocator or Allocator()
        self._saved = SavedKv(kv, deliver, self._fail)
        self._decoder = Decoder(loaded.model, loaded.result.one_row_only)
        self._num_vocabulary = loaded.num_vocabulary
        self._deliver = deliver
        self._tokenizer = tokenizer
        self.rows: dict[int, Row] = {}
        self._batch = SetBatch(0, ())
        self._chunks: deque[RunChunk] = deque()
        self._in_flight: deque[Step] = deque()
        self._tails: deque[tuple[SaveTail, Row | None]] = deque()
        self._committed = True
        self._decoded_since_chunk = True
        self._done_ns = 0
        self._num_steps = 0

    def serve(self, commands: "Commands") -> None:
        """Works until `None` is among the commands."""
        self._saved.wake = commands.put
        busy = False
        while True:
            try:
                command = commands.get(block=not busy)
            except queue.Empty:
                busy = self.advance()
                continue
            if command is None:
                self.settle()
                return
            self.obey(command)
            busy = True
            if isinstance(command, Ready):
                self.advance()  # rows that run do not wait for all blocks of one that is filled

    def obey(self, command: EngineCommand | Ready) -> None:  # noqa: C901
        """Takes a command; the work that it asks for is done by `advance`."""
        match command:
            case StartRow():
                self._start(command)
            case RunChunk():
                if not self.rows[command.number].ended:
                    self._chunks.append(command)
            case SetBatch():
                self._batch = command
            case ReleaseStep():
                self._committed = True
            case DropRow():
                self._drop(command.number)
            case SaveBlocks():
                self._saved.save(self.rows[command.number], command)
            case SaveTail():
                self._tails.append((command, self.rows.get(command.number)))
            case ReclaimMemory():
                self._reclaim()
            case RestoreRow():
                self._saved.restore(self.rows[command.number], command)
            case Ready():
                self._saved.advance(command.number)

    def advance(self) -> bool:
        """Does one piece of work. False: there is none until another command comes."""
        if self._tails and self._committed and self._save_tail():
            return True
        rows = self._launchable()
        idle = not rows and not self._in_flight
        if self._chunks and (self._decoded_since_chunk or idle):
            self._run_chunk(self._chunks.popleft())
            return True
        if not self._committed:
            return self._launch_up_to(1)
        self._launch_up_to(2)
        if not self._in_flight:
            return False
        self._deliver_step(self._in_flight.popleft())
        return True

    def _save_tail(self) -> bool:
        """Hands over the tail of a row for which no step is under way any more."""
        command, row = self._tails[0]
        if row is None or row.ended:
            self._tails.popleft()
            self._saved.port.refuse_tail(command, "the row is gone, has ended or has failed")
            return True
        if any(row in step.rows for step in self._in_flight):
            return False
        self._tails.popleft()
        self._decoder.take_out(row)
        self._saved.save_tail(row, command)
        return True

    @property
    def num_prefilled_tokens(self) -> int:
        """The tokens that rows were fed in chunks, by this engine, in all."""
        return self._decoder.num_fed_tokens

    def _reclaim(self) -> None:
        begun_ns = time.monotonic_ns()
        before = mx.get_cache_memory()
        mx.clear_cache()
        after = mx.get_cache_memory()
        duration_ns = time.monotonic_ns() - begun_ns
        self._deliver(MemoryReturned(before - after, mx.get_active_memory(), after, duration_ns))

    def settle(self) -> None:
        """Waits for what was launched, and gives every row its own state back."""
        for step in self._in_flight:
            self._settle(step)
        self._decoder.dissolve()

    def _launchable(self) -> list[Row]:
        rows = [self.rows[number] for number in self._batch.numbers]
        return [row for row in rows if row.may_launch]

    def _launch_up_to(self, num_steps: int) -> bool:
        """Fills the line of unread steps. A broken step is not built upon."""
        launched = False
        while len(self._in_flight) < num_steps:
            rows = self._launchable()
            broken = any(step.error is not None for step in self._in_flight)
            if not rows or broken:
                break
            self._in_flight.append(self._decoder.launch(self._batch.batch, rows))
            launched = True
        return launched

    def _start(self, command: StartRow) -> None:
        assert command.number not in self.rows, f"row {command.number} is there already"
        try:
            row = make_row(
                command,
                self._decoder.make_caches(),
                self._num_vocabulary,
                self._tokenizer,
            )
        except ROW_ERRORS as error:
            row = Row.failed(command)
            self._fail(row, "start", error)
        self.rows[command.number] = row

    def _fail(
        self, row: Row, during: Literal["start", "prefill", "decode"], error: Exception
    ) -> None:
        row.ended = row.broken = True
        self._deliver(RowFailed(row.number, during, f"{type(error).__name__}: {error}"))

    def _run_chunk(self, chunk: RunChunk) -> None:
        row = self.rows[chunk.number]
        for step in self._in_flight:
            self._settle(step)
        self._allocator.begin_chunk()
        begun_ns = time.monotonic_ns()
        try:
            self._decoder.feed(row, chunk.start, chunk.length)
        except ROW_ERRORS as error:
            self._fail(row, "prefill", error)
            return
        finally:
            self._decoded_since_chunk = False
        self._done_ns = time.monotonic_ns()
        peak_bytes = self._allocator.chunk_peak_bytes()
        mx.clear_cache()
        self._deliver(
            ChunkDone(
                number=chunk.number,
                chunk=chunk.chunk,
                start=chunk.start,
                length=chunk.length,
                duration_ns=self._done_ns - begun_ns,
                peak_bytes=peak_bytes,
                active_bytes=mx.get_active_memory(),
            )
        )

    def _settle(self, step: Step) -> None:
        """Waits until the step is computed; keeps what went wrong for the one who reads it."""
        try:
            step.wait()
        except ROW_ERRORS as error:
            step.error = error

    def _drop(self, number: int) -> None:
        row = self.rows.pop(number, None)
        if row is None:
            self._deliver(RowFreed(number, 0))
            return
        self._saved.close(number)
        self._chunks = deque(chunk for chunk in self._chunks if chunk.number != number)
        self._batch = SetBatch(
            self._batch.batch, tuple(other for other in self._batch.numbers if other != number)
        )
        for step in self._in_flight:
            if row in step.rows:
                self._settle(step)
        before = mx.get_active_memory()
        self._decoder.forget(row)
        self._deliver(RowFreed(number, before - mx.get_active_memory()))

    def _deliver_step(self, step: Step) -> None:
        self._settle(step)
        rows = self._read(step) if step.error is None else self._repeat_alone(step)
        done_ns = time.monotonic_ns()
        duration_ns = done_ns - max(step.launched_ns, self._done_ns)
        self._done_ns = done_ns
        self._num_steps += 1
        if self._num_steps % CLEAR_EVERY_STEPS == 0:
            mx.clear_cache()
        if rows:
            self._committed = False
            self._decoded_since_chunk = True
            self._deliver(StepDone(step.batch, tuple(rows), duration_ns))

    def _read(self, step: Step) -> list[RowTokens]:
        """Takes the step's tokens into its rows. Rows that ended before get none."""
        rows = iter(step.rows)
        read: list[RowTokens] = []
        for draws in step.groups:
            tokens, normalizers = integers(draws.tokens), floats(draws.normalizers)
            for token, normalizer, logprobs in zip(
                tokens, normalizers, draws.logprobs, strict=True
            ):
                row = next(rows)
                if row.dropped:
                    read.append(RowTokens(row.number, (), None))
                elif row.ended:
                    self._take_back(row)
                elif not math.isfinite(normalizer):
                    self._fail(row, "decode", ArithmeticError("the logits are not finite"))
                else:
                    read.append(row_tokens(row, token, row.accept(token), logprobs))
        return read

    def _take_back(self, row: Row) -> None:
        """Takes the position back that was fed for a row that had ended. Recurrent state cannot
        be taken back; it is never saved after the end.
        """
        if row.caches and attention.can_cut(row.caches):
            row.cached = len(row.tokens) - 1
            attention.cut(row.caches, row.cached)

    def _repeat_alone(self, step: Step) -> list[RowTokens]:
        """A step of several rows failed: each of them is computed alone, to see whose fault it is.
        A step that was launched upon it is void.
        """
        later = [row for void in self._in_flight for row in void.rows if row not in step.rows]
        self._in_flight.clear()
        results = [RowTokens(row.number, (), None) for row in step.rows if row.dropped]
        for row in [row for row in step.rows if not row.ended]:
            results += self._repeat(step.batch, row)
        for row in [row for row in later if not row.ended]:
            self._restore(row)
        return results

    def _restore(self, row: Row) -> bool:
        try:
            self._decoder.restore(row)
        except ROW_ERRORS as error:
            self._fail(row, "decode", error)
        return not row.ended

    def _repeat(self, batch: int, row: Row) -> list[RowTokens]:
        if not self._restore(row):
            return []
        alone = self._decoder.launch(batch, [row])
        self._settle(alone)
        if alone.error is None:
            return self._read(alone)
        self._fail(row, "decode", alone.error)
        return []
