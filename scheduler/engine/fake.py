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
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal, assert_never

from journal.events import ModelFacts
from scheduler.engine.base import (
    ChunkDone,
    Deliver,
    DropRow,
    EndReason,
    EngineCommand,
    EngineDied,
    EngineLoaded,
    KvPort,
    ReleaseStep,
    RestoreRow,
    Restoring,
    RowFailed,
    RowFreed,
    RowTokens,
    RunChunk,
    SaveBlocks,
    SetBatch,
    StartRow,
    StepDone,
    TokenLogprobs,
)
from scheduler.engine.fake_tokenizer import END_OF_TURN, FakeTokenizer
from scheduler.engine.model import ModelDescription
from scheduler.engine.text import TextStream
from scheduler.settings import FakeSettings

CHARACTERS = bytes(range(0x20, 0x7F))
TWO_BYTES = {7: 0xC3, 8: 0xA9}
"""At these places of every 16 output tokens stand the two halves of one character (é)."""

Phase = Literal["start", "prefill", "decode"]


def fake_facts(context_tokens: int) -> ModelFacts:
    """The model: 1 KiB of keys and values for a token, allocated in steps of 256."""
    return ModelFacts(
        name="fake",
        fingerprint=sha256(f"fake {context_tokens}".encode()).hexdigest(),
        context_tokens=context_tokens,
        weights_bytes=1_000_000,
        kv_bytes_per_token=1024,
        kv_step_tokens=256,
        window_layers=(),
        state_bytes=0,
        transient_bytes_per_token=256,
    )


def prompt_digest(prompt: Iterable[int]) -> bytes:
    """What of the prompt the tokens depend on."""
    return sha256(array("I", prompt).tobytes()).digest()


def draw(digest: bytes, index: int, nonce: int) -> int:
    """64 bits for the output token at this index."""
    seed = digest + index.to_bytes(8, "little") + nonce.to_bytes(8, "little")
    return int.from_bytes(sha256(seed).digest()[:8], "little")


def fake_token(digest: bytes, index: int, nonce: int) -> int:
    """A printable byte, or half of a character of two bytes."""
    half = TWO_BYTES.get(index % 16)
    return half if half is not None else CHARACTERS[draw(digest, index, nonce) % len(CHARACTERS)]


def fake_logprobs(token: int, drawn: int, num_top: int) -> TokenLogprobs:
    """Values that a float32 holds exactly, the most likely first, the token itself among them."""
    chosen = -(drawn % 512) / 512
    others = ((32 + (token + 1 + i) % 95, chosen - (i + 1) / 512) for i in range(num_top - 1))
    return TokenLogprobs(chosen, ((token, chosen), *others) if num_top else ())


@dataclass(slots=True)
class Failure:
    """A failure to come: of row `number`, in this work, once `at` tokens are cached or put out."""

    number: int
    during: Phase
    at: int = 0
    error: str = "a scripted failure"


@dataclass(slots=True)
class FakeCache:
    """A fake row's KV: the tokens that were fed, so that what is saved and restored can be told
    from anything else.
    """

    tokens: "array[int]" = field(default_factory=lambda: array("I"))


