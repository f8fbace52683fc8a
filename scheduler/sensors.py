"""What happened, as facts: arrivals and wishes from HTTP, results from the engine, a stop.

Other threads put things in, the loop takes them out between two steps. What a step does not take
waits here: at most 64 facts of a kind, and so many in all that a step stays under 256 events with
its decisions.
"""

import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from typing import TypeVar, assert_never

from journal import events
from journal.events import Fact
from journal.tokens import SideRows, StepTokens
from scheduler.clock import Clock, SystemClock
from scheduler.deadlines import deadline_ns
from scheduler.engine.base import (
    ChunkDone,
    EngineDied,
    EngineLoaded,
    EngineResult,
    MemoryReturned,
    RowFailed,
    RowFreed,
    RowRestored,
    RowTokens,
    StepDone,
)
from scheduler.evolve import is_decoding
from scheduler.known import KnownRequests
from scheduler.kvcache.naming import BlockNamer
from scheduler.names import BlockNames
from scheduler.parameters import encode_parameters
from scheduler.state import SchedulerState
from scheduler.streams import Arrival

MAX_FACTS_OF_A_KIND = 64
MAX_FACTS = 96
MAX_EVENTS = 256
"""A step's facts and decisions. A fact is answered by one decision at most. Beside the answers
there are 32 admissions, of which some are told to wait, 8 rows and a boundary whose blocks are
saved, 8 files that cannot be read, one eviction, one shrinking of memory, a batch, and a chunk's
commit and plan.
"""


WishFact = (
    events.CancelRequested
    | events.ClientGone
    | events.HoldRequested
    | events.ReleaseRequested
    | events.ClearRequested
)


@dataclass(frozen=True, slots=True)
class Wish:
    """Something that HTTP wants: for a request that is there, or for the whole cache."""

    fact: WishFact


@dataclass(slots=True)
class Collected:
    """The facts of one step, with what belongs to them and is no event."""

    facts: list[Fact] = field(default_factory=list[Fact])
    arrivals: list[Arrival] = field(default_factory=list[Arrival])
    rows: tuple[RowTokens, ...] = ()
    rows_index: int = 0

    def side_rows(self, rejected: frozenset[str]) -> SideRows:
        """The side rows of these facts. A refused request leaves neither prompt nor parameters."""
        taken = [arrival for arrival in self.arrivals if arrival.request_id not in rejected]
        return SideRows(
            prompts=[(arrival.request_id, arrival.prompt.tobytes()) for arrival in taken],
            parameters=[(a.request_id, encode_parameters(a.parameters)) for a in taken],
            tokens={self.rows_index: step_tokens(self.rows)} if self.has_tokens() else {},
        )

    def has_tokens(self) -> bool:
        """Whether a decode step brought any token that counts."""
        return any(row.token_ids for row in self.rows)


class EngineDeath(Exception):
    """The engine's thread ended, or the model could not be loaded."""

    def __init__(self, died: EngineDied) -> None:
        super().__init__(died.error)
        self.while_loading = died.while_loading


