"""What the loop and an engine say to each other.

The engine owns one thread, in which all of its work happens. The loop hands it commands in order
and never waits; the engine hands results to `deliver`, which never blocks. Commands are the
effects of committed events; a result becomes a fact of a later step.

One step ahead. The engine computes decode step k and delivers it. It may then compute step k + 1
for the batch that is set, but delivers it only after `ReleaseStep`, which the loop sends when step
k is committed, after all other commands of that commit. A row that `DropRow` named meanwhile gets
count 0 in step k + 1; a row that merely is not in the new batch still gets its token, and leaves
then. A row that ended in step k gets none from step k + 1. So at every committed boundary the
cached positions of a decoding row are prompt + output - 1: the last token is pending.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

from journal.events import ModelFacts
from scheduler.parameters import SamplingParameters

EndReason = Literal["stop", "end_of_turn", "length"]


@dataclass(frozen=True, slots=True)
class StartRow:
    """Make a row with empty caches for a request.

    `token_ids` is the prompt followed by the output so far; sampler, penalties and stop matcher
    are rebuilt by feeding that output. `max_tokens` bounds the output in all, with what there is
    already.
    """

    number: int
    request_id: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    max_tokens: int
    sampling: SamplingParameters


@dataclass(frozen=True, slots=True)
class RunChunk:
    """Feed tokens `start` to `start + length` of the row. The last known token is never among
    them.
    """

    number: int
    chunk: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class SetBatch:
    """From the next launch on decode these rows together, step after step; none: stand still."""

    batch: int
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReleaseStep:
    """The decode step delivered last is committed: the next may be delivered, and the one after it
    launched.
    """


@dataclass(frozen=True, slots=True)
class DropRow:
    """Free the row's caches. Answered by `RowFreed`, also when the row is unknown (then with 0
    bytes).
    """

    number: int


EngineCommand = StartRow | RunChunk | SetBatch | ReleaseStep | DropRow


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural-log probabilities of one output token: its own, and the most likely ones as (token
    id, value).
    """

    chosen: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class EngineLoaded:
    """The model is loaded and measured. `one_row_only`: the seam's self-test failed, and `note`
    says how.
    """

    model: ModelFacts
    one_row_only: bool
    note: str
    load_ns: int


@dataclass(frozen=True, slots=True)
class ChunkDone:
    """A chunk was fed and evaluated. `peak_bytes` was read and reset after it."""

    number: int
    chunk: int
    start: int
    length: int
    duration_ns: int
    peak_bytes: int
    active_bytes: int


@dataclass(frozen=True, slots=True)
class RowTokens:
    """What one row got in a decode step: no token (dropped), one, or more. `logprobs` runs beside
    `token_ids`.
    """

    number: int
    token_ids: tuple[int, ...]
    ended: EndReason | None
    logprobs: tuple[TokenLogprobs, ...] | None = None


@dataclass(frozen=True, slots=True)
class StepDone:
    """One decode step of the batch with this number."""

    batch: int
    rows: tuple[RowTokens, ...]
    duration_ns: int


@dataclass(frozen=True, slots=True)
class RowFreed:
    """A row's caches are gone. `freed_bytes` is as measured, and may be negative."""

    number: int
    freed_bytes: int


@dataclass(frozen=True, slots=True)
class RowFailed:
    """An exception in this row's work, or not-a-number logits. The row stays until it is dropped,
    and does nothing.
    """

    number: int
    during: Literal["start", "prefill", "decode"]
    error: str


@dataclass(frozen=True, slots=True)
class EngineDied:
    """The engine's thread ended, or the model could not be loaded. Nothing follows."""

    error: str
    while_loading: bool


EngineResult = EngineLoaded | ChunkDone | StepDone | RowFreed | RowFailed | EngineDied
Deliver = Callable[[EngineResult], None]


class Engine(Protocol):
    """See the module's text. `start` returns at once: loading happens in the engine's thread."""

    def start(self, deliver: Deliver) -> None: ...

    def submit(self, command: EngineCommand) -> None: ...

    def stop(self) -> None:
        """Ends the thread after the work in hand, and waits for it."""
        ...
