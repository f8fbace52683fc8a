"""What a journal says of the work that came in: which requests, when, and what they were like.

A journal holds no tokens that may be shown, and need not: that two prompts share a prefix shows in
the hashes of their blocks. From each hash tokens are drawn, so equal hashes give equal tokens, and
what follows the last whole block is the request's own.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import shake_256

import msgspec

from journal import events
from journal.events import AnyEvent, Limits, ModelFacts, Record
from journal.rows import RunRow
from scheduler.request import Request
from scheduler.state import SchedulerState
from scheduler.whatif.carried import NothingRecorded, open_requests, state_of

LOWEST_TOKEN, HIGHEST_TOKEN = 32, 126
"""Token ids of invented prompts: printable characters."""

NUM_LETTERS = HIGHEST_TOKEN - LOWEST_TOKEN + 1
LETTERS = bytes(LOWEST_TOKEN + byte % NUM_LETTERS for byte in range(256))

FAKE = "fake"
"""The name of the model that computes nothing: what it saves is in no allocator of an engine."""

Wish = (
    events.ClientGone
    | events.ClientAttached
    | events.CancelRequested
    | events.HoldRequested
    | events.ReleaseRequested
)


@dataclass(slots=True)
class Recorded:
    """One request: when it came (after the first one), what it was like, and what came of it.

    `num_output_tokens` is what it had put out when it ended, or when the journal does; where it was
    ended from outside, that does not tell how long it would have been. `wishes` are what its client
    and others wanted of it, each so long after its arrival.

    One that was open when the journal begins comes at its beginning: `num_prompt_tokens` and
    `max_tokens` are then what it had so far, and what was left to it.
    """

    number: int
    request_id: str
    at_ns: int
    num_prompt_tokens: int
    max_tokens: int | None
    received: events.RequestReceived
    num_output_tokens: int = 0
    tells_length: bool = True
    ended: bool = False
    hashes: tuple[str, ...] = ()
    wishes: list[tuple[int, Wish]] = field(default_factory=list[tuple[int, Wish]])

    @property
    def left_held(self) -> bool:
        """Whether somebody held it, and had not let it go where the journal ends."""
        holds = (events.HoldRequested, events.ReleaseRequested)
        wanted = [wish for _, wish in self.wishes if isinstance(wish, holds)]
        return not self.ended and bool(wanted) and isinstance(wanted[-1], events.HoldRequested)

    @property
    def known_length(self) -> int | None:
        """After how many tokens of output it ends, where something tells: what an end from outside
        or somebody's hold has cut short might have gone on.
        """
        return self.num_output_tokens if self.tells_length and not self.left_held else None


@dataclass(slots=True)
class Life:
    """One run of the server, from its start: how long it took to load, when the last was heard of
    it, and since when it was stopping. One that never was was killed.
    """

    began_ns: int = 0
    load_ns: int = 0
    ended_ns: int = 0
    stop_ns: int | None = None


@dataclass(slots=True)
class Incident:
    """What is taken from a journal. Sizes and limits are those of the first run; times are counted
    from its start, or from where the journal begins. `free_bytes`: what its disk had. `carried`
    are the ids of the requests that were open there, and whether they had put out anything.
    """

    model: ModelFacts
    limits: Limits
    configuration: dict[str, str | int | float | bool | None]
    requests: list[Recorded]
    lives: list[Life]
    free_bytes: int | None
    policy_version: int
    carried: dict[str, bool] = field(default_factory=dict[str, bool])

    @property
    def num_open(self) -> int:
        """How many requests had not ended where the journal ends."""
        return sum(not request.ended for request in self.requests)


class Reading:
    """Reads the records of a journal once. `run` is the one in which it begins, where it does not
    begin with a start.
    """

    def __init__(self, run: RunRow | None) -> None:
        self.run = run
        self.carried: dict[str, bool] = {}
        self.model: ModelFacts | None = None
        self.limits: Limits | None = None
        self.configuration: dict[str, str | int | float | bool | None] = {}
        self.requests: dict[str, Recorded] = {}
        self.numbers: dict[int, Recorded] = {}
        self.began_ns = 0
        self.lives: list[Life] = []
        self.free_bytes: int | None = None
        self.policy_version = 0

    def take(self, record: Record) -> None:
        """One record."""
        if isinstance(record.event, events.StateCarried):
            self.carry(record.at_ns, state_of(record.event))
        elif isinstance(record.event, events.ServerStarted):
            self.begin(record.at_ns, record.event)
        if not self.lives:
            return
        at_ns = record.at_ns - self.began_ns
        self.lives[-1].ended_ns = at_ns
        self.serve(at_ns, record.event)

    def carry(self, at_ns: int, state: SchedulerState) -> None:
        """A run that went on before the first record, with all that was open."""
        if self.run is None or state.model is None or state.limits is None:
            return
        self.began_ns = at_ns
        self.model, self.limits = state.model, state.limits
        self.configuration = msgspec.json.decode(self.run.configuration)
        self.policy_version = state.policy_version
        self.free_bytes = state.index.free_bytes
        self.lives.append(Life(stop_ns=0 if state.stopping else None))
        for request in open_requests(state):
            self.carried[request.request_id] = request.num_output_tokens > 0
            self.add(recorded_of(request, has_client=request.number not in state.lost))

    def begin(self, at_ns: int, event: events.ServerStarted) -> None:
        """A run. The first one counts, and where its times begin."""
        if not self.lives:
            self.began_ns = at_ns
            self.model, self.limits = event.model, event.limits
            self.configuration = event.configuration
        self.policy_version = event.policy_version
        self.lives.append(Life(began_ns=at_ns - self.began_ns))

    def serve(self, at_ns: int, event: AnyEvent) -> None:
        """What happens in a run."""
        match event:
            case events.EngineReady():
                self.lives[-1].load_ns = at_ns - self.lives[-1].began_ns
                if not self.requests:
                    self.model = event.model
            case events.ServerStopping():
                self.lives[-1].stop_ns = at_ns
            case events.StoreMeasured() if self.free_bytes is None:
                self.free_bytes = event.free_bytes
            case _:
                self.ask(at_ns, event)

    def ask(self, at_ns: int, event: AnyEvent) -> None:
        """What is told of requests."""
        match event:
            case events.RequestReceived():
                self.receive(at_ns, event)
            case events.BlocksNamed():
                self.name(event)
            case events.TokensDecoded():
                self.decode(event)
            case events.RequestCancelled() | events.RequestAborted():
                self.end(event.request_id, tells_length=False)
            case events.RequestFinished() | events.RequestRejected() | events.RequestJoined():
                self.end(event.request_id, tells_length=True)
            case _ if isinstance(event, Wish):
                self.wish(at_ns, event)
            case _:
                pass

    def receive(self, at_ns: int, event: events.RequestReceived) -> None:
        """A request."""
        self.add(
            Recorded(
                number=event.number,
                request_id=event.request_id,
                at_ns=at_ns,
                num_prompt_tokens=event.num_prompt_tokens,
                max_tokens=event.max_tokens,
                received=event,
            )
        )

    def add(self, request: Recorded) -> None:
        """A request, by its id and by its number."""
        self.requests[request.request_id] = self.numbers[request.number] = request

    def end(self, request_id: str, *, tells_length: bool) -> None:
        """An end of a request that is known."""
        request = self.requests.get(request_id)
        if request is not None:
            request.ended = True
            request.tells_length &= tells_length

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
        if request is not None:
            request.wishes.append((at_ns - request.at_ns, event))


def incident_of(records: Iterable[Record], run: RunRow | None = None) -> Incident:
    """What these records tell. `run` is the one that they begin in, where they begin with a carried
    state, which does not have its settings. Raises NothingRecorded for a journal without a run or
    without requests.
    """
    reading = Reading(run)
    for record in records:
        reading.take(record)
    if reading.model is None or reading.limits is None:
        raise NothingRecorded("no start of a server is in this journal, or this part of one")
    if not reading.requests:
        raise NothingRecorded("no request is in this journal")
    return Incident(
        reading.model,
        reading.limits,
        reading.configuration,
        list(reading.requests.values()),
        reading.lives,
        reading.free_bytes,
        reading.policy_version,
        reading.carried,
    )


def recorded_of(request: Request, *, has_client: bool) -> Recorded:
    """A request that was open when the journal begins. What it had put out is prompt now, and what
    was wanted of it by then is wanted at once.
    """
    most = request.max_tokens or request.asked_max_tokens
    left = None if most is None else max(1, most - request.num_output_tokens)
    received = events.RequestReceived(
        request_id=request.request_id,
        number=request.number,
        client_request_id=None,
        model_fingerprint=request.model_fingerprint,
        route=request.route,
        stream=True,
        num_prompt_tokens=request.num_known_tokens,
        max_tokens=left,
        seed=request.number,
        parameters_digest="",
        num_suffix_tokens=0 if request.num_output_tokens else request.num_suffix_tokens,
        keep_output=request.keep_output,
        content_digest=request.content_digest,
        session_digest=request.session_digest,
        key_digest=request.key_digest,
    )
    recorded = Recorded(
        number=request.number,
        request_id=request.request_id,
        at_ns=0,
        num_prompt_tokens=request.num_known_tokens,
        max_tokens=left,
        received=received,
        hashes=tuple(request.hashes),
    )
    if request.hold:
        recorded.wishes.append((0, events.HoldRequested(request_id=request.request_id)))
    if not has_client or request.needs_client:
        recorded.wishes.append((0, events.ClientGone(request_id=request.request_id)))
    return recorded


def prompt_of(request: Recorded, block_tokens: int) -> "array[int]":
    """Tokens for the prompt, as many as it had: those of a block follow from its hash."""
    tokens = array("I")
    for name in request.hashes[: request.num_prompt_tokens // max(1, block_tokens)]:
        tokens.extend(drawn(name, block_tokens))
    tokens.extend(drawn(request.request_id, request.num_prompt_tokens - len(tokens)))
    return tokens


def drawn(name: str, num_tokens: int) -> list[int]:
    """Tokens that follow from a name."""
    return list(shake_256(name.encode()).digest(num_tokens).translate(LETTERS))
