"""The one object that HTTP sees. All of it is called on the asyncio thread, and nothing waits for
the loop or the engine: what has to come from them is awaited.
"""

import secrets
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from journal.events import Limits, ModelFacts
from scheduler.engine.model import Tokenizer
from scheduler.memory import max_context_tokens
from scheduler.settings import Settings
from scheduler.streams import Arrival, RequestStream

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32 in lower case: nothing in it is mistaken for another letter."""

T = TypeVar("T")


class Saturated(Exception):
    """The server cannot take a request now: a 503. `retry_after_s` is when to come again."""

    def __init__(self, reason: str, retry_after_s: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class Exit:
    """Why the scheduler ended: the process's exit status, and one line for people if it is not 0.

    0 clean, 1 a bug, 2 the model cannot be loaded, 3 the journal is broken, 4 the engine died.
    """

    status: int
    message: str = ""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as HTTP needs it; there before its weights are."""

    name: str
    tokenizer: Tokenizer
    facts: ModelFacts
    limits: Limits
    blas: str

    def max_context_tokens(self) -> int:
        """The most tokens, prompt and output, that one request can have on this server."""
        return max_context_tokens(self.facts, self.limits)


class RequestView(msgspec.Struct, frozen=True, kw_only=True):
    """One request as people see it. `state` is its phase; times are Unix nanoseconds, ages
    milliseconds. `reason` and `detail` say how it ended.
    """

    id: str
    client_request_id: str | None
    route: str
    model_fingerprint: str
    state: str
    held_reason: str | None
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_tokens: int
    max_tokens: int
    reserved_bytes: int
    received_at_ns: int
    admitted_at_ns: int | None
    ended_at_ns: int | None
    age_ms: int
    retries: int
    deaths: int
    solo: bool
    reason: str | None
    detail: str | None


class ServerView(msgspec.Struct, frozen=True, kw_only=True):
    """All open requests and what they take, as of one boundary between two steps."""

    run_id: int
    step: int
    now_ns: int
    engine_ready: bool
    stopping: bool
    requests: list[RequestView]
    num_waiting: int
    num_held: int
    num_admitted: int
    batch: int
    batch_rows: int
    reserved_bytes: int
    leaving_bytes: int
    weights_bytes: int
    ceiling_bytes: int | None


@dataclass(frozen=True, slots=True)
class Readiness:
    """What /ready says. `reason` is empty when it is ready."""

    ready: bool
    reason: str
    last_step_age_ms: int
    work_waits: bool
    loading: bool


class Service:
    """See the module's text. Made by `scheduler.wiring.build`; `start` comes after the listening."""

    settings: Settings
    served: ServedModel | None

    def new_request_id(self) -> str:
        """`req_` and 26 random characters."""
        return "req_" + "".join(secrets.choice(ALPHABET) for _ in range(26))

    def start(self) -> None:
        """Begins the run: model description, recovery's first step, engine. Returns at once."""

    def stop(self, reason: str) -> None:
        """A clean stop, also from a signal handler; a second call stops at once."""

    async def ended(self) -> Exit:
        """Returns when the scheduler has ended, whoever wanted it; all streams are cut by then."""

    async def served_model(self, timeout_s: float) -> ServedModel | None:
        """The model as soon as it is described; null when that takes longer than the timeout."""

    def submit(self, arrival: Arrival) -> RequestStream:
        """Hands a request to the scheduler. Await `judged()` for its answer.

        Raises Saturated when the inbox is full, the journal cannot be written, or the server
        stops.
        """

    def cancel(self, request_id: str) -> None:
        """Ends the request, if it is open. The stream says when it has ended."""

    def client_gone(self, request_id: str) -> None:
        """The request's connection is lost."""

    async def find(self, request_id: str) -> RequestStream | None:
        """The request's stream: the live one, or one rebuilt from the journal, as long as its
        tokens are kept.
        """

    async def view(self) -> ServerView:
        """All open requests, consistent: as of one boundary between two steps."""

    async def view_request(self, request_id: str) -> RequestView | None:
        """One request: as it is now, or as the journal shows it when it has ended."""

    async def events(self, request_id: str, after_seq: int, limit: int) -> list[dict[str, object]]:
        """The request's events, in order: `seq`, `step`, `source`, `kind`, `at_ns` and `body`."""

    def readiness(self) -> Readiness:
        """Whether it takes requests, and whether the loop goes on while work waits."""
