"""A whole server in one thread and in virtual time, decided by one seed.

At each moment of virtual time everything that can happen does: the loop takes its steps, the engine
begins its next piece of work, and when neither has anything to do time goes on to the next moment
at which something comes: the end of a piece of work, of a write or of a read, an arrival, a reading
of memory, a deadline. What overlaps in a real server overlaps here.

Processes come and go: one is killed at any moment, or stops, and the next one takes up the journal
and the disk. Clients see their connections lost, and come back or not.
"""

from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from journal import events
from journal.events import Record
from scheduler.engine.base import MemoryReading
from scheduler.invariants import check
from scheduler.loop import StopNow
from scheduler.replay import Divergence, Replay
from scheduler.sensors import WishFact
from scheduler.settings import NS_PER_MS, NS_PER_S, Settings
from scheduler.simulation.clients import Asked, Client, Habits, Surroundings
from scheduler.simulation.coverage import Coverage
from scheduler.simulation.disk import SimulatedDisk
from scheduler.simulation.doors import Doors
from scheduler.simulation.engine import SimulatedEngine
from scheduler.simulation.hardware import Hardware
from scheduler.simulation.journal import SimulatedJournal
from scheduler.simulation.marks import Killed, Marks
from scheduler.simulation.process import Machine, Process, assert_same
from scheduler.simulation.promises import Promises
from scheduler.simulation.store import SimulatedStore
from scheduler.simulation.timeline import Timeline
from scheduler.simulation.truth import Truth
from scheduler.state import SchedulerState
from scheduler.streams import StreamHub

PATIENT = Habits()

MAX_TURNS = 10_000
"""That one moment of virtual time may have."""

LONGEST_STEP_MS = 300
"""What a step takes at most where the loop lags."""

__all__ = ["Asked", "Habits", "Hardware", "Stuck", "World", "nothing"]


class Stuck(Exception):
    """Requests are open, and nothing goes on any more, or not within the bound of virtual time."""


