"""What a journal says of the work that came in: which requests, when, and what they were like.

A journal holds no tokens that may be shown, and need not: that two prompts share a prefix shows in
the hashes of their blocks. From each hash tokens are drawn, so equal hashes give equal tokens, and
what follows the last whole block is the request's own.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from random import Random

from journal import events
from journal.events import Limits, ModelFacts, Record

LOWEST_TOKEN, HIGHEST_TOKEN = 32, 126
"""Token ids of invented prompts: printable characters."""


Wish = (
    events.ClientGone
    | events.ClientAttached
    | events.CancelRequested
    | events.HoldRequested
    | events.ReleaseRequested
)


class NothingRecorded(Exception):
    """The journal has nothing from which a what-if could start. One line."""


@dataclass(slots=True)
class Recorded:
    """One request: when it came (after the first one), what it was like, and what came of it.

    `num_output_tokens` is what it had put out when it ended, or when the journal does. `wishes` are
    what its client and others wanted of it, each so long after its arrival.
    """

    number: int
    request_id: str
    at_ns: int
    num_prompt_tokens: int
    max_tokens: int | None
    received: events.RequestReceived
    num_output_tokens: int = 0
    hashes: tuple[str, ...] = ()
    wishes: list[tuple[int, Wish]] = field(default_factory=list[tuple[int, Wish]])


@dataclass(slots=True)
class Incident:
    """What is taken from a journal. Sizes and limits are those of the first run that served."""

    model: ModelFacts
    limits: Limits
    configuration: dict[str, str | int | float | bool | None]
    requests: list[Recorded]


class Reading:
    """Reads the records of a journal once."""

    def __init__(self) -> None:
        self.model: ModelFacts | None = None
        self.limits: Limits | None = None
        self.configuration: dict[str, str | int | float | bool | None] = {}
        self.requests: dict[str, Recorded] = {}
        self.numbers: dict[int, Recorded] = {}
        self.began_ns: int | None = None

    def take(self, record: Record) -> None:
        """One record."""
        event = record.event
        match event:
            case events.ServerStarted() if self.limits is None:
                self.model, self.limits = event.model, event.limits
                self.configuration = event.configuration
            case events.EngineReady() if not self.requests:
                self.model = event.model
            case events.RequestReceived():
                self.receive(record.at_ns, event)
            case events.BlocksNamed():
                self.name(event)
            case events.TokensDecoded():
                self.decode(event)
            case _ if isinstance(event, Wish):
                self.wish(record.at_ns, event)
            case _:
                pass

    def receive(self, at_ns: int, event: events.RequestReceived) -> None:
        """A request, if the served model is the one that it was for."""
        if self.began_ns is None:
            self.began_ns = at_ns
        request = Recorded(
            number=event.number,
            request_id=event.request_id,
            at_ns=at_ns - self.began_ns,
            num_prompt_tokens=event.num_prompt_tokens,
            max_tokens=event.max_tokens,
            received=event,
        )
        self.requests[event.request_id] = self.numbers[event.number] = request

    def name(self, event: events.BlocksNamed) -> None:
        """The next hashes of a request."""
        request = self.requests.get(event.request_id)
        if request is not None and event.first == len(request.hashes):
            request.hashes += event.hashes

    def decode(self, event: events.TokensDecoded) -> None:
        """Output of requests."""
        for number, count in zip(event.numbers, event.counts, strict=True):
            if number in self.numbers:
                self.numbers[number].num_output_tokens += count

    def wish(self, at_ns: int, event: Wish) -> None:
        """What somebody wanted of a request."""
        request = self.requests.get(event.request_id)
        if request is not None and self.began_ns is not None:
            request.wishes.append((at_ns - self.began_ns - request.at_ns, event))


def incident_of(records: Iterable[Record]) -> Incident:
    """Raises NothingRecorded for a journal without a run or without requests."""
    reading = Reading()
    for record in records:
        reading.take(record)
    if reading.model is None or reading.limits is None:
        raise NothingRecorded("no run of a server is in this journal")
    if not reading.requests:
        raise NothingRecorded("no request is in this journal")
    requests = list(reading.requests.values())
    return Incident(reading.model, reading.limits, reading.configuration, requests)


def prompt_of(request: Recorded, block_tokens: int) -> "array[int]":
    """Tokens for the prompt, as many as it had: those of a block follow from its hash."""
    tokens = array("I")
    for name in request.hashes[: request.num_prompt_tokens // max(1, block_tokens)]:
        tokens.extend(drawn(name, block_tokens))
    tokens.extend(drawn(request.request_id, request.num_prompt_tokens - len(tokens)))
    return tokens


def drawn(name: str, num_tokens: int) -> list[int]:
    """Tokens that follow from a name."""
    random = Random(sha256(name.encode()).digest())
    return random.choices(range(LOWEST_TOKEN, HIGHEST_TOKEN + 1), k=num_tokens)
