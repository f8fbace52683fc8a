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

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from journal.events import ModelFacts, PlannedBlock
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


@dataclass(frozen=True, slots=True)
class SaveBlocks:
    """Cut these full blocks out of the row, evaluated, and hand them to `KvPort.save`.

    A block is positions that were committed; a state is that of the position where the row is now.
    """

    number: int
    blocks: tuple[PlannedBlock, ...]


@dataclass(frozen=True, slots=True)
class Tail:
    """The file with what a held request had behind its last pinned block: positions `start` to
    `end`, and the state at `end` where layers cannot be cut.
    """

    request_id: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class SaveTail:
    """Cut what the row holds behind position `tail_start`, evaluated, and hand it to
    `KvPort.save_tail`.

    The row is in no batch any more, but the step that was launched with it may still have to come
    in, be delivered and be released: the engine waits until then, so that what is cut are the
    committed positions, all known tokens but the last. A row that ended meanwhile is refused.
    """

    number: int
    request_id: str
    tail_start: int


@dataclass(frozen=True, slots=True)
class ReclaimMemory:
    """Give back what the allocator keeps for reuse, between two pieces of work. Answered by
    `MemoryReturned`.
    """


@dataclass(frozen=True, slots=True)
class RestoreRow:
    """Fill the row, which is new, from these blocks in order, up to `num_tokens` positions.

    `states` are the depths, in blocks, at which a state is kept, the deepest last; empty where
    every layer can be cut. With a `tail`, its positions follow the blocks, and `num_tokens` is its
    end. Answered by `RowRestored`. Other rows decode meanwhile, at most one block of the restore
    between two of their steps.
    """

    number: int
    hashes: tuple[str, ...]
    num_tokens: int
    states: tuple[int, ...]
    tail: Tail | None = None


EngineCommand = (
    StartRow
    | RestoreRow
    | SaveBlocks
    | SaveTail
    | ReclaimMemory
    | RunChunk
    | SetBatch
    | ReleaseStep
    | DropRow
)


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """The allocator's counters, in bytes: in use, kept for reuse, and the peak of those in use
    since the reading before.
    """

    active_bytes: int
    cached_bytes: int
    peak_bytes: int


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
    kv_domain: str = ""


@dataclass(frozen=True, slots=True)
class BadFile:
    """A saved file that could not be used."""

    hash: str
    part: Literal["block", "state", "tail"]
    reason: Literal["missing", "corrupt", "io_error"]
    detail: str


@dataclass(frozen=True, slots=True)
class RowRestored:
    """The row holds its first `num_tokens` tokens: all that was asked for, or up to the last
    position before a bad file from which the row can go on (with layers that cannot be cut: the
    deepest good state), which may be 0. `read_bytes` were read from disk.

    `bad` are files that were to be used. `lost` are others of the chain that were looked at then
    and are missing or damaged as well.
    """

    number: int
    num_tokens: int
    num_memory_tokens: int
    num_disk_tokens: int
    read_bytes: int
    duration_ns: int
    bad: tuple[BadFile, ...] = ()
    lost: tuple[BadFile, ...] = ()


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
class MemoryReturned:
    """The allocator has given back what it kept: `freed_bytes` is its cache before less after."""

    freed_bytes: int
    active_bytes: int
    cached_bytes: int
    duration_ns: int


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


EngineResult = (
    EngineLoaded
    | RowRestored
    | ChunkDone
    | StepDone
    | RowFreed
    | MemoryReturned
    | RowFailed
    | EngineDied
)
Deliver = Callable[[EngineResult], None]

Caches = Sequence[Any]
"""One cache object per layer, as the model makes them; opaque outside the engine and its port."""


class Restoring(Protocol):
    """A restore in progress, driven in the engine's thread."""

    def advance(self, *, wait: bool) -> RowRestored | None:
        """Copies one block, if one has been read; with `wait`, as soon as one has. The result once
        it is over.
        """
        ...

    def close(self) -> None:
        """Gives the restore up: its row is dropped."""
        ...


class KvPort(Protocol):
    """How rows are saved and restored: given to the engine, called in its thread only, so that the
    engine knows nothing of files and the block store nothing of the engine.
    """

    def describe(self, caches: Caches, num_tokens: int) -> str:
        """Called once, when the model is loaded, with the caches of a row that holds `num_tokens`
        tokens: what they look like decides the domain,
        which is returned. Raises ModelError when a cache class cannot be saved.
        """
        ...

    def save(self, caches: Caches, blocks: Sequence[PlannedBlock]) -> None:
        """Takes evaluated copies of these blocks. Never waits; what comes of each is reported, also
        when this raises what the model's libraries raise.
        """
        ...

    def refuse(self, blocks: Sequence[PlannedBlock]) -> None:
        """Says of blocks that `save` will not be called: their row has failed."""
        ...

    def save_tail(self, caches: Caches, command: SaveTail, end: int) -> None:
        """Takes an evaluated copy of what these caches, which hold `end` positions, have behind
        `tail_start`. Never waits. What comes of it is reported as chain_saved or
        chain_save_failed, also when this raises what the model's libraries raise.
        """
        ...

    def refuse_tail(self, command: SaveTail, reason: str) -> None:
        """Says that `save_tail` will not be called: the row is gone, has ended or has failed."""
        ...

    def restore(
        self, caches: Caches, command: RestoreRow, num_room_tokens: int, ready: Callable[[], None]
    ) -> Restoring:
        """Begins to fill empty caches, with room for `num_room_tokens` positions. `ready` is
        called, in any thread, when `advance` has something to do.
        """
        ...


class Engine(Protocol):
    """See the module's text. `start` returns at once: loading happens in the engine's thread."""

    def start(self, deliver: Deliver, kv: KvPort | None = None) -> None: ...

    def submit(self, command: EngineCommand) -> None: ...

    def read_memory(self) -> MemoryReading:
        """The allocator's counters now. May be called in any thread, at any time; all are 0 before
        the model is loaded.
        """
        ...

    def stop(self) -> None:
        """Ends the thread after the work in hand, and waits for it."""
        ...