@dataclass
class World:
    """See the module's text. `race` is how often, in a hundred, the engine begins its next piece of
    work before the loop has answered the last, `lag` how often the loop then takes some time for a
    step, in which more comes than one thing. `checks`: every invariant after each step.
    `watch` is called after each step, `read` may change each reading of the allocator, and
    `ballast_bytes` is what the allocator gave to something that the scheduler knows nothing of.
    The next process begins `downtime_ns` after the end of one, with the settings and the hardware
    that there are by then.
    """

    settings: Settings
    hardware: Hardware
    seed: int = 0
    race: int = 0
    lag: int = 0
    checks: bool = True
    downtime_ns: int = 0
    records: Counter[str] = field(default_factory=Counter[str])
    ended_ns: dict[str, int] = field(default_factory=dict[str, int])
    coverage: Coverage = field(default_factory=Coverage)

    def __post_init__(self) -> None:
        self.random = Random(self.seed)
        self.home = self.hardware
        self.timeline = Timeline()
        self.journal = SimulatedJournal(self.note)
        self.disk = SimulatedDisk(self.timeline, self.hardware.disk, self.hardware.disk_bytes)
        self.truth = Truth()
        self.doors = Doors(self.journal)
        self.promises = Promises(self.doors, self.disk)
        self.marks = Marks()
        self.clients: list[Client] = []
        self.contents: dict[int, array[int]] = {}
        self.num_ids = 0
        self.ballast_bytes = 0
        self.watch: Callable[[], None] = nothing
        self.read: Callable[[MemoryReading], MemoryReading] = same
        self.is_up = False
        self.busy_ns = 0
        self.num_steps = 0
        self.machine = Machine(
            timeline=self.timeline,
            journal=self.journal,
            disk=self.disk,
            read_memory=lambda: self.read(self.engine.read_memory()),
            ballast_bytes=lambda: self.ballast_bytes,
            wait_for_space=self.wait_for_space,
        )
        self.nonce = 0
        self.begin()

    # Lives

    def begin(self) -> None:
        """A process that takes up the journal and the disk. Each has a nonce of its own."""
        self.nonce += 1
        self.process = Process(self.settings, self.hardware, self.machine, self.nonce)
        if self.checks and self.process.recovered.snapshot_seq:
            assert_same(self.journal, self.process.recovered)
        self.process.begin()
        self.busy_ns = 0
        self.is_up = True
        self.doors.open(self.process.loop)

    @property
    def state(self) -> SchedulerState:
        return self.process.state

    @property
    def hub(self) -> StreamHub:
        return self.process.hub

    @property
    def engine(self) -> SimulatedEngine:
        return self.process.engine

    @property
    def store(self) -> SimulatedStore:
        return self.process.store

    def crash(self, *, power: bool = False) -> None:
        """The process is killed here; with `power`, the machine is switched off."""
        raise Killed(power=power)

    def die(self, *, power: bool) -> None:
        """What the engine and the writers had in hand is gone; what is to come from outside comes.
        A loss of power also takes what was not flushed.
        """
        last = self.journal.kept[-1].decisions if self.journal.kept else ()
        self.coverage.crash(self.state, last)
        if not self.is_up:
            self.coverage.meet("crash while starting")
        self.leave()
        for client in self.clients:
            if client.stream is not None:
                client.lost()
        if power:
            self.lose_power()
        else:
            self.disk.lose_process(self.random)
        self.rise()

    def lose_power(self) -> None:
        """What was not flushed is as if it had never been. Whoever has read of it reads on from
        what is left.
        """
        self.coverage.meet("loss of power")
        self.disk.lose_power(self.random)
        self.journal.lose_power(self.random)
        self.truth.lose(self.journal)
        ended = {row.request_id for row in self.journal.requests.values() if row.outcome}
        self.promises.lose_power(ended)
        self.ended_ns = {name: at_ns for name, at_ns in self.ended_ns.items() if name in ended}
        for client in self.clients:
            client.position = min(client.position, self.truth.num_delivered(client.answer))

    def leave(self) -> None:
        """The process is gone, with all that it had planned."""
        self.truth.end_life(self.journal, self.nonce)
        self.is_up = False
        self.doors.shut()
        self.timeline.forget()
        self.journal.close()

    def stop(self) -> None:
        """Somebody wants the process to end in good order; the second time, at once."""
        if not self.is_up:
            return
        if self.process.stopping.begun:
            self.coverage.meet("second signal")
            self.process.stopping.at_once.set()
        else:
            if self.state.admitted:
                self.coverage.meet("clean stop with rows")
            self.process.stopping.begin()
            self.process.sensors.stop("SIGTERM")

    def end(self) -> None:
        """The end of a stop that was waited for."""
        if not self.journal.is_full:
            self.process.loop.save_snapshot()
        self.leave_in_order()

    def leave_in_order(self) -> None:
        """All streams are cut, and the process is gone. The next one begins."""
        self.hub.cut_all()
        for client in self.clients:
            client.look()
        self.leave()
        self.disk.lose_process(self.random)
        self.rise()

    def rise(self) -> None:
        """The next process begins."""
        self.timeline.at(self.timeline.now_ns + self.downtime_ns, self.begin, outside=True)

    def wait_for_space(self) -> None:
        """Between two tries of a commit; see `Run.wait_for_space`."""
        self.coverage.meet("full journal")
        wait_ns = self.settings.journal.full_wait_ms * NS_PER_MS
        self.timeline.go_to(self.timeline.now_ns + wait_ns)
        if self.process.stopping.drain_is_over() or self.process.stopping.is_over():
            raise StopNow

    def plan(self, at_ns: int, happen: Callable[[], None]) -> None:
        """Something comes from outside at this moment, whichever process is there by then."""
        self.timeline.at(at_ns, happen, outside=True)

    # Requests

    def ask(self, asked: Asked, habits: Habits = PATIENT) -> str:
        """Plans a client, and returns the id of its first request."""
        around = Surroundings(self.doors, self.timeline, self.truth, self.new_id)
        client = Client(around, asked, self.prompt_of(asked, habits.content), self.seed)
        self.clients.append(client)
        client.begin(habits)
        return client.first_id

    def new_id(self) -> str:
        """The id of the next request that is sent."""
        self.num_ids += 1
        return f"req_{self.num_ids:026}"

    def prompt_of(self, asked: Asked, content: int) -> "array[int]":
        """Letters at random; what is asked again is the same."""
        if content in self.contents:
            return self.contents[content]
        prompt = array("I", self.random.choices(range(32, 127), k=asked.num_prompt_tokens))
        if asked.shares and self.clients:
            other = self.clients[0].prompt
            prompt[: asked.shares] = other[: min(asked.shares, asked.num_prompt_tokens)]
            del prompt[asked.num_prompt_tokens :]
        if content:
            self.contents[content] = prompt
        return prompt

    def wish(self, fact: WishFact) -> None:
        """Somebody wants something, as over HTTP; while nobody listens it is in vain."""
        if self.is_up:
            self.process.sensors.wish(fact)

    # Time

    def run(self, limit_ns: int) -> None:
        """Until nothing is left to happen. Raises Stuck when that is not so after `limit_ns`."""
        try:
            moment_ns, num_turns = -1, 0
            while self.turn():
                num_turns = num_turns + 1 if self.timeline.now_ns == moment_ns else 0
                moment_ns = self.timeline.now_ns
                if num_turns > MAX_TURNS:
                    raise Stuck(self.describe("time stands still"))
                if moment_ns > limit_ns:
                    limit_s = limit_ns // NS_PER_S
                    raise Stuck(self.describe(f"not over after {limit_s} virtual s"))
        finally:
            self.marks.disarm()
        if self.state.requests or any(not client.over for client in self.clients):
            raise Stuck(self.describe("nothing happens any more"))
        self.truth.end_life(self.journal, self.nonce)

    def turn(self) -> bool:
        """One thing that happens now, or else the next moment. False: there is none."""
        try:
            return self.happen()
        except Killed as death:
            self.die(power=death.power)
        except StopNow:
            self.leave_in_order()
        return True

    def happen(self) -> bool:
        """As `turn`, of a process that goes on."""
        if self.is_up and self.work():
            return True
        moment_ns = self.next_moment_ns()
        if moment_ns is None:
            return False
        self.process.has_looked = False
        self.timeline.go_to(moment_ns)
        return True

    def work(self) -> bool:
        """One thing that the process does now, if there is any."""
        if self.process.has_stopped():
            self.end()
            return True
        engine_first = self.race and self.random.randrange(100) < self.race
        if engine_first and self.engine.can_work() and self.engine.work():
            return True
        return self.step() or (self.engine.can_work() and self.engine.work())

    def step(self) -> bool:
        """A step of the loop, if there is one, and what must hold after it."""
        if self.busy_ns > self.timeline.now_ns or not self.process.step():
            return False
        self.num_steps += 1
        if self.lag and self.random.randrange(100) < self.lag:
            self.busy_ns = (
                self.timeline.now_ns + self.random.randint(1, LONGEST_STEP_MS) * NS_PER_MS
            )
        for client in self.clients:
            client.look()
        if self.checks:
            check(self.state)
            self.promises.check(self.state)
        self.watch()
        return True

    def note(self, record: Record) -> None:
        """Counts what happened, and when requests ended."""
        self.records[type(record.event).__name__] += 1
        self.coverage.note(self.state, record.event)
        self.promises.note(self.state, record.event)
        if isinstance(
            record.event,
            events.RequestFinished | events.RequestAborted | events.RequestCancelled,
        ):
            self.ended_ns[record.event.request_id] = self.timeline.now_ns

    def next_moment_ns(self) -> int | None:
        """The next moment at which something can happen."""
        moments = [self.timeline.next_ns()]
        if self.is_up and self.busy_ns > self.timeline.now_ns:
            moments += [self.busy_ns] if self.engine.idle else [self.busy_ns, self.engine.free_ns]
        elif self.is_up:
            moments += self.process.moments()
        now_ns = self.timeline.now_ns
        coming = [max(moment, now_ns) for moment in moments if moment is not None]
        return min(coming, default=None)

    # What is done to it

    def take_memory(self, num_bytes: int) -> None:
        """Something takes so much of the allocator's memory, or gives it back (negative)."""
        self.ballast_bytes += num_bytes

    def fill_disk(self) -> None:
        """From here on nothing can be written."""
        self.disk.trouble = "disk_full"

    def free_disk(self) -> None:
        """The disk works again, and a probe finds out."""
        self.disk.heal()
        self.store.probe()

    def lose_file(self, which: int) -> None:
        """One of the files is gone, in memory too."""
        names = sorted(self.disk.files)
        if names:
            name = names[which % len(names)]
            self.disk.damage(name, "missing")
            self.store.forget(name)

    # What came of it

    def divergences(self) -> list[Divergence]:
        """Every step that is decided differently when it is decided again."""
        return list(Replay(self.journal.read()).divergences())

    def describe(self, what: str) -> str:
        """One line for people: where everybody is."""
        requests = ", ".join(
            f"{r.number} {r.phase.value} {r.num_cached_tokens}/{r.num_known_tokens}"
            for r in self.state.requests.values()
        )
        clients = ", ".join(str(client) for client in self.clients if not client.over)
        return (
            f"seed {self.seed}, step {self.state.step},"
            f" {self.timeline.now_ns / 1e9:.3f} s: {what}; requests: {requests};"
            f" clients: {clients}"
        )


def nothing() -> None:
    """Nobody watches."""


def same(reading: MemoryReading) -> MemoryReading:
    """A reading as it was taken."""
    return reading
