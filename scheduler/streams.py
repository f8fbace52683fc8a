"""How tokens reach HTTP: one stream per request, read by position, so it can be taken up again.

A `RequestStream` lives on the asyncio thread and is touched there only. It keeps all output tokens
of its request, so any number of readers may follow it, each at its own position, and a slow reader
holds nobody up: what is kept is bounded by `max_tokens`, and the number of streams by the queue.

The loop thread stages what a step brings and hands it over with one call per step; a stream whose
request has ended stays a while for late readers, and is then rebuilt from the journal when somebody
asks.
"""

import asyncio
import time
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Literal

from journal.events import ClientAttached, ClientGone, RequestRejected
from scheduler.engine.base import TokenLogprobs
from scheduler.parameters import RequestParameters

CallSoon = Callable[[Callable[[], None]], object]
ClientWish = Callable[[ClientGone | ClientAttached], object]


@dataclass(frozen=True, slots=True)
class Arrival:
    """A well-formed request, ready for the scheduler. `max_tokens` is null when none was given.

    `num_suffix_tokens` at the prompt's end are the template's opening of the answer, which the next
    turn does not repeat. `keep_output`: a later prompt can hold this answer as it was put out.
    The digests are those of `request_received` (journal/facts.py).
    """

    request_id: str
    client_request_id: str | None
    route: str
    stream: bool
    prompt: "array[int]"
    max_tokens: int | None
    parameters: RequestParameters
    num_suffix_tokens: int = 0
    keep_output: bool = True
    content_digest: str = ""
    session_digest: str = ""
    key_digest: str = ""
    owner_digest: str = ""


@dataclass(frozen=True, slots=True)
class Accepted:
    """The request is taken, and will run up to `max_tokens`. Answered after the commit."""

    max_tokens: int


@dataclass(frozen=True, slots=True)
class Rejected:
    """The request is refused; the event says why, with its numbers. Answered after the commit."""

    event: RequestRejected


@dataclass(frozen=True, slots=True)
class Joined:
    """The request is one that was sent before, and open or kept under this id: its answer is the
    answer. Said after the commit.
    """

    request_id: str


Judgement = Accepted | Rejected | Joined


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """How a request ended. `reason` and `detail` are those of the journal's event;
    `num_cached_prompt_tokens` of the prompt were restored, and not computed.
    """

    kind: Literal["finished", "cancelled", "aborted"]
    reason: str
    detail: str
    num_prompt_tokens: int
    num_output_tokens: int
    num_cached_prompt_tokens: int = 0


@dataclass(slots=True)
class StreamUpdate:
    """What one step brings to one stream."""

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    judgement: Judgement | None = None
    end: StreamEnd | None = None
    cut: bool = False


@dataclass(eq=False)
class RequestStream:
    """The output of one request as it comes. `logprobs` runs beside `tokens` if it was asked for.

    `end` is null until the request has ended; exactly one end ever comes. `cut` means that the
    server stops while the request goes on later: the socket is closed with no terminal event.
    `num_clients` follow it now. `joined` is the stream that answers in this one's place.
    """

    request_id: str
    parameters: RequestParameters
    num_prompt_tokens: int
    judgement: Judgement | None = None
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprobs] | None = None
    end: StreamEnd | None = None
    cut: bool = False
    waiters: set[asyncio.Future[None]] = field(default_factory=set[asyncio.Future[None]])
    num_clients: int = 0
    ended_ns: int = 0
    joined: "RequestStream | None" = None

    @property
    def is_open(self) -> bool:
        """Whether its request goes on, or is to be judged, in this life of the server."""
        is_other = isinstance(self.judgement, Rejected | Joined)
        return self.end is None and not self.cut and not is_other

    @property
    def created(self) -> int:
        """Unix time in seconds, as answers show it."""
        return self.parameters.created

    async def judged(self) -> Judgement:
        """What was decided at arrival. Raises StreamCut when it ended before it was judged: the
        server stops, or its client was gone by then.
        """
        while self.judgement is None:
            if self.cut or self.end is not None:
                raise StreamCut(self.request_id)
            await self.changed(None)
        return self.judgement

    async def wait(self, position: int, timeout_s: float | None) -> None:
        """Returns when there is something after `position` (a token, the end, a cut), or at the
        timeout. Which of them it was, the caller reads off the stream.
        """
        if self.has_news(position):
            return
        loop = asyncio.get_running_loop()
        deadline = None if timeout_s is None else loop.time() + timeout_s
        while not self.has_news(position):
            left_s = None if deadline is None else deadline - loop.time()
            if left_s is not None and left_s <= 0:
                return
            await self.changed(left_s)

    def has_news(self, position: int) -> bool:
        """Whether a reader that has seen `position` tokens has something to do."""
        return len(self.tokens) > position or self.end is not None or self.cut

    async def changed(self, timeout_s: float | None) -> None:
        """Returns at the next change of this stream, or at the timeout."""
        waiter = asyncio.get_running_loop().create_future()
        self.waiters.add(waiter)
        try:
            await asyncio.wait((waiter,), timeout=timeout_s)
        finally:
            self.waiters.discard(waiter)

    def apply(self, update: StreamUpdate) -> None:
        """Takes one step's update and wakes the readers."""
        assert self.end is None, f"{self.request_id} has ended, and gets no more"
        self.tokens.extend(update.token_ids)
        if update.logprobs is not None:
            self.logprobs = [] if self.logprobs is None else self.logprobs
            self.logprobs.extend(update.logprobs)
        self.judgement = update.judgement or self.judgement
        self.end = update.end
        self.cut = self.cut or update.cut
        waiters, self.waiters = self.waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)


