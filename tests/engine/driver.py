"""Runs the engine's worker in the test's own thread, so that each order of commands and work can
be tried.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from scheduler.engine.base import (
    EngineCommand,
    EngineResult,
    KvPort,
    ReleaseStep,
    RunChunk,
    SetBatch,
    StartRow,
    StepDone,
    TokenLogprobs,
)
from scheduler.engine.mlx_engine import EngineWorker
from scheduler.engine.rows import Row
from scheduler.parameters import SamplingParameters
from tests.engine.models import TinyModel

GREEDY = SamplingParameters(seed=1)

Kind = TypeVar("Kind", bound=EngineResult)


@dataclass
class Letters:
    """A detokenizer for tokens that are characters, from `A` on."""

    segment: str = ""

    def add_token(self, token: int) -> None:
        self.segment += chr(ord("A") + token)

    def finalize(self) -> None:
        return

    @property
    def last_segment(self) -> str:
        segment, self.segment = self.segment, ""
        return segment


@dataclass
class LetterTokenizer:
    """As much of a tokenizer as the engine uses."""

    end_of_turn_ids: Sequence[int] = ()
    vocab_size: int = 128

    @property
    def detokenizer(self) -> Letters:
        return Letters()

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - ord("A") for letter in text]

    def render_chat(self, *_: object, **__: object) -> str:
        return ""


@dataclass
class Driver:
    """`results` is everything that came, in order."""

    model: TinyModel
    end_of_turn_ids: Sequence[int] = ()
    kv: KvPort | None = None
    results: list[EngineResult] = field(default_factory=list[EngineResult])
    num_batches: int = 0
    num_chunks: int = 0

    def __post_init__(self) -> None:
        tokenizer = LetterTokenizer(self.end_of_turn_ids)
        loaded, deliver = self.model.loaded(), self.results.append
        self.worker = EngineWorker(loaded, deliver, tokenizer, self.kv)

    def work(self, *commands: EngineCommand) -> None:
        """Hands the commands over and works until nothing is left to do."""
        for command in commands:
            self.worker.obey(command)
        while self.worker.advance():
            pass

    def add(
        self,
        number: int,
        prompt: Iterable[int],
        *,
        output: Iterable[int] = (),
        max_tokens: int = 1000,
        sampling: SamplingParameters = GREEDY,
        chunk_tokens: int = 4096,
    ) -> None:
        """Starts a row and prefills all but its last token. No batch may be set."""
        prompt = tuple(prompt)
        known = (*prompt, *output)
        self.work(StartRow(number, f"req_{number}", known, len(prompt), max_tokens, sampling))
        for start in range(0, len(known) - 1, chunk_tokens):
            self.num_chunks += 1
            length = min(chunk_tokens, len(known) - 1 - start)
            self.work(RunChunk(number, self.num_chunks, start, length))

    def set_batch(self, *rows: int) -> None:
        """The batch from the next launch on. Nothing is computed before `step`."""
        self.num_batches += 1
        self.worker.obey(SetBatch(self.num_batches, rows))

    def step(self, *commands: EngineCommand) -> StepDone:
        """Commits the step that came last, with these commands, and returns the next one."""
        self.work(*commands, ReleaseStep())
        last = self.of(StepDone)[-1]
        assert self.results[-1] is last, "no step came"
        return last

    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    def of(self, kind: type[Kind]) -> list[Kind]:
        """The results of one kind, in order."""
        return [result for result in self.results if isinstance(result, kind)]

    def row(self, number: int) -> Row:
        return self.worker.rows[number]

    def tokens(self, number: int) -> list[int]:
        """What the row got, as the steps said."""
        rows = [row for step in self.of(StepDone) for row in step.rows if row.number == number]
        return [token for row in rows for token in row.token_ids]

    def logprobs(self, number: int) -> list[TokenLogprobs]:
        rows = [row for step in self.of(StepDone) for row in step.rows if row.number == number]
        return [logprobs for row in rows for logprobs in row.logprobs or ()]
