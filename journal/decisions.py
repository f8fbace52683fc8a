"""One frozen class per decision: something that `decide` chose."""

from typing import Literal

from journal.bodies import (
    Body,
    CapacityNumbers,
    Event,
    Likeness,
    Orphaning,
    Part,
    PauseReason,
)


class RequestQueued(Event, frozen=True, kw_only=True):
    """The request is taken: it will run. `max_tokens` is the limit that holds from here on."""

    request_id: str
    max_tokens: int
    num_waiting: int


class RequestRejected(Event, frozen=True, kw_only=True):
    """The request is refused at arrival and leaves no trace but this."""

    request_id: str
    reason: Literal[
        "context_length_exceeded",
        "max_tokens_exceeds_capacity",
        "queue_full",
        "server_stopping",
        "key_reused",
    ]
    numbers: CapacityNumbers | None
    num_waiting: int


class RequestJoined(Event, frozen=True, kw_only=True):
    """The request is one that was sent before: its client gets the answer of `joined_id`, and
    nothing of its own is left.
    """

    request_id: str
    number: int
    joined_id: str
    by: Likeness


class RequestAdopted(Event, frozen=True, kw_only=True):
    """The request has a client again, the one that sent it again as `adopter_id`. It had none for
    `orphaned_ns`, for the reason `orphaned_by` (null: it had one all the time).
    """

    request_id: str
    number: int
    adopter_id: str
    adopter_number: int
    by: Likeness
    orphaned_by: Orphaning | None
    orphaned_ns: int
    num_output_tokens: int


class RequestAdmitted(Event, frozen=True, kw_only=True):
    """The request gets a row: its upper bound of memory is reserved. `num_known_tokens` = prompt +
    output so far.

    It starts from `num_cached_tokens` tokens in `num_blocks` saved blocks, of which `last_hash` is
    the last. `parted_at_tokens` is where its tokens parted from the nearest known chain, and
    `parted_because` why no more of it is used; `waited_ns` is how long it has waited for blocks of
    another request.
    """

    request_id: str
    number: int
    num_known_tokens: int
    num_cached_tokens: int
    reserved_bytes: int
    in_use_bytes: int
    ceiling_bytes: int | None
    num_admitted: int
    solo: bool
    num_blocks: int = 0
    num_memory_tokens: int = 0
    num_disk_tokens: int = 0
    parted_because: str = "off"
    waited_ns: int = 0
    parted_at_tokens: int = 0
    last_hash: str = ""


class RequestDeferred(Event, frozen=True, kw_only=True):
    """The head of the queue waits for a block that another request is computing, until a time at
    most.
    """

    request_id: str
    number: int
    hash: str
    computed_by: int
    until_ns: int


class PlannedBlock(Body, frozen=True, kw_only=True):
    """What is to be saved of block `index` of a request; `parent` is the block before it."""

    index: int
    hash: str
    part: Part
    parent: str = ""


class BlockSavePlanned(Event, frozen=True, kw_only=True):
    """The engine is to hand these full blocks of a row to the writers."""

    request_id: str
    number: int
    blocks: tuple[PlannedBlock, ...]


class BlocksEvicted(Event, frozen=True, kw_only=True):
    """Blocks, and states of blocks, that leave the disk after this commit. `freed_bytes` is their
    recorded size.
    """

    domain: str
    hashes: tuple[str, ...]
    states: tuple[str, ...]
    freed_bytes: int
    reason: Literal["budget", "reserve", "age", "cleared", "never_matched", "bad"]
    tails: tuple[str, ...] = ()


class TierShrunk(Event, frozen=True, kw_only=True):
    """Blocks that leave memory; their files stay. `pressure`: usage is over the high mark."""

    hashes: tuple[str, ...]
    freed_bytes: int
    reason: Literal["budget", "pressure"] = "budget"
    usage_bytes: int | None = None


class ReclaimStarted(Event, frozen=True, kw_only=True):
    """The allocator is to give back what it keeps for reuse, at the next step boundary."""

    usage_bytes: int
    ceiling_bytes: int
    expected_bytes: int
    num_admitted: int


class EmergencyDeclared(Event, frozen=True, kw_only=True):
    """Usage is over the emergency mark, also without what the allocator keeps."""

    usage_bytes: int
    ceiling_bytes: int
    num_admitted: int


class PauseStarted(Event, frozen=True, kw_only=True):
    """One row is to be held, for `reason` (no_room: the next chunk of the row that is served first
    does not fit). It leaves the batch; when its chain is durable, its memory is given back.

    `rank` is its place among `num_candidates` rows that could be held (0: it was named by hand);
    holding it gives `frees_bytes` back, of which `unsaved_bytes` are still to be written.
    """

    request_id: str
    number: int
    reason: PauseReason
    usage_bytes: int
    ceiling_bytes: int | None
    rank: int
    num_candidates: int
    frees_bytes: int
    unsaved_bytes: int
    num_cached_tokens: int
    num_output_tokens: int


