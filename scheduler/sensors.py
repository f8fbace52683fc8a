"""What happened, as facts: arrivals and wishes from HTTP, results from the engine, a stop.

Other threads put things in, the loop takes them out between two steps. What a step does not take
waits here: it takes so many facts that it stays under 256 events with its decisions.
"""

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TypeVar, assert_never

from journal import events
from journal.events import Fact
from journal.tokens import SideRows
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
from scheduler.gauge import Gauge
from scheduler.known import KnownRequests
from scheduler.kvcache.naming import BlockNamer
from scheduler.names import BlockNames
from scheduler.outcomes import (
    chunk_done,
    decoded,
    engine_ready,
    received,
    reclaimed,
    restored,
    row_failed,
    row_freed,
    step_tokens,
)
from scheduler.parameters import encode_parameters
from scheduler.state import SchedulerState
from scheduler.streams import Arrival

MAX_FACTS = 48
MAX_EVENTS = 256
"""A step's facts and decisions. A fact is answered by two decisions at most (the end of a held
request also unpins its chain; an arrival that was sent before joins another request, which is
adopted), which makes 3 times 48. Beside the answers there are 32 admissions, of which some are told
to wait, or in a stop 8 rows that it holds; 8 rows and a boundary whose blocks are saved; 8 pauses
that go on, at most by 3 decisions (what was saved in vain, the drop, the hold); 2 requests that
begin to go on, by 3; 5 on the ladder and 4 for a chunk without room (a hold with all its stages);
16 for 8 requests that are too old, 2 for one that has waited too long; 8 files that cannot be read;
one eviction, one shrinking of memory, a batch, and a chunk's commit and plan: in all 255, and the
reading of memory.
"""


WishFact = (
    events.CancelRequested
    | events.ClientGone
    | events.ClientAttached
    | events.HoldRequested
    | events.ReleaseRequested
    | events.ClearRequested
)


@dataclass(frozen=True, slots=True)
class Wish:
    """Something that HTTP wants, of a request or of the whole cache: `Sensors.wishes` has what."""

    key: tuple[str, str]


@dataclass(slots=True)
class Collected:
    """The facts of one step, with what belongs to them and is no event."""

    facts: list[Fact] = field(default_factory=list[Fact])
    arrivals: list[Arrival] = field(default_factory=list[Arrival])
    rows: tuple[RowTokens, ...] = ()
    rows_index: int = 0

    def side_rows(self, not_taken: frozenset[str]) -> SideRows:
        """The side rows of these facts. A request that is refused, or was sent before, leaves
        neither prompt nor parameters.
        """
        taken = [arrival for arrival in self.arrivals if arrival.request_id not in not_taken]
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
    is when the inbox was empty last. `name_source` is set where blocks are saved, `gauge` where
    memory is read. The loop reads the same clock, the system's unless another is given.
    """

    def __init__(self, known: KnownRequests, max_inbox: int, clock: Clock | None = None) -> None:
        self.known = known
        self.max_inbox = max_inbox
        self.clock = clock or SystemClock()
        self.inbox: deque[Arrival | Wish] = deque()
        self.wishes: dict[tuple[str, str], WishFact] = {}
        self.wishes_lock = threading.Lock()
        self.results: deque[EngineResult] = deque()
        self.store_facts: deque[Fact] = deque()
        self.names = BlockNames(known)
        self.name_source: Callable[[], tuple[BlockNamer, int]] | None = None
        self.gauge: Gauge | None = None
        self.waits_since_ns = 0
        self.stop_reason: str | None = None
        self.drained = False
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
        """Each wish for a request, or for the cache, waits here once, however often it is made. Of
        a hold and a release that nobody has looked at yet the last counts, and so it does of a
        client's leaving and coming.
        """
        key = key_of(fact)
        with self.wishes_lock:
            if key not in self.wishes:
                self.inbox.append(Wish(key))
            self.wishes[key] = fact
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

    def end_drain(self) -> None:
        """The time in which a stop lets rows go on is over."""
        self.drained = True
        self.wake.set()

    def collect(self, state: SchedulerState) -> Collected:
        """The facts of the next step, in order; none is no step. Raises EngineDeath."""
        collected = Collected()
        if self.stop_reason is not None and not state.stopping:
            collected.facts.append(events.ServerStopping(reason=self.stop_reason))
        if self.drained and not state.drained:
            collected.facts.append(events.DrainEnded())
        if self.results:
            take(self.results, collected, lambda r: self.take_result(r, state, collected))
        while self.store_facts and len(collected.facts) < MAX_FACTS:
            collected.facts.append(self.store_facts.popleft())
        if self.names.has_pending():
            most = MAX_FACTS - len(collected.facts)
            collected.facts.extend(self.names.pending(state, collected.rows, most))
        if self.inbox:
            take(self.inbox, collected, lambda a: self.take_wish(a, state, collected))
        if self.gauge is not None and (reading := self.gauge.take(state)) is not None:
            collected.facts.append(reading)  # after what it was taken after, such as a row's end
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
        with self.wishes_lock:
            fact = self.wishes.pop(item.key)
        if isinstance(fact, events.ClearRequested):
            return [fact]
        request_id = fact.request_id
        if request_id in state.numbers or is_among(request_id, collected.arrivals):
            return [fact]
        if isinstance(fact, events.ClientAttached) and request_id in state.remembered:
            return [fact]
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
HOLD = "HoldRequested"
CLIENT = "ClientGone"

T = TypeVar("T", Arrival | Wish, EngineResult)


def key_of(fact: WishFact) -> tuple[str, str]:
    """What makes two wishes the same, or the second one take the first one's place."""
    if isinstance(fact, events.ClearRequested):
        return CLEAR
    if isinstance(fact, events.ReleaseRequested):
        return HOLD, fact.request_id
    if isinstance(fact, events.ClientAttached):
        return CLIENT, fact.request_id
    return type(fact).__name__, fact.request_id


def is_due(state: SchedulerState, wall_ns: int) -> bool:
    """Whether time itself must act. The journal's time goes on also when the clock went back."""
    due_ns = deadline_ns(state)
    return due_ns is not None and max(state.now_ns, wall_ns) >= due_ns


def take(waiting: deque[T], collected: Collected, to_facts: Callable[[T], Iterable[Fact]]) -> None:
    """Turns what waits into facts, in order, until a bound is reached; the rest stays."""
    while waiting and len(collected.facts) < MAX_FACTS:
        collected.facts.extend(to_facts(waiting.popleft()))


def is_among(request_id: str, arrivals: list[Arrival]) -> bool:
    """Whether the request arrives in this very step."""
    return any(arrival.request_id == request_id for arrival in arrivals)


def may_fit(arrival: Arrival, state: SchedulerState) -> bool:
    """Whether the prompt and what is asked for behind it fit in this server's context."""
    return len(arrival.prompt) + (arrival.max_tokens or 1) <= state.max_context_tokens
