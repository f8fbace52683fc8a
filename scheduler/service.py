"""The one object that HTTP sees. All of it is called on the asyncio thread, and nothing waits for
the loop or the engine: what has to come from them is awaited.
"""

import asyncio
import secrets
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TypeVar

from journal import events
from journal.events import ModelFacts
from scheduler.engine.model import ModelDescription, Tokenizer
from scheduler.history import History
from scheduler.metrics import Metrics
from scheduler.run import Ended, Exit, Run
from scheduler.settings import Settings
from scheduler.state import SchedulerState
from scheduler.streams import Arrival, RequestStream, StreamHub
from scheduler.views import (
    CacheView,
    RequestView,
    ServerView,
    view_cache,
    view_open,
    view_server,
)
from scheduler.waits import line_of

ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
"""Crockford's base 32 in lower case: nothing in it is mistaken for another letter."""

READERS = 2
"""Threads that read the journal for HTTP."""

T = TypeVar("T")


class Saturated(Exception):
    """The server cannot take a request now: a 503. `retry_after_s` is when to come again."""

    def __init__(self, reason: str, retry_after_s: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as HTTP needs it; there before its weights are."""

    name: str
    tokenizer: Tokenizer
    facts: ModelFacts
    blas: str


@dataclass(frozen=True, slots=True)
class Readiness:
    """What /ready says. `reason` is empty when it is ready."""

    ready: bool
    reason: str
    last_step_age_ms: int
    work_waits: bool
    loading: bool


class Service:
    """See the module's text. Made by `scheduler.wiring.build`; `start` comes after listening.
    `secret` is the key of the installation.
    """

    def __init__(
        self, settings: Settings, run: Run, hub: StreamHub, history: History, secret: bytes
    ) -> None:
        self.settings = settings
        self.secret = secret
        self.served: ServedModel | None = None
        self._run = run
        self._hub = hub
        hub.wish = run.sensors.wish
        self._history = history
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="fermata-reader")
        self._described = asyncio.Event()
        self._has_ended = asyncio.Event()
        self._exit = Exit(0)

    @property
    def metrics(self) -> Metrics:
        """What the loop has counted. Only to be read."""
        return self._run.loop.metrics

    @property
    def run_id(self) -> int:
        """The number of this run in the journal; 0 before its first step."""
        return self._run.run_id

    @property
    def max_context_tokens(self) -> int:
        """The most tokens, prompt and output, that one request can have on this server: what
        arrivals are judged by. It is known once the model is described.
        """
        assert self.served is not None, "the model says how long its context is"
        return self._run.state.max_context_tokens

    def retry_after_s(self) -> int:
        """When a client that is turned away now should come again."""
        metrics = self.metrics
        return metrics.pace.retry_after_s(time.time_ns(), metrics.num_waiting)

    def new_request_id(self) -> str:
        """`req_` and 26 random characters."""
        return "req_" + "".join(secrets.choice(ALPHABET) for _ in range(26))

    def start(self) -> None:
        """Begins the run: model description, recovery's first step, engine. Returns at once."""
        call_soon = asyncio.get_running_loop().call_soon_threadsafe
        self._hub.call_soon = call_soon
        self._run.on_described = lambda model: call_soon(self._take_model, model)
        self._run.on_ready = lambda facts: call_soon(self._take_facts, facts)
        self._run.on_ended = lambda outcome: call_soon(self._end, outcome)
        threading.Thread(target=self._run.main, name="fermata-loop").start()

    def stop(self, reason: str) -> None:
        """A clean stop, also from a signal handler; a second call stops at once."""
        self._run.stop(reason)

    async def ended(self) -> Exit:
        """Returns when the scheduler has ended, whoever wanted it; all streams are cut by then."""
        await self._has_ended.wait()
        return self._exit

    async def served_model(self, timeout_s: float) -> ServedModel | None:
        """The model as soon as it is described; null when that takes longer than the timeout."""
        if self.served is None:
            try:
                await asyncio.wait_for(self._described.wait(), timeout_s)
            except TimeoutError:
                return None
        return self.served

    def submit(self, arrival: Arrival) -> RequestStream:
        """Hands a request to the scheduler. Await `judged()` for its answer. Its sender follows the
        stream from here on, and must `leave` it.

        Raises Saturated when the inbox is full, the journal has no space, or the server stops.
        """
        assert self.served is not None, "a prompt is counted with the model's tokenizer"
        run = self._run
        if run.is_stopping:
            raise self._saturated("server_stopping")
        if run.loop.full:
            raise self._saturated("journal_full")
        if not run.sensors.has_room():
            raise self._saturated("inbox_full")
        stream = RequestStream(
            arrival.request_id, arrival.parameters, len(arrival.prompt), num_clients=1
        )
        self._hub.add(stream)
        run.sensors.arrive(arrival)
        return stream

    def cancel(self, request_id: str) -> None:
        """Ends the request, if it is open. The stream says when it has ended."""
        self._run.sensors.wish(events.CancelRequested(request_id=request_id))

    def hold(self, request_id: str) -> None:
        """Wants the request held until `release`. `view_request` says when it is."""
        self._run.sensors.wish(events.HoldRequested(request_id=request_id))

    def release(self, request_id: str) -> None:
        """Wants a request that was held by hand to go on."""
        self._run.sensors.wish(events.ReleaseRequested(request_id=request_id))

    def follow(self, stream: RequestStream) -> None:
        """A client reads this stream from here on, until it leaves. A request that nobody follows
        has lost its client.
        """
        self._hub.follow(stream)

    def leave(self, stream: RequestStream) -> None:
        """A client that follows this stream, or has sent its request, is done with it or lost."""
        self._hub.leave(stream)

    def clear_cache(self, by: str) -> None:
        """Sends away every saved block that may go. `view_cache` says when that is done."""
        self._run.sensors.wish(events.ClearRequested(by=by))

    async def view_cache(self) -> CacheView:
        """What is saved of KV. Raises Saturated."""
        sensors = self._run.sensors
        return await self._ask(lambda state: view_cache(state, sensors.clear_is_waiting))

    @property
    def saving_stopped(self) -> str | None:
        """Why no KV is saved at present; null while it is, and where it never is."""
        return self._run.state.index.stopped

    @property
    def stopped_detail(self) -> str | None:
        """What the disk, or a bug of ours, said when saving stopped."""
        return None if self._run.kv is None else self._run.kv.stopped_detail

    async def find(self, request_id: str) -> RequestStream | None:
        """The request's stream: the live one, or one rebuilt from the journal, as long as its
        tokens are kept.
        """
        stream = self._hub.find(request_id)
        if stream is not None:
            return stream
        return await self._read(lambda: self._history.stream(request_id))

    async def view(self) -> ServerView:
        """All open requests, consistent: as of one boundary between two steps. Raises Saturated."""
        return await self._ask(lambda state: view_server(state, time.time_ns()))

    async def view_request(self, request_id: str) -> RequestView | None:
        """One request: as it is now, or as the journal shows it when it has ended."""

        def look(state: SchedulerState) -> RequestView | None:
            request = state.find(request_id)
            if request is None or request.number in state.arrivals:
                return None
            return view_open(state, request, time.time_ns(), line_of(state))

        view = await self._ask(look)
        return view or await self._read(lambda: self._history.view(request_id))

    async def events(self, request_id: str, after_seq: int, limit: int) -> list[dict[str, object]]:
        """The request's events, in order: `seq`, `step`, `source`, `kind`, `at_ns` and `body`."""
        return await self._read(lambda: self._history.events(request_id, after_seq, limit))

    def readiness(self) -> Readiness:
        """Whether it takes requests, and whether work goes on while some waits. What an operator
        holds does not count as waiting; what waits for memory does.
        """
        run = self._run
        since_ns = run.loop.last_step_ns
        if not run.loop.had_work:
            since_ns = max(since_ns, run.sensors.waits_since_ns)
        age_ms = (time.monotonic_ns() - since_ns) // 1_000_000
        loading = self.served is None or not run.state.engine_ready
        work_waits = run.loop.had_work or bool(run.sensors.inbox)
        reason = ""
        if run.is_stopping:
            reason = "server_stopping"
        elif run.loop.full:
            reason = "journal_full"
        elif loading:
            reason = "model_loading"
        elif work_waits and age_ms > self.settings.server.ready_limit_ms:
            reason = f"no step for {age_ms} ms while work waits"
        return Readiness(not reason, reason, age_ms, work_waits, loading)

    def _saturated(self, reason: str) -> Saturated:
        return Saturated(reason, self.retry_after_s())

    async def _ask(self, question: Callable[[SchedulerState], T]) -> T:
        """The loop's answer, given between two steps."""
        answer: Future[T] = Future()
        try:
            self._run.ask(lambda state: answer.set_result(question(state)))
        except Ended as error:
            raise self._saturated("server_stopping") from error
        return await asyncio.wrap_future(answer)

    async def _read(self, read: Callable[[], T]) -> T:
        """What a read of the journal gives, in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._readers, read)

    def _take_model(self, model: ModelDescription) -> None:
        self.served = ServedModel(model.name, model.tokenizer, model.facts, model.blas)
        self._described.set()

    def _take_facts(self, facts: ModelFacts) -> None:
        assert self.served is not None
        self.served = replace(self.served, facts=facts)

    def _end(self, outcome: Exit) -> None:
        self._exit = outcome
        self._run.answer()  # what was asked while the loop ended
        self._hub.cut_all()
        self._readers.shutdown(wait=False)
        self._history.close()
        self._has_ended.set()