class Sensors:
    """See the module's text. `wake` is set whenever there is something to take; `waits_since_ns`
    is when the inbox was empty last. `name_source` is set where blocks are saved. The loop reads
    the same clock, the system's unless another is given.
    """

    def __init__(self, known: KnownRequests, max_inbox: int, clock: Clock | None = None) -> None:
        self.known = known
        self.max_inbox = max_inbox
        self.clock = clock or SystemClock()
        self.inbox: deque[Arrival | Wish] = deque()
        self.wishes: set[tuple[str, str]] = set()
        self.results: deque[EngineResult] = deque()
        self.store_facts: deque[Fact] = deque()
        self.names = BlockNames(known)
        self.name_source: Callable[[], tuple[BlockNamer, int]] | None = None
        self.waits_since_ns = 0
        self.stop_reason: str | None = None
        self.wake = threading.Event()

    # Any thread

    def has_room(self) -> bool:
        """Whether one more arrival may come in."""
        return len(self.inbox) < self.max_inbox

    def arrive(self, arrival: Arrival) -> None:
        if not self.inbox:
            self.waits_since_ns = self.clock.monotonic_ns()
        self.inbox.append(arrival)
        self.wake.set()

    def wish(self, fact: WishFact) -> None:
        """Each wish for a request, or for the cache, waits here once, however often it is made."""
        key = key_of(fact)
        if key not in self.wishes:
            self.wishes.add(key)
            self.inbox.append(Wish(fact))
            self.wake.set()

    @property
    def clear_is_waiting(self) -> bool:
        """Whether somebody wants the cache cleared, and no step has taken it yet."""
        return CLEAR in self.wishes

    def deliver(self, result: EngineResult) -> None:
        """What an engine calls. The protocol bounds it: one step, one chunk, a drop per row."""
        self.results.append(result)
        self.wake.set()

    def deliver_fact(self, fact: Fact) -> None:
        """What the block store calls: its outcomes need no translation. Bounded by what the writers
        hold, and by the batches in which files are looked at.
        """
        self.store_facts.append(fact)
        self.wake.set()

    def stop(self, reason: str) -> None:
        self.stop_reason = reason
        self.wake.set()

    # Loop thread

    def collect(self, state: SchedulerState) -> Collected:
        """The facts of the next step, in order; none is no step. Raises EngineDeath."""
        collected = Collected()
        if self.stop_reason is not None and not state.stopping:
            collected.facts.append(events.ServerStopping(reason=self.stop_reason))
        if self.results:
            take(self.results, collected, lambda r: self.take_result(r, state, collected))
        while self.store_facts and len(collected.facts) < MAX_FACTS:
            collected.facts.append(self.store_facts.popleft())
        if self.names.has_pending():
            most = MAX_FACTS - len(collected.facts)
            collected.facts.extend(self.names.pending(state, collected.rows, most))
        if self.inbox:
            take(self.inbox, collected, lambda a: self.take_wish(a, state, collected))
        if not collected.facts and is_due(state, self.clock.wall_ns()):
            collected.facts.append(events.ClockTicked())
        return collected

    def take_wish(
        self, item: Arrival | Wish, state: SchedulerState, collected: Collected
    ) -> Iterable[Fact]:
        """A wish for a request that is not open, or no longer, is no fact."""
        if isinstance(item, Arrival):
            fact = received(item, state, len(collected.arrivals))
            collected.arrivals.append(item)
            if not may_fit(item, state):
                return [fact]  # it is refused: nothing of it is named
            return [fact, *self.names.of_arrival(item, fact.number)]
        self.wishes.discard(key_of(item.fact))
        if isinstance(item.fact, events.ClearRequested):
            return [item.fact]
        request_id = item.fact.request_id
        if request_id in state.numbers or is_among(request_id, collected.arrivals):
            return [item.fact]
        return []

    def take_result(
        self, result: EngineResult, state: SchedulerState, collected: Collected
    ) -> Iterable[Fact]:
        """One arm per result."""
        match result:
            case StepDone():
                assert not collected.rows, "the engine delivers one step until its release"
                collected.rows, fact = decoded(result, state)
                collected.rows_index = len(collected.facts)
                return [fact, *self.names.of_rows(collected.rows)]
            case ChunkDone():
                return [chunk_done(result, self.known.row_ids[result.number])]
            case RowRestored():
                return restored(result, self.known.row_ids[result.number])
            case RowFreed():
                return [row_freed(result, self.known, state)]
            case MemoryReturned():
                return [reclaimed(result)]
            case RowFailed():
                return [row_failed(result, self.known.row_ids[result.number])]
            case EngineLoaded():
                if self.name_source is not None:
                    self.names.begin(*self.name_source(), state)
                return [engine_ready(result)]
            case EngineDied():
                raise EngineDeath(result)
            case _:
                assert_never(result)


CLEAR = ("ClearRequested", "")

T = TypeVar("T", Arrival | Wish, EngineResult)


def key_of(fact: WishFact) -> tuple[str, str]:
    """What makes two wishes the same."""
    if isinstance(fact, events.ClearRequested):
        return CLEAR
    return type(fact).__name__, fact.request_id


def is_due(state: SchedulerState, wall_ns: int) -> bool:
    """Whether time itself must act. The journal's time goes on also when the clock went back."""
    due_ns = deadline_ns(state)
    return due_ns is not None and max(state.now_ns, wall_ns) >= due_ns


def take(waiting: deque[T], collected: Collected, to_facts: Callable[[T], Iterable[Fact]]) -> None:
    """Turns what waits into facts, in order, until a bound is reached; the rest stays."""
    quota: Counter[type] = Counter()
    while waiting and len(collected.facts) < MAX_FACTS:
        first = waiting[0]
        kind = type(first.fact) if isinstance(first, Wish) else type(first)
        if quota[kind] == MAX_FACTS_OF_A_KIND:
            return
        found = list(to_facts(waiting.popleft()))
        quota[kind] += bool(found)
        collected.facts.extend(found)


def is_among(request_id: str, arrivals: list[Arrival]) -> bool:
    """Whether the request arrives in this very step."""
    return any(arrival.request_id == request_id for arrival in arrivals)


def may_fit(arrival: Arrival, state: SchedulerState) -> bool:
    """Whether the prompt and what is asked for behind it fit in this server's context."""
    return len(arrival.prompt) + (arrival.max_tokens or 1) <= state.max_context_tokens


