"""Every event that a journal can hold: one frozen class per fact or decision, in a closed union.

A fact is something that happened (an arrival, an engine result); a decision is what `decide`
chose. The kind of an event is its class name in snake case and is for ever: a released kind keeps
its meaning, and a field is only ever added with a default. Bodies hold ids, counts, digests and
the numbers that explain a choice, never text, tensors or token ids.

Units: `_bytes` are bytes, `_ns` nanoseconds (durations are monotonic), `_tokens` and `num_*` are
counts.
"""

import re
from typing import ClassVar, Literal

import msgspec


def kind_of(name: str) -> str:
    """The kind of the class with this name: `RequestReceived` is `request_received`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A value inside an event's body."""


class Event(
    msgspec.Struct,
    frozen=True,
    kw_only=True,
    forbid_unknown_fields=True,
    tag_field="kind",
    tag=kind_of,
):
    """What all events share: `version` counts the meanings that the body of this kind has had."""

    version: ClassVar[int] = 1


class Limits(Body, frozen=True, kw_only=True):
    """The settings that `decide` reads, as they were at the start of a run (scheduler/settings.py
    explains each).
    """

    max_rows: int
    max_waiting: int
    token_budget: int
    chunk_tokens: int
    chunk_tokens_beside_rows: int
    default_max_tokens: int
    ceiling_bytes: int | None
    max_retries: int
    max_deaths: int


class WindowLayers(Body, frozen=True, kw_only=True):
    """Layers that attend to the last `window_tokens` only: their bytes stop growing there."""

    bytes_per_token: int
    window_tokens: int


class ModelFacts(Body, frozen=True, kw_only=True):
    """What the scheduler knows of the served model. Estimated from its files at first, measured
    once it is loaded.
    """

    name: str
    fingerprint: str
    context_tokens: int
    weights_bytes: int
    kv_bytes_per_token: int
    kv_step_tokens: int
    window_layers: tuple[WindowLayers, ...]
    state_bytes: int
    transient_bytes_per_token: int


class RowEnd(Body, frozen=True, kw_only=True):
    """A row whose request ended in this decode step, and why."""

    number: int
    reason: Literal["stop", "end_of_turn", "length"]


class CapacityNumbers(Body, frozen=True, kw_only=True):
    """The seven numbers that explain why a request never fits."""

    prompt_tokens: int
    max_tokens: int
    required_bytes: int
    capacity_bytes: int | None
    weights_bytes: int
    kv_bytes_per_token: int
    max_context_tokens: int


# Facts


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
    """The weights are loaded: measured facts replace the estimates, and admission may begin."""

    model: ModelFacts
    one_row_only: bool
    note: str
    load_ns: int


class ServerStopping(Event, frozen=True, kw_only=True):
    """A clean stop began: nothing is admitted from here on, and no death is charged to what is
    left.
    """

    reason: str


class RequestReceived(Event, frozen=True, kw_only=True):
    """A well-formed request arrived. `max_tokens` is null when the client gave none."""

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
    """The connection that carried the request was lost."""

    request_id: str


class CancelRequested(Event, frozen=True, kw_only=True):
    """Somebody asked over HTTP that the request end now."""

    request_id: str


# Decisions


class RequestQueued(Event, frozen=True, kw_only=True):
    """The request is taken: it will run. `max_tokens` is the limit that holds from here on."""

    request_id: str
    max_tokens: int
    num_waiting: int


class RequestRejected(Event, frozen=True, kw_only=True):
    """The request is refused at arrival and leaves no trace but this."""

    request_id: str
    reason: Literal[
        "context_length_exceeded", "max_tokens_exceeds_capacity", "queue_full", "server_stopping"
    ]
    numbers: CapacityNumbers | None
    num_waiting: int


class RequestAdmitted(Event, frozen=True, kw_only=True):
    """The request gets a row: its upper bound of memory is reserved. `num_known_tokens` = prompt +
    output so far.
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
    """The request reached its end: a stop string, the end of the turn, or its length."""

    request_id: str
    number: int
    reason: Literal["stop", "end_of_turn", "length"]
    num_prompt_tokens: int
    num_output_tokens: int


class RequestCancelled(Event, frozen=True, kw_only=True):
    """The request was ended from outside. `had_row`: it was in the engine, and its row is dropped
    with it.
    """

    request_id: str
    number: int
    reason: Literal["cancel_requested", "client_gone"]
    num_output_tokens: int
    had_row: bool = False


class RequestAborted(Event, frozen=True, kw_only=True):
    """The server gave the request up, and says why. `had_row`: it was in the engine, and its row is
    dropped with it.
    """

    request_id: str
    number: int
    reason: Literal["engine_failed", "server_deaths"]
    detail: str
    num_output_tokens: int
    had_row: bool = False


Fact = (
    StateCarried
    | ServerStarted
    | EngineReady
    | ServerStopping
    | RequestReceived
    | PrefillChunkDone
    | TokensDecoded
    | KvFreed
    | EngineFailed
    | ClientGone
    | CancelRequested
)
Decision = (
    RequestQueued
    | RequestRejected
    | RequestAdmitted
    | PrefillChunkPlanned
    | PrefillChunkCommitted
    | BatchChanged
    | RequestRetried
    | RequestFinished
    | RequestCancelled
    | RequestAborted
)
AnyEvent = Fact | Decision

FACTS: tuple[type[Event], ...] = Fact.__args__
DECISIONS: tuple[type[Event], ...] = Decision.__args__
KINDS: dict[str, type[Event]] = {kind_of(cls.__name__): cls for cls in FACTS + DECISIONS}

Source = Literal["fact", "decision"]


class Record(msgspec.Struct, frozen=True):
    """An event in its place: what a journal hands out, and what `evolve` folds."""

    seq: int
    run_id: int
    step: int
    source: Source
    at_ns: int
    event: AnyEvent
