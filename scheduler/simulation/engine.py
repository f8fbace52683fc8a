"""The fake engine in virtual time: each piece of its work occupies it for as long as it costs, and
what came of it is delivered when that time is over.
"""

from collections.abc import Callable
from dataclasses import replace

from journal.events import ModelFacts
from scheduler.engine.base import (
    ChunkDone,
    Deliver,
    EngineCommand,
    EngineResult,
    KvPort,
    MemoryReading,
    RunChunk,
)
from scheduler.engine.fake import FakeEngine
from scheduler.engine.fake_settings import FakeSettings
from scheduler.simulation.cost import EngineCost
from scheduler.simulation.store import SimulatedRestore
from scheduler.simulation.timeline import Timeline


class SimulatedEngine(FakeEngine):
    """See the module's text. `held_elsewhere` are bytes of its allocator that no row has: blocks in
    memory and in writers' hands.

    `usage_peak_bytes` is the most that was ever in use and kept, `num_steps` counts decode steps.
    """

    def __init__(
        self,
        facts: ModelFacts,
        nonce: int,
        settings: FakeSettings,
        timeline: Timeline,
        cost: EngineCost,
    ) -> None:
        super().__init__(facts, nonce, settings, threaded=False)
        self.timeline = timeline
        self.cost = cost
        self.held_elsewhere: Callable[[], int] = int
        self.free_ns = 0
        self.idle = False
        self.piece_ns = 0
        self.restores: dict[int, SimulatedRestore] = {}  # pyright: ignore[reportIncompatibleVariableOverride]
        self.usage_peak_bytes = 0
        self.num_steps = 0

    def start(self, deliver: Deliver, kv: KvPort | None = None) -> None:
        super().start(lambda result: self.deliver_later(deliver, result), kv)

    def submit(self, command: EngineCommand) -> None:
        super().submit(command)
        self.idle = False

    def nudge(self) -> None:
        """Something that the engine waits for may have come."""
        self.idle = False

    def can_work(self) -> bool:
        """Whether it is free now, and may have something to do."""
        return not self.idle and self.free_ns <= self.timeline.now_ns

    def work(self) -> bool:
        worked = super().work()
        self.idle = not worked
        self.usage_peak_bytes = max(self.usage_peak_bytes, self.usage_bytes())
        return worked

    def occupy(self, duration_ns: int) -> None:
        """The engine does nothing else for so long."""
        self.piece_ns = duration_ns
        self.free_ns = self.timeline.now_ns + duration_ns

    def deliver_later(self, deliver: Deliver, result: EngineResult) -> None:
        """What came of a piece of work is known at its end."""
        if isinstance(result, ChunkDone):
            result = replace(result, duration_ns=self.piece_ns)
        self.timeline.at(self.free_ns, lambda: deliver(result))

    # What takes time

    def run_chunk(self, command: RunChunk) -> None:
        if not self.rows[command.number].failed:
            self.occupy(self.cost.chunk_ns(command.start, command.length))
            transient_bytes = command.length * self.facts.transient_bytes_per_token
            peak_bytes = self.usage_bytes() + transient_bytes
            self.usage_peak_bytes = max(self.usage_peak_bytes, peak_bytes)
        super().run_chunk(command)

    def launch(self) -> None:
        rows = [self.rows[n] for n in self.batch.numbers if n in self.rows]
        self.occupy(self.cost.step_ns([r.num_cached_tokens + 1 for r in rows if r.decodes]))
        self.num_steps += 1
        super().launch()
        if self.ahead is not None:
            self.ahead = replace(self.ahead, duration_ns=self.piece_ns)

    # What takes room

    def advance_restores(self) -> bool:
        """One block for each row whose next block has been read; nothing is waited for."""
        rows = {n: restoring for n, restoring in self.restores.items() if restoring.has_news()}
        self.occupy(len(rows) * self.cost.copy_ns)
        for number, restoring in rows.items():
            result = restoring.advance(wait=False)
            if result is not None:
                restoring.close()
                del self.restores[number]
                self.filled(self.rows[number])
                self.deliver(result)
        return bool(rows)

    def read_memory(self) -> MemoryReading:
        self.memory.set_ballast(self.held_elsewhere())
        return super().read_memory()

    def usage_bytes(self) -> int:
        """What is in use and what is kept for reuse."""
        self.memory.set_ballast(self.held_elsewhere())
        return self.memory.usage_bytes