class StreamCut(Exception):
    """There will be no answer, since the server stops or the client had left."""


class StreamHub:
    """All streams that are in memory, and who follows them.

    The loop thread calls `stage` and `flush`; everything else is the asyncio thread's. `call_soon`
    hands a call over to that thread (`loop.call_soon_threadsafe`). `wish` is told when the last
    client of an open request has left, and when one has come, also to an answer that is whole.
    `retention_ns`: how long answers are kept; null: as long as there is room.
    """

    def __init__(self, max_lingering: int) -> None:
        self.call_soon: CallSoon | None = None
        self.wish: ClientWish = ignore
        self.open: dict[str, RequestStream] = {}
        self.ended: OrderedDict[str, RequestStream] = OrderedDict()
        self.max_lingering = max_lingering
        self.retention_ns: int | None = None
        self.staged: dict[str, StreamUpdate] = {}

    def add(self, stream: RequestStream) -> None:
        """Takes a stream in; its id is new."""
        assert stream.request_id not in self.open, f"{stream.request_id} is there already"
        self.open[stream.request_id] = stream

    def find(self, request_id: str) -> RequestStream | None:
        """The stream in memory, open or ended a while ago, as long as answers are kept."""
        self.forget_old()
        return self.open.get(request_id) or self.ended.get(request_id)

    def forget_old(self) -> None:
        """What is not kept any more is not in memory either."""
        if self.retention_ns is None:
            return
        since_ns = time.monotonic_ns() - self.retention_ns
        while self.ended and next(iter(self.ended.values())).ended_ns <= since_ns:
            self.ended.popitem(last=False)

    def follow(self, stream: RequestStream) -> None:
        """One client more reads the stream, until it leaves."""
        self.count(stream, 1)

    def leave(self, stream: RequestStream) -> None:
        """A client that has followed the stream does not any more: it has all, or is lost."""
        self.count(stream.joined or stream, -1)

    def count(self, stream: RequestStream, change: int) -> None:
        """So many clients more. Whether there is any is the scheduler's business."""
        num_before = stream.num_clients
        stream.num_clients += change
        assert stream.num_clients >= 0, f"more clients leave {stream.request_id} than came"
        if stream.end is not None and num_before == 0 and change > 0:
            self.wish(ClientAttached(request_id=stream.request_id))  # it may have had none so far
        if not stream.is_open:
            return
        if stream.num_clients == 0:
            self.wish(ClientGone(request_id=stream.request_id))
        elif num_before == 0:
            self.wish(ClientAttached(request_id=stream.request_id))

    def join(self, stream: RequestStream, joined_id: str) -> None:
        """The clients of this stream follow another one from here on. There may be none left by
        now: the scheduler has taken it for granted that there is one, and must hear of it. One that
        has ended has nobody who waits for its clients.
        """
        other = self.open.get(joined_id)
        if other is not None:
            stream.joined = other
            self.count(other, stream.num_clients)

    def update(self, request_id: str) -> StreamUpdate:
        """What this step brings to the stream, to be filled in. Loop thread."""
        update = self.staged.get(request_id)
        if update is None:
            update = self.staged[request_id] = StreamUpdate(request_id)
        return update

    def flush(self) -> None:
        """Hands over what the step brought, with one call. Loop thread."""
        if not self.staged:
            return
        updates, self.staged = self.staged, {}
        if self.call_soon is None:
            self.deliver(updates.values())  # nobody serves: a test, or a benchmark, in one thread
        else:
            self.call_soon(lambda: self.deliver(updates.values()))

    def deliver(self, updates: Iterable[StreamUpdate]) -> None:
        """Applies one step's updates. A request whose stream nobody opened gets none."""
        for update in updates:
            stream = self.open.get(update.request_id)
            if stream is None:
                continue
            stream.apply(update)
            if isinstance(stream.judgement, Joined):
                self.join(stream, stream.judgement.request_id)
            if stream.end is not None or isinstance(stream.judgement, Rejected | Joined):
                self.retire(stream)

    def retire(self, stream: RequestStream) -> None:
        """An ended stream stays for late readers, the newest `max_lingering` of them."""
        del self.open[stream.request_id]
        if isinstance(stream.judgement, Rejected | Joined):
            return
        stream.ended_ns = time.monotonic_ns()
        self.ended[stream.request_id] = stream
        while len(self.ended) > self.max_lingering:
            self.ended.popitem(last=False)

    def cut_all(self) -> None:
        """The server stops: every open stream is cut. asyncio thread."""
        for stream in list(self.open.values()):
            stream.apply(StreamUpdate(stream.request_id, cut=True))
        self.open.clear()


def ignore(_: object) -> None:
    """Nobody needs to know."""