@dataclass(slots=True)
class FakeRow:
    """A row: its known tokens, and its caches."""

    number: int
    tokens: list[int]
    num_prompt_tokens: int
    max_tokens: int
    digest: bytes
    text: TextStream
    ends_turn: bool
    num_top: int | None
    caches: list[FakeCache] = field(default_factory=lambda: [FakeCache()])
    ended: EndReason | None = None
    failed: bool = False

    @property
    def num_cached_tokens(self) -> int:
        """The positions that its caches hold."""
        return len(self.caches[0].tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    def feed(self, end: int) -> None:
        """Its caches hold the first `end` tokens from here on."""
        kept = self.caches[0].tokens
        assert list(kept) == self.tokens[: len(kept)], f"row {self.number} holds other tokens' KV"
        kept.extend(self.tokens[len(kept) : end])

    @property
    def decodes(self) -> bool:
        return self.ended is None and not self.failed


def make_row(command: StartRow, turn_tokens: int) -> FakeRow:
    """A row with empty caches, whose text has seen the output so far."""
    tokenizer = FakeTokenizer()
    sampling = command.sampling
    ends = () if sampling.ignore_end_of_turn else tuple(tokenizer.end_of_turn_ids)
    text = TextStream(tokenizer.detokenizer, sampling.stop, ends)
    for token in command.token_ids[command.num_prompt_tokens :]:
        text.add(token)
    return FakeRow(
        number=command.number,
        tokens=list(command.token_ids),
        num_prompt_tokens=command.num_prompt_tokens,
        max_tokens=command.max_tokens,
        digest=prompt_digest(command.token_ids[: command.num_prompt_tokens]),
        text=text,
        ends_turn=turn_tokens > 0 and not sampling.ignore_end_of_turn,
        num_top=sampling.top_logprobs if sampling.logprobs else None,
    )


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
        self.ahead: StepDone | None = None
        self.unreleased = False
        self.chunk_is_next = True
        self.loaded = False
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
        if self.commands:
            self.obey(self.commands.popleft())
        elif self.restores and self.advance_restores():
            pass
        elif self.ahead is not None and not self.unreleased:
            self.hand_over(self.ahead)
        elif self.chunks and (self.chunk_is_next or not self.can_launch()):
            self.run_chunk(self.chunks.popleft())
        elif self.can_launch():
            self.launch()
        else:
            return False
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
        self.loaded = True
        domain = "" if self.kv is None else self.kv.describe([FakeCache(array("I", [0]))], 1)
        self.deliver(EngineLoaded(self.facts, False, note="", load_ns=0, kv_domain=domain))
        return True

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
            case RestoreRow():
                self.restore(command)
            case _:
                assert_never(command)

    def save(self, command: SaveBlocks) -> None:
        assert self.kv is not None, "blocks are saved where there is a store"
        row = self.rows[command.number]
        if not row.failed:
            self.kv.save(row.caches, command.blocks)

    def restore(self, command: RestoreRow) -> None:
        assert self.kv is not None, "rows are restored where there is a store"
        row = self.rows[command.number]
        if not row.failed:
            self.restores[command.number] = self.kv.restore(
                row.caches, command, len(row.tokens), self.wake.set
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
                self.deliver(result)
                worked = True
        return worked or (bool(self.restores) and not self.threaded)

    def start_row(self, command: StartRow) -> None:
        assert command.number not in self.rows, f"row {command.number} is there already"
        row = make_row(command, self.settings.turn_tokens)
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
        self.deliver(RowFreed(number, 0 if row is None else self.row_bytes(row)))

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
        self.num_prefilled_tokens += command.length
        active_bytes = self.active_bytes()
        self.deliver(
            ChunkDone(
                number=command.number,
                chunk=command.chunk,
                start=command.start,
                length=command.length,
                duration_ns=command.length * 10**9 // rate if rate else 0,
                peak_bytes=active_bytes + command.length * self.facts.transient_bytes_per_token,
                active_bytes=active_bytes,
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
        row.tokens.append(token)
        row.text.add(token)
        row.ended = row.text.ended or ("length" if index + 1 == row.max_tokens else None)
        logprobs = None
        if row.num_top is not None:
            drawn = draw(row.digest, index, self.nonce)
            logprobs = (fake_logprobs(token, drawn, row.num_top),)
        return RowTokens(number, (token,), row.ended, logprobs)

    def hand_over(self, step: StepDone) -> None:
        """Delivers the step; rows that were dropped since its launch get nothing from it."""
        self.ahead = None
        rows = tuple(
            row if row.number in self.rows else RowTokens(row.number, (), None) for row in step.rows
        )
        if any(row.token_ids for row in rows):
            self.unreleased = True
            self.deliver(StepDone(step.batch, rows, step.duration_ns))

    def fails(self, row: FakeRow, during: Phase, at: int) -> bool:
        """Whether a scripted failure is due. It happens once, and the row does nothing after it."""
        for failure in self.failures:
            if (failure.number, failure.during) == (row.number, during) and at >= failure.at:
                self.failures.remove(failure)
                row.failed = True
                self.deliver(RowFailed(row.number, during, failure.error))
                return True
        return False

    def row_bytes(self, row: FakeRow) -> int:
        """What the row's caches take, in whole steps of allocation."""
        step = self.facts.kv_step_tokens
        return -(-row.num_cached_tokens // step) * step * self.facts.kv_bytes_per_token

    def active_bytes(self) -> int:
        """What the allocator would read."""
        return self.facts.weights_bytes + sum(self.row_bytes(row) for row in self.rows.values())


def assert_boundary(row: FakeRow) -> None:
    """The last known token is pending: drawn, not fed."""
    assert row.num_cached_tokens == len(row.tokens) - 1, (
        f"row {row.number}: {row.num_cached_tokens} cached of {len(row.tokens)} known tokens"
    )


@dataclass(frozen=True)
class FakeSource:
    """The model named `fake`."""

    settings: FakeSettings
    caches: Literal["mlx", "fake"] = "fake"

    def describe(self) -> ModelDescription:
        facts = fake_facts(self.settings.context_tokens)
        return ModelDescription("fake", FakeTokenizer(), facts, blas="none")

    def make_engine(self, description: ModelDescription, nonce: int) -> FakeEngine:
        return FakeEngine(description.facts, nonce, self.settings)