def received(arrival: Arrival, state: SchedulerState, num_before: int) -> events.RequestReceived:
    """The arrival with its number; `num_before` others arrive in this step before it."""
    assert state.model is not None, "nothing arrives before server_started"
    parameters = arrival.parameters
    return events.RequestReceived(
        request_id=arrival.request_id,
        number=state.next_number + num_before,
        client_request_id=arrival.client_request_id,
        model_fingerprint=state.model.fingerprint,
        route=arrival.route,
        stream=arrival.stream,
        num_prompt_tokens=len(arrival.prompt),
        max_tokens=arrival.max_tokens,
        seed=parameters.sampling.seed,
        parameters_digest=sha256(encode_parameters(parameters)).hexdigest(),
        num_suffix_tokens=arrival.num_suffix_tokens,
        keep_output=arrival.keep_output,
    )


def decoded(step: StepDone, state: SchedulerState) -> tuple[tuple[RowTokens, ...], Fact]:
    """The rows of a decode step and its fact. What a row that no longer decodes got is dropped.

    It is called for every token of every request: one pass over the rows.
    """
    requests, batch = state.requests, step.batch
    rows: list[RowTokens] = []
    numbers: list[int] = []
    counts: list[int] = []
    ended: list[events.RowEnd] = []
    for row in step.rows:
        request = requests.get(row.number)
        counted = row
        if request is None or not is_decoding(request, batch):
            counted = nothing(row)
        rows.append(counted)
        numbers.append(counted.number)
        counts.append(len(counted.token_ids))
        if counted.ended is not None:
            ended.append(events.RowEnd(number=counted.number, reason=counted.ended))
    fact = events.TokensDecoded(
        batch=batch,
        numbers=tuple(numbers),
        counts=tuple(counts),
        ended=tuple(ended),
        duration_ns=step.duration_ns,
    )
    return tuple(rows), fact


def nothing(row: RowTokens) -> RowTokens:
    """The row without its tokens."""
    return RowTokens(row.number, (), None)


def step_tokens(rows: tuple[RowTokens, ...]) -> StepTokens:
    """The tokens of a step as the journal keeps them."""
    return StepTokens.of(
        [
            (
                row.token_ids,
                None
                if row.logprobs is None
                else [(logprobs.chosen, logprobs.top) for logprobs in row.logprobs],
            )
            for row in rows
        ]
    )


def chunk_done(result: ChunkDone, request_id: str) -> Fact:
    return events.PrefillChunkDone(
        request_id=request_id,
        chunk=result.chunk,
        start=result.start,
        length=result.length,
        duration_ns=result.duration_ns,
        peak_bytes=result.peak_bytes,
        active_bytes=result.active_bytes,
    )


def engine_ready(result: EngineLoaded) -> Fact:
    return events.EngineReady(
        model=result.model,
        one_row_only=result.one_row_only,
        note=result.note,
        load_ns=result.load_ns,
        kv_domain=result.kv_domain,
    )


def reclaimed(result: MemoryReturned) -> Fact:
    return events.MemoryReclaimed(
        freed_bytes=result.freed_bytes,
        active_bytes=result.active_bytes,
        cached_bytes=result.cached_bytes,
        duration_ns=result.duration_ns,
    )


def row_failed(result: RowFailed, request_id: str) -> Fact:
    return events.EngineFailed(
        request_id=request_id, number=result.number, during=result.during, error=result.error
    )


def restored(result: RowRestored, request_id: str) -> Iterator[Fact]:
    """What could not be read comes first, so that nothing else starts from it."""
    for bad in result.bad:
        if bad.part == "tail":
            yield events.ChainRestoreFailed(
                request_id=request_id,
                number=result.number,
                reason=bad.reason,
                detail=bad.detail,
            )
        else:
            yield events.BlockCorrupt(
                hash=bad.hash, part=bad.part, reason=bad.reason, detail=bad.detail
            )
    yield events.ChainRestored(
        request_id=request_id,
        number=result.number,
        num_tokens=result.num_tokens,
        num_memory_tokens=result.num_memory_tokens,
        num_disk_tokens=result.num_disk_tokens,
        read_bytes=result.read_bytes,
        duration_ns=result.duration_ns,
    )


def row_freed(result: RowFreed, known: KnownRequests, state: SchedulerState) -> Fact:
    """Nothing follows about the row of a request that has ended, so its id is forgotten."""
    request_id = known.row_ids[result.number]
    if result.number not in state.requests:
        del known.row_ids[result.number]
    return events.KvFreed(
        request_id=request_id, number=result.number, freed_bytes=result.freed_bytes
    )
