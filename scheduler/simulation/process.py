"""One process of a simulated server: what begins with it, and what is gone with it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from journal.journal import Journal
from scheduler.deadlines import deadline_ns
from scheduler.engine.base import MemoryReading
from scheduler.engine.fake_tokenizer import FakeTokenizer
from scheduler.engine.model import ModelDescription
from scheduler.evolve import fold
from scheduler.gauge import Gauge
from scheduler.kvstore import KvStore
from scheduler.loop import Loop
from scheduler.machine import MachineReading
from scheduler.recovery import Recovered, recover
from scheduler.run import server_started
from scheduler.sensors import Sensors
from scheduler.settings import NS_PER_S, Settings
from scheduler.simulation.disk import SimulatedDisk
from scheduler.simulation.engine import SimulatedEngine
from scheduler.simulation.hardware import Hardware
from scheduler.simulation.journal import SimulatedJournal
from scheduler.simulation.store import SimulatedStore
from scheduler.simulation.timeline import Timeline
from scheduler.state import SchedulerState
from scheduler.stopping import Stopping


@dataclass(frozen=True, slots=True)
class Machine:
    """What outlives a process. `read_memory` are the engine's counters as they are seen,
    `ballast_bytes` what is in its allocator beside its own, and `wait_for_space` what happens
    between two tries of a commit.
    """

    timeline: Timeline
    journal: SimulatedJournal
    disk: SimulatedDisk
    read_memory: Callable[[], MemoryReading]
    ballast_bytes: Callable[[], int]
    wait_for_space: Callable[[], None]


class Process:
    """See the module's text. `begin` is its first step."""

    def __init__(
        self, settings: Settings, hardware: Hardware, machine: Machine, nonce: int
    ) -> None:
        self.settings = settings
        self.hardware = hardware
        self.timeline = machine.timeline
        self.nonce = nonce
        journal = cast("Journal", machine.journal)
        self.recovered = recover(journal, settings.requests.max_lingering)
        self.state, self.hub = self.recovered.state, self.recovered.hub
        self.sensors = Sensors(self.recovered.known, settings.scheduler.max_inbox, machine.timeline)
        self.stopping = Stopping(settings.server, machine.timeline)
        self.loop = Loop(settings, journal, self.recovered, self.sensors, machine.wait_for_space)
        facts = hardware.facts
        self.engine = SimulatedEngine(
            facts, nonce, settings.fake, machine.timeline, hardware.engine
        )
        self.store = SimulatedStore(
            facts, settings.kv, machine.disk, self.sensors.deliver_fact, self.engine.nudge
        )
        self.engine.held_elsewhere = lambda: self.store.held_bytes() + machine.ballast_bytes()
        self.gauge = Gauge(
            settings.memory.sample_ms, machine.timeline, machine.read_memory, NobodyElse()
        )
        self.sensors.gauge = self.gauge
        self.has_looked = False

    def begin(self) -> None:
        """The first step, and the start of the engine."""
        facts = self.hardware.facts
        description = ModelDescription(facts.name, FakeTokenizer(), facts, blas="none")
        started = server_started(self.settings, description, self.nonce)
        self.loop.begin(started, self.engine, cast("KvStore", self.store))

    def step(self) -> bool:
        """A step of the loop, if there is a fact for one. Where there was none, there is none at
        the same moment before something is put in, or happens (`has_looked` is for who knows).
        """
        wake = self.sensors.wake
        if self.has_looked and not wake.is_set():
            return False
        wake.clear()
        self.has_looked = not self.loop.step()
        return not self.has_looked

    def moments(self) -> list[int | None]:
        """When the engine is free, and what time itself brings; see `Run.waits_s`."""
        now_ns = self.timeline.now_ns
        moments: list[int | None] = []
        if not self.engine.idle:
            moments.append(self.engine.free_ns)
        due_ns = deadline_ns(self.state)
        if due_ns is not None:
            moments.append(due_ns - max(self.state.now_ns, self.timeline.wall_ns()) + now_ns)
        reading_ns = self.gauge.wait_ns(self.state)
        if self.state.requests and reading_ns is not None:
            moments.append(now_ns + reading_ns)
        if self.stopping.begun:
            moments.append(now_ns + round(self.stopping.wait_s() * NS_PER_S) + 1)
        return moments

    def has_stopped(self) -> bool:
        """Whether a stop has come to its end; see `Run.is_over`."""
        if not self.state.stopping:
            return False
        if self.stopping.drain_is_over() and not self.sensors.drained:
            self.sensors.end_drain()
        is_empty = not self.state.admitted and not self.state.index.writing_bytes
        return is_empty or self.stopping.is_over()


def assert_same(journal: SimulatedJournal, recovered: Recovered) -> None:
    """A snapshot with what came after it is what all events come to."""
    state = SchedulerState()
    fold(state, journal.read())
    assert state == recovered.state, "a snapshot says something else than the events"


class NobodyElse:
    """A machine with nothing on it but the server, and memory enough."""

    def read(self) -> MachineReading:
        return MachineReading(0, 10**12)
