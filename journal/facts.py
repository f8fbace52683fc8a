"""One frozen class per fact: something that happened, in the past tense."""

from typing import Literal

from journal.bodies import (
    Event,
    Limits,
    LostReason,
    ModelFacts,
    Part,
    RowEnd,
)


class StateCarried(Event, frozen=True, kw_only=True):
    """The first event of a compacted journal or a bundle: the whole folded state, in the codec of
    the events.
    """

    state_version: int
    through_seq: int
    state: dict[str, object]


class ServerStarted(Event, frozen=True, kw_only=True):
    """A run began: everything that its decisions may depend on besides what happens later."""

    policy_version: int
    code_digest: str
    limits: Limits
    model: ModelFacts
    engine_nonce: int
    configuration: dict[str, str | int | float | bool | None]
    platform: str
    blas: str
    versions: dict[str, str]
    process_id: int


class EngineReady(Event, frozen=True, kw_only=True):
    """The weights are loaded: measured facts replace the estimates, and admission may begin.

    `kv_domain` names all that must be equal before KV may be shared; empty when none is saved.
    """

    model: ModelFacts
    one_row_only: bool
    note: str
    load_ns: int
    kv_domain: str = ""


class ServerStopping(Event, frozen=True, kw_only=True):
    """A clean stop began: nothing is admitted from here on, and no death is charged to what is
    left.
    """

    reason: str


class RequestReceived(Event, frozen=True, kw_only=True):
    """A well-formed request arrived. `max_tokens` is null when the client gave none.

    The digests are HMAC-SHA-256 under the installation's key, or empty: `content_digest` of all
    that it asks, with route and API key, `session_digest` of its client's session, `key_digest` of
    its Idempotency-Key, `owner_digest` of its API key.
    """

    request_id: str
    number: int
    client_request_id: str | None
    model_fingerprint: str
    route: str
    stream: bool
    num_prompt_tokens: int
    max_tokens: int | None
    seed: int
    parameters_digest: str
    num_suffix_tokens: int = 0
    keep_output: bool = True
    content_digest: str = ""
    session_digest: str = ""
    key_digest: str = ""
    owner_digest: str = ""


class BlocksNamed(Event, frozen=True, kw_only=True):
    """The hashes of the request's next full blocks, from block `first` on: of its prompt, or
    filled by its output.
    """

    request_id: str
    first: int
    hashes: tuple[str, ...]


class BlockSaved(Event, frozen=True, kw_only=True):
    """A file is whole and durable: a block's keys and values, or the state at its end."""

    hash: str
    part: Part
    saved_bytes: int
    duration_ns: int


class BlockSaveFailed(Event, frozen=True, kw_only=True):
    """A planned save came to nothing. `not_taken`: the row was gone, or the writers had no room."""

    hash: str
    part: Part
    reason: Literal["disk_full", "io_error", "obstructed", "given_up", "not_taken"]
    detail: str


class SavingStopped(Event, frozen=True, kw_only=True):
    """The disk is full or fails: nothing is saved until `saving_resumed`. After a `bug` of ours, in
    a thread that saves, nothing is before the next start.
    """

    reason: Literal["disk_full", "io_error", "bug"]
    detail: str


class SavingResumed(Event, frozen=True, kw_only=True):
    """A probe came through."""

    stopped_ns: int


class ChainRestored(Event, frozen=True, kw_only=True):
    """The row holds its first `num_tokens` tokens, from so many in each tier; none of them was
    computed.
    """

    request_id: str
    number: int
    num_tokens: int
    num_memory_tokens: int
    num_disk_tokens: int
    read_bytes: int
    duration_ns: int

    def of_prompt(self, num_prompt_tokens: int) -> tuple[int, int]:
        """How many of the prompt's tokens came from memory, and from disk. A request that goes on
        after a restart restores output as well.
        """
        memory = min(self.num_memory_tokens, num_prompt_tokens)
        return memory, min(self.num_disk_tokens, num_prompt_tokens - memory)


class ChainRestoreFailed(Event, frozen=True, kw_only=True):
    """The tail of a held request cannot be used: its row goes on from a block, or a state, before
    it.
    """

    request_id: str
    number: int
    reason: Literal["missing", "corrupt", "io_error"]
    detail: str