class TailSavePlanned(Event, frozen=True, kw_only=True):
    """The engine is to hand what the row holds behind `tail_start` to the writers, once it has come
    to rest.
    """

    request_id: str
    number: int
    tail_start: int


class ChainPinned(Event, frozen=True, kw_only=True):
    """The first `num_blocks` blocks of the request, the last of which is `last_hash`, and its tail
    stay on disk until `chain_unpinned`: together they are the KV of its first `num_tokens` tokens.
    """

    request_id: str
    number: int
    num_blocks: int
    last_hash: str
    tail_bytes: int
    num_tokens: int


class KvDropped(Event, frozen=True, kw_only=True):
    """The request is held with its tokens only, since its KV cannot be saved or may not stay; it is
    computed again later, from what of its chain is on disk.
    """

    request_id: str
    number: int
    reason: Literal["disk_full", "io_error", "not_taken", "not_saved", "alone"]
    num_cached_tokens: int


class RequestPaused(Event, frozen=True, kw_only=True):
    """The request is held. `had_row`: its row is dropped now."""

    request_id: str
    number: int
    reason: PauseReason
    had_row: bool
    num_cached_tokens: int
    num_output_tokens: int


class ResumeStarted(Event, frozen=True, kw_only=True):
    """A held request gets a row again, which is filled from disk: its bytes are reserved.

    The numbers are those of `request_admitted`; with `has_tail` its own tail follows the blocks.
    `held_ns` is how long it was held.
    """

    request_id: str
    number: int
    num_known_tokens: int
    num_cached_tokens: int
    reserved_bytes: int
    in_use_bytes: int
    ceiling_bytes: int | None
    num_admitted: int
    solo: bool
    num_blocks: int
    has_tail: bool
    num_memory_tokens: int
    num_disk_tokens: int
    parted_because: str
    held_ns: int


class RequestResumed(Event, frozen=True, kw_only=True):
    """The request goes on: its row holds `num_cached_tokens` tokens, and `num_lost_tokens` that it
    had before its pause are to be computed again.
    """

    request_id: str
    number: int
    num_cached_tokens: int
    num_lost_tokens: int


class ChainUnpinned(Event, frozen=True, kw_only=True):
    """What the request pinned may go again. Its tail, if `tail_bytes` is not 0, is unlinked after
    this commit.
    """

    request_id: str
    number: int
    domain: str
    num_blocks: int
    last_hash: str
    num_tokens: int
    tail_bytes: int
    reason: Literal["resumed", "ended", "lost"]


class PrefillChunkPlanned(Event, frozen=True, kw_only=True):
    """The engine is to feed tokens `start` to `start + length` of the request. One chunk is
    planned at a time.
    """

    request_id: str
    number: int
    chunk: int
    start: int
    length: int


class PrefillChunkCommitted(Event, frozen=True, kw_only=True):
    """The chunk counts: the row's caches hold exactly the first `num_cached_tokens` tokens."""

    request_id: str
    num_cached_tokens: int


class BatchChanged(Event, frozen=True, kw_only=True):
    """From its next launch on the engine decodes `numbers` together, until the next change."""

    batch: int
    numbers: tuple[int, ...]
    joined: tuple[int, ...]
    left: tuple[int, ...]


class RequestRetried(Event, frozen=True, kw_only=True):
    """A row that failed goes back to the queue with its tokens; its caches are dropped."""

    request_id: str
    number: int
    retry: int


class RequestFinished(Event, frozen=True, kw_only=True):
    """The request reached its end: a stop string, the end of the turn, or its length.

    Its prompt is what its row got from memory, from disk and by prefill, in the admission that led
    to its end. The other ends have the same three numbers, which then may be less than the prompt.
    """

    request_id: str
    number: int
    reason: Literal["stop", "end_of_turn", "length"]
    num_prompt_tokens: int
    num_output_tokens: int
    num_memory_tokens: int = 0
    num_disk_tokens: int = 0
    num_prefilled_tokens: int = 0


class RequestCancelled(Event, frozen=True, kw_only=True):
    """The request was ended from outside. `had_row`: it was in the engine, and its row is dropped
    with it. Of those without a client `client_gone` has lost it, `nobody_attached` was found by a
    start and waited in vain, and `on_restart` was to end with its server.
    """

    request_id: str
    number: int
    reason: Literal["cancel_requested", "client_gone", "deadline", "nobody_attached", "on_restart"]
    num_output_tokens: int
    had_row: bool = False
    num_memory_tokens: int = 0
    num_disk_tokens: int = 0
    num_prefilled_tokens: int = 0


class RequestAborted(Event, frozen=True, kw_only=True):
    """The server gave the request up, and says why. `had_row`: it was in the engine, and its row is
    dropped with it.
    """

    request_id: str
    number: int
    reason: Literal["engine_failed", "server_deaths", "memory", "memory_wait"]
    detail: str
    num_output_tokens: int
    had_row: bool = False
    num_memory_tokens: int = 0
    num_disk_tokens: int = 0
    num_prefilled_tokens: int = 0
