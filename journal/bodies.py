"""What events are made of: their base class, and the values inside their bodies.

Bodies hold ids, counts, digests and the numbers that explain a choice, never text, tensors or
token ids. Units: `_bytes` are bytes, `_ns` nanoseconds (durations are monotonic), `_tokens` and
`num_*` are counts.
"""

import re
from typing import ClassVar, Literal

import msgspec


def kind_of(name: str) -> str:
    """The kind of the class with this name: `RequestReceived` is `request_received`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


Part = Literal["block", "state"]
"""Which file of a block: its keys and values, or the state at its end."""

LostReason = Literal["missing", "corrupt"]

PauseReason = Literal["high", "emergency", "no_room", "operator", "client_gone", "drain"]
"""Why a request is held: usage over a mark, no room for a chunk, by hand, its client was lost, or
the server stops.
"""

Likeness = Literal["content", "key"]
"""By what a request that was sent again is known: all that it asks, or its Idempotency-Key."""

Orphaning = Literal["client_gone", "restart"]
"""Why a request has no client: its connection was lost, or a start of the server has found it."""


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


class KvLimits(Body, frozen=True, kw_only=True):
    """The settings of saved KV that `decide` reads. `state_every_blocks` 0: chosen by the model's
    sizes.
    """

    block_tokens: int
    max_bytes: int
    memory_bytes: int
    writing_bytes: int
    reserve_bytes: int
    max_age_ns: int
    state_every_blocks: int
    await_ns: int


class MemoryLimits(Body, frozen=True, kw_only=True):
    """The settings of memory that `decide` reads. Marks are permille of the ceiling.

    `act_limit_ns` is how long an action's expected bytes count as given back. `reserve` is what an
    admission holds for a row: all that it may ever need (bound), its tokens and `growth_tokens` of
    output (expected), or what it has and one more chunk (chunk). With `is_auto` the ceiling
    follows what other programs leave, less `machine_reserve_bytes`.
    """

    low_permille: int
    high_permille: int
    emergency_permille: int
    hysteresis_permille: int
    act_limit_ns: int
    reserve: Literal["bound", "expected", "chunk"]
    growth_tokens: int
    min_progress_tokens: int
    pause: bool
    is_auto: bool
    machine_reserve_bytes: int
    wait_limit_ns: int


class OrphanLimits(Body, frozen=True, kw_only=True):
    """The settings of requests without a client that `decide` reads.

    `grace_ns`: how long one whose connection was lost is held; 0: it ends at once.
    `restart_grace_ns`: how long one that a start of the server has found runs on, or is held, and
    `on_restart` which of them. `adopt`: whether a request that is sent again takes the place of an
    equal one without a client. `retention_ns`: how long an answer that is finished is kept.
    """

    grace_ns: int
    restart_grace_ns: int
    on_restart: Literal["resume", "hold", "cancel"]
    adopt: bool
    retention_ns: int


class Limits(Body, frozen=True, kw_only=True):
    """The settings that `decide` reads, as they were at the start of a run (scheduler/settings.py
    explains each). 0 in `gap_ns` and `max_age_ns`: no such bound. Without `orphans` a request whose
    client is lost ends at once, and one that a start has found runs on.
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
    kv: KvLimits | None = None
    memory: MemoryLimits | None = None
    gap_ns: int = 0
    max_age_ns: int = 0
    orphans: OrphanLimits | None = None


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
