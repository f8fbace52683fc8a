"""A whole server in one thread and in virtual time, decided by one seed.

At each moment of virtual time everything that can happen does: the loop takes its steps, the engine
begins its next piece of work, and when neither has anything to do time goes on to the next moment
at which something comes: the end of a piece of work, of a write or of a read, an arrival, a reading
of memory, a deadline. What overlaps in a real server overlaps here.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from random import Random
from typing import cast

from journal import events
from journal.database import Durability
from journal.events import Decision, Fact, ModelFacts, Record
from journal.journal import Journal
from journal.memory import MemoryJournal
from journal.tokens import NO_ROWS, SideRows
from scheduler.deadlines import deadline_ns
from scheduler.engine.base import MemoryReading
from scheduler.engine.fake_row import fake_token, prompt_digest
from scheduler.engine.fake_tokenizer import END_OF_TURN, FakeTokenizer
from scheduler.engine.model import ModelDescription
from scheduler.gauge import Gauge
from scheduler.invariants import check
from scheduler.kvstore import KvStore
from scheduler.loop import Loop
from scheduler.machine import MachineReading
from scheduler.parameters import RequestParameters, SamplingParameters
from scheduler.recovery import recover
from scheduler.replay import Divergence, Replay
from scheduler.run import server_started
from scheduler.sensors import Sensors, WishFact
from scheduler.settings import Settings
from scheduler.simulation.cost import DiskCost, EngineCost
from scheduler.simulation.disk import SimulatedDisk
from scheduler.simulation.engine import SimulatedEngine
from scheduler.simulation.store import SimulatedStore
from scheduler.simulation.timeline import Timeline
from scheduler.streams import Arrival, RequestStream


class Stuck(Exception):
    """Requests are open, and nothing goes on any more, or not within the bound of virtual time."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """What a simulated server runs on, and the model it serves."""

    facts: ModelFacts
    engine: EngineCost
    disk: DiskCost
    disk_bytes: int = 2 * 10**12


@dataclass(frozen=True, slots=True)
class Asked:
    """A request to come: `at_ns` after the start. It puts out `max_tokens`, or fewer where the
    engine ends turns and `ends_turn` lets it.
    """

    num_prompt_tokens: int
    max_tokens: int
    at_ns: int = 0
    ends_turn: bool = False
    shares: int = 0


class NotedJournal(MemoryJournal):
    """A journal in memory that shows each record as it is committed."""

    def __init__(self, note: Callable[[Record], None]) -> None:
        super().__init__()
        self.note = note

    def commit(
        self,
        step: int,
        at_ns: int,
        facts: Sequence[Fact],
        decisions: Sequence[Decision],
        side: SideRows = NO_ROWS,
        *,
        durability: Durability = "process",
    ) -> list[Record]:
        """As `Journal.commit`."""
        records = super().commit(step, at_ns, facts, decisions, side, durability=durability)
        for record in records:
            self.note(record)
        return records


@dataclass
class World:
    """See the module's text. `race` is how often, in a hundred, the engine begins its next piece of
    work before the loop has answered the last. `checks`: every invariant after each step.
    `watch` is called after each step, `read` may change each reading of the allocator, and
    `ballast_bytes` is what the allocator gave to something that the scheduler knows nothing of.
    """

    settings: Settings
    hardware: Hardware
    seed: int = 0
    race: int = 0
    checks: bool = True
    records: Counter[str] = field(default_factory=Counter[str])
    ended_ns: dict[str, int] = field(default_factory=dict[str, int])

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.timeline = Timeline()
        self.journal = NotedJournal(self.note)
        self.disk = SimulatedDisk(self.timeline, self.hardware.disk, self.hardware.disk_bytes)
        self.streams: dict[str, RequestStream] = {}
        self.prompts: dict[str, array[int]] = {}
        self.ballast_bytes = 0
        self.watch: Callable[[], None] = nothing
        self.read: Callable[[MemoryReading], MemoryReading] = same
        self.plans: list[tuple[int, Callable[[], None]]] = []
        self.arrivals: dict[str, Arrival] = {}
        self.told: dict[str, list[int]] = {}
        self.nonce = 0
        self.begin()

    # Lives

    def begin(self) -> None:
        """A process that takes up the journal and the disk. Each has a nonce of its own."""
        self.nonce += 1
        facts, kv = self.hardware.facts, self.settings.kv
        journal = cast("Journal", self.journal)
        recovered = recover(journal, self.settings.requests.max_lingering)
        self.state, self.hub = recovered.state, recovered.hub
        self.sensors = Sensors(recovered.known, self.settings.scheduler.max_inbox, self.timeline)
        self.loop = Loop(self.settings, journal, recovered, self.sensors, no_space)
        self.engine = SimulatedEngine(
            facts, self.nonce, self.settings.fake, self.timeline, self.hardware.engine
        )
        self.sensors.gauge = Gauge(
            self.settings.memory.sample_ms, self.timeline, self.read_memory, NobodyElse()
        )
        self.store = SimulatedStore(
            facts, kv, self.disk, self.sensors.deliver_fact, self.engine.nudge
        )
        self.engine.held_elsewhere = lambda: self.store.held_bytes() + self.ballast_bytes
        description = ModelDescription(facts.name, FakeTokenizer(), facts, blas="none")
        started = server_started(self.settings, description, self.nonce)
        self.loop.begin(started, self.engine, cast("KvStore", self.store))

    def crash(self) -> None:
        """The process is killed, and the next one begins at once. What the engine and the writers
        had in hand is gone; what is to come from outside comes.
        """
        for request_id, stream in self.streams.items():
            self.told[request_id] = self.expected_tokens(request_id, len(stream.tokens))
        unanswered = [s.request_id for s in self.hub.open.values() if s.judgement is None]
        self.timeline.forget()
        self.disk.lose_power()
        self.journal.close()
        self.begin()
        self.streams.update(self.hub.open)
        coming = [plan for plan in self.plans if plan[0] > self.timeline.now_ns]
        self.plans = []
        for at_ns, happen in coming:
            self.plan(at_ns, happen)
        for request_id in unanswered:  # its client asks again
            self.plan(self.timeline.now_ns, partial(self.arrive, self.arrivals[request_id]))

    def plan(self, at_ns: int, happen: Callable[[], None]) -> None:
        """Something comes from outside at this moment, whichever process is there by then."""
        self.plans.append((at_ns, happen))
        self.timeline.at(at_ns, happen)

    # Requests

    def ask(self, asked: Asked) -> str:
        """Plans a request, and returns its id."""
        request_id = f"req_{len(self.prompts) + 1:026}"
        prompt = array("I", self.random.choices(range(32, 127), k=asked.num_prompt_tokens))
        if asked.shares and self.prompts:
            other = next(iter(self.prompts.values()))
            prompt[: asked.shares] = other[: min(asked.shares, asked.num_prompt_tokens)]
            del prompt[asked.num_prompt_tokens :]
        self.prompts[request_id] = prompt
        arrival = arrival_of(request_id, prompt, asked, self.seed)
        self.arrivals[request_id] = arrival
        self.plan(asked.at_ns, partial(self.arrive, arrival))
        return request_id

    def arrive(self, arrival: Arrival) -> None:
        stream = RequestStream(arrival.request_id, arrival.parameters, len(arrival.prompt))
        self.streams[arrival.request_id] = stream
        self.hub.add(stream)
        self.sensors.arrive(arrival)

    def wish(self, fact: WishFact) -> None:
        """Somebody wants something, as over HTTP."""
        self.sensors.wish(fact)

    # Time

    def run(self, limit_ns: int) -> None:
        """Until nothing is left to happen. Raises Stuck when that is not so after `limit_ns`."""
        while self.turn():
            if self.timeline.now_ns > limit_ns:
                raise Stuck(self.describe(f"not over after {limit_ns / 1e9:.0f} virtual s"))
        if self.state.requests:
            raise Stuck(self.describe("nothing happens any more"))

    def turn(self) -> bool:
        """One thing that happens now, or else the next moment. False: there is none."""
        engine_first = self.race and self.random.randrange(100) < self.race
        if engine_first and self.engine.can_work() and self.engine.work():
            return True
        if self.step() or (self.engine.can_work() and self.engine.work()):
            return True
        moment_ns = self.next_moment_ns()
        if moment_ns is None:
            return False
        self.timeline.go_to(moment_ns)
        return True

    def step(self) -> bool:
        """A step of the loop, if there is one, and what must hold after it."""
        if not self.loop.step():
            return False
        if self.checks:
            check(self.state)
        self.watch()
        return True

    def note(self, record: Record) -> None:
        """Counts what happened, and when requests ended."""
        self.records[type(record.event).__name__] += 1
        if isinstance(
            record.event,
            events.RequestFinished | events.RequestAborted | events.RequestCancelled,
        ):
            request_id = record.event.request_id
            assert request_id not in self.ended_ns, f"{request_id} ends twice"
            self.ended_ns[request_id] = self.timeline.now_ns

    def next_moment_ns(self) -> int | None:
        """The next moment at which something can happen."""
        now_ns = self.timeline.now_ns
        moments = [self.timeline.next_ns()]
        if not self.engine.idle:
            moments.append(self.engine.free_ns)
        due_ns = deadline_ns(self.state)
        if due_ns is not None:
            moments.append(due_ns - self.timeline.wall_ns() + now_ns)
        reading_ns = None if self.sensors.gauge is None else self.sensors.gauge.wait_ns(self.state)
        if self.state.requests and reading_ns is not None:
            moments.append(now_ns + reading_ns)
        coming = [max(moment, now_ns) for moment in moments if moment is not None]
        return min(coming, default=None)

    def read_memory(self) -> MemoryReading:
        """The allocator's counters, as `read` changes them."""
        return self.read(self.engine.read_memory())

    def take_memory(self, num_bytes: int) -> None:
        """Something takes so much of the allocator's memory, or gives it back (negative)."""
        self.ballast_bytes += num_bytes

    def fill_disk(self) -> None:
        """From here on nothing can be written."""
        self.disk.is_full = True

    def free_disk(self) -> None:
        """The disk has room again, and a probe finds out."""
        self.disk.is_full = False
        self.store.probe()

    def lose_file(self, which: int) -> None:
        """One of the files is gone, in memory too."""
        names = sorted(self.disk.files)
        if names:
            name = names[which % len(names)]
            del self.disk.files[name]
            self.store.forget(name)

    # What came of it

    def divergences(self) -> list[Divergence]:
        """Every step that is decided differently when it is decided again."""
        return list(Replay(self.journal.read()).divergences())

    def expected_tokens(self, request_id: str, num_tokens: int) -> list[int]:
        """What the engine puts out for this prompt when nothing disturbs it: what it had put out
        when a process was killed, and from there on the tokens of the next one.
        """
        digest = prompt_digest(self.prompts[request_id])
        tokens = self.told.get(request_id, [])[:]
        tokens += [fake_token(digest, i, self.nonce) for i in range(len(tokens), num_tokens)]
        if num_tokens and self.streams[request_id].tokens[-1] == END_OF_TURN:
            tokens[-1] = END_OF_TURN
        return tokens

    def describe(self, what: str) -> str:
        """One line for people: where everybody is."""
        requests = ", ".join(
            f"{r.number} {r.phase.value} {r.num_cached_tokens}/{r.num_known_tokens}"
            for r in self.state.requests.values()
        )
        return (
            f"seed {self.seed}, step {self.state.step},"
            f" {self.timeline.now_ns / 1e9:.3f} s: {what}; {requests}"
        )


def nothing() -> None:
    """Nobody watches."""


def same(reading: MemoryReading) -> MemoryReading:
    """A reading as it was taken."""
    return reading


class NobodyElse:
    """A machine with nothing on it but the server, and memory enough."""

    def read(self) -> MachineReading:
        return MachineReading(0, 10**12)


def no_space() -> None:
    raise AssertionError("a journal in memory is never full")


def arrival_of(request_id: str, prompt: "array[int]", asked: Asked, seed: int) -> Arrival:
    """A request as HTTP hands it over."""
    sampling = SamplingParameters(seed=seed, ignore_end_of_turn=not asked.ends_turn)
    parameters = RequestParameters(
        route="completions", model="fake", created=1, stream=True, sampling=sampling
    )
    return Arrival(request_id, None, "completions", True, prompt, asked.max_tokens, parameters)
