"""What the decisions of a step, so far, will have changed: the helpers of `decide` read it beside
the state.
"""

from dataclasses import dataclass, field

from journal.events import Decision, Limits, ModelFacts, PauseReason
from scheduler.request import Request
from scheduler.state import SchedulerState


@dataclass(frozen=True, slots=True)
class Staying:
    """The rows that do not end in this step."""

    num_rows: int
    num_tokens: int
    has_solo: bool


@dataclass(slots=True)
class Draft:
    """The decisions so far, and what of the state they will have changed."""

    decisions: list[Decision] = field(default_factory=list[Decision])
    ended: set[int] = field(default_factory=set[int])
    """Numbers of requests that leave the engine or the queue. Asked for membership only, never
    iterated.
    """
    retried: set[int] = field(default_factory=set[int])
    """Those of them whose row has failed, and that go on. Asked for membership only."""
    committed: dict[int, int] = field(default_factory=dict[int, int])
    """Cached tokens of a request whose chunk is committed in this step."""
    admitted: list[Request] = field(default_factory=list[Request])
    matched: dict[int, int] = field(default_factory=dict[int, int])
    """Tokens that a request admitted in this step gets from saved blocks."""
    queued: dict[int, int] = field(default_factory=dict[int, int])
    """Requests that are taken in this step, with the limit of their output."""
    keys: dict[str, int] = field(default_factory=dict[str, int])
    """Requests that are taken in this step, by the digest of their Idempotency-Key."""
    adopted: set[int] = field(default_factory=set[int])
    """Requests that get a client in this step. Asked for membership only, never iterated."""
    back: list[int] = field(default_factory=list[int])
    """Those of them that wait in the queue again."""
    num_deferred: int = 0
    coming: dict[str, int] = field(default_factory=dict[str, int])
    """Blocks that a request admitted in this step will compute, by its number."""
    saving: set[str] = field(default_factory=set[str])
    """Blocks whose save is planned in this step. Asked for membership only, never iterated."""
    saving_bytes: int = 0
    pausing: dict[int, PauseReason] = field(default_factory=dict[int, PauseReason])
    """Rows whose pause begins in this step, and why."""
    pinned: bool = False
    num_let_in: int = 0
    num_resumed: int = 0
    resumed: set[int] = field(default_factory=set[int])
    """Held requests that begin to go on in this step. Asked for membership only, never iterated."""
    num_added: int = 0
    added_bytes: int = 0
    added_tokens: int = 0
    """Requests that get a row in this step, newcomers and held ones, with what is reserved for
    them.
    """
    has_solo: bool = False
    """Whether one of them runs alone."""
    staying: Staying | None = None
    firm_bytes: int | None = None
    """Sums over all rows, once somebody has asked: they are the same for each who looks for room.
    """
    chunk_open: bool = False
    batch_is_empty: bool = True


def limits_of(state: SchedulerState) -> Limits:
    assert state.limits is not None, "server_started comes first"
    return state.limits


def model_of(state: SchedulerState) -> ModelFacts:
    assert state.model is not None, "server_started comes first"
    return state.model