class ChainSaved(Event, frozen=True, kw_only=True):
    """What a pausing row holds behind `tail_start` is durable: the tail's keys and values and,
    where layers cannot be cut, their state. 0 bytes: there is nothing behind it, and no file.
    """

    request_id: str
    number: int
    tail_start: int
    num_tokens: int
    tail_bytes: int
    duration_ns: int


class ChainSaveFailed(Event, frozen=True, kw_only=True):
    """The tail of a pausing row came to nothing. `not_taken`: its row was gone or broken."""

    request_id: str
    number: int
    reason: Literal["disk_full", "io_error", "not_taken"]
    detail: str


class BlockCorrupt(Event, frozen=True, kw_only=True):
    """A file that should be read cannot be used. It is forgotten, and the chain ends before it."""

    hash: str
    part: Part
    reason: Literal["missing", "corrupt", "io_error"]
    detail: str


class BlocksLost(Event, frozen=True, kw_only=True):
    """Blocks that the journal knows and the disk has not, or not as they were: found at a start, or
    in a chain of which a restore has found another file bad.
    """

    hashes: tuple[str, ...]
    states: tuple[str, ...]
    reason: LostReason
    tails: tuple[str, ...] = ()


class StoreMeasured(Event, frozen=True, kw_only=True):
    """Free space of the file system with the blocks, and what a look at its files has removed."""

    free_bytes: int
    num_swept: int
    swept_bytes: int


class ClearRequested(Event, frozen=True, kw_only=True):
    """Somebody asked over HTTP that everything that may go leave the disk."""

    by: str


class MemorySampled(Event, frozen=True, kw_only=True):
    """A reading: bytes in use by the allocator, those it keeps for reuse, and its peak since the
    reading before; the process's resident bytes, and those that the machine has available.

    `age_ns` is how old the reading was when the step took it.
    """

    active_bytes: int
    cached_bytes: int
    peak_bytes: int
    process_bytes: int
    available_bytes: int
    age_ns: int = 0


class MemoryReclaimed(Event, frozen=True, kw_only=True):
    """The allocator gave back what it kept. `freed_bytes` is as measured, and may be negative."""

    freed_bytes: int
    active_bytes: int
    cached_bytes: int
    duration_ns: int


class ClockTicked(Event, frozen=True, kw_only=True):
    """Time itself must act: the deadline that the state named has come."""


class PrefillChunkDone(Event, frozen=True, kw_only=True):
    """The engine fed one planned chunk. `peak_bytes` is the allocator's peak since the chunk
    before.
    """

    request_id: str
    chunk: int
    start: int
    length: int
    duration_ns: int
    peak_bytes: int
    active_bytes: int


class TokensDecoded(Event, frozen=True, kw_only=True):
    """One decode step of a batch: `counts[i]` tokens for the request with number `numbers[i]` (0:
    dropped).
    """

    batch: int
    numbers: tuple[int, ...]
    counts: tuple[int, ...]
    ended: tuple[RowEnd, ...]
    duration_ns: int


class KvFreed(Event, frozen=True, kw_only=True):
    """The engine let a row go. `freed_bytes` is the allocator's reading before less after, as
    measured.
    """

    request_id: str
    number: int
    freed_bytes: int


class EngineFailed(Event, frozen=True, kw_only=True):
    """An exception in one row's work, or not-a-number logits. Only that row is touched by it."""

    request_id: str
    number: int
    during: Literal["start", "prefill", "decode"]
    error: str


class ClientGone(Event, frozen=True, kw_only=True):
    """Nobody follows the request any more: the last connection that did was lost."""

    request_id: str


class ClientAttached(Event, frozen=True, kw_only=True):
    """Somebody follows the request again, from a position in its answer."""

    request_id: str


class DrainEnded(Event, frozen=True, kw_only=True):
    """The time in which a clean stop lets rows go on is over: what is left of them is held."""


class CancelRequested(Event, frozen=True, kw_only=True):
    """Somebody asked over HTTP that the request end now."""

    request_id: str


class HoldRequested(Event, frozen=True, kw_only=True):
    """Somebody asked over HTTP that the request be held until it is released."""

    request_id: str


class ReleaseRequested(Event, frozen=True, kw_only=True):
    """Somebody asked over HTTP that a held request go on."""

    request_id: str
