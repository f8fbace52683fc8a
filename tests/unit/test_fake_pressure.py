"""The fake engine under memory pressure: what its allocator counts, and when it cuts tails."""

from journal.events import ModelFacts
from scheduler.engine.base import (
    ChunkDone,
    DropRow,
    EngineCommand,
    EngineResult,
    MemoryReading,
    MemoryReturned,
    ReclaimMemory,
    ReleaseStep,
    RestoreRow,
    RowFreed,
    RowRestored,
    RunChunk,
    SaveTail,
    SetBatch,
    StartRow,
    StepDone,
)
from scheduler.engine.fake import FakeEngine, fake_facts
from scheduler.engine.fake_row import Failure
from scheduler.engine.fake_settings import FakeSettings
from scheduler.parameters import SamplingParameters
from tests.tail_port import TailPort

GONE = "the row is gone, has ended or has failed"
HYBRID = FakeSettings(
    weights_bytes=10_000_000,
    kv_bytes_per_token=1_000,
    kv_step_tokens=100,
    state_bytes=50_000,
    transient_bytes_per_token=10,
)


class Bench:
    """A loaded engine without a thread, its port, and what it delivered."""

    def __init__(self, settings: FakeSettings = HYBRID) -> None:
        self.facts: ModelFacts = fake_facts(settings)
        self.port = TailPort()
        self.engine = FakeEngine(self.facts, 1, settings, threaded=False)
        self.results: list[EngineResult] = []
        self.engine.start(self.results.append, self.port)
        self.run()

    def run(self, *commands: EngineCommand) -> list[EngineResult]:
        """Hands commands over, lets the engine work until it has nothing to do."""
        for command in commands:
            self.engine.submit(command)
        self.engine.work_until_idle()
        results, self.results[:] = list(self.results), []
        return results

    def add(self, number: int, num_tokens: int, max_tokens: int = 100) -> None:
        """A row with so many tokens, all but the last of them fed."""
        self.run(start(number, num_tokens, max_tokens))
        if num_tokens > 1:
            self.run(RunChunk(number, number, 0, num_tokens - 1))

    def read(self) -> tuple[int, int, int]:
        """Active, cached and peak bytes beyond the weights."""
        reading = self.engine.read_memory()
        weights = self.facts.weights_bytes
        return reading.active_bytes - weights, reading.cached_bytes, reading.peak_bytes - weights


def start(number: int, num_tokens: int, max_tokens: int = 100) -> StartRow:
    tokens = tuple(range(num_tokens))
    sampling = SamplingParameters(seed=1, ignore_end_of_turn=True)
    return StartRow(number, f"req_{number}", tokens, num_tokens, max_tokens, sampling)


# Memory


def test_sizes_make_another_model() -> None:
    facts = fake_facts(HYBRID)
    assert (facts.weights_bytes, facts.state_bytes) == (10_000_000, 50_000)
    assert (facts.kv_bytes_per_token, facts.kv_step_tokens) == (1_000, 100)
    assert facts.transient_bytes_per_token == 10
    assert facts.fingerprint != fake_facts(FakeSettings()).fingerprint


def test_nothing_is_in_use_before_the_model_is_loaded() -> None:
    engine = FakeEngine(fake_facts(HYBRID), 1, HYBRID, threaded=False)
    assert engine.read_memory() == MemoryReading(0, 0, 0)


def test_freed_rows_are_kept_until_somebody_takes_or_reclaims_them() -> None:
    bench = Bench()
    bench.add(1, 101)
    row_bytes = 50_000 + 100 * 1_000
    assert bench.run(DropRow(1)) == [RowFreed(1, row_bytes)]
    assert bench.read()[:2] == (0, row_bytes)
    bench.run(start(2, 1), SetBatch(1, (2,)))  # one token: its caches take one step
    assert bench.read()[:2] == (row_bytes, 0)
    bench.run(DropRow(2))
    [returned] = bench.run(ReclaimMemory())
    assert returned == MemoryReturned(row_bytes, 10_000_000, 0, 0)
    assert bench.read()[:2] == (0, 0)


def test_a_row_takes_from_what_is_kept_first() -> None:
    bench = Bench()
    bench.add(1, 301)
    bench.run(DropRow(1))
    bench.run(start(2, 1), SetBatch(1, (2,)))
    assert bench.read()[:2] == (150_000, 200_000)


def test_the_peak_is_that_since_the_reading_before() -> None:
    bench = Bench()
    bench.add(1, 101)
    bench.run(DropRow(1))
    assert bench.read()[2] == 150_000 + 100 * 10
    assert bench.read()[2] == 0


def test_a_chunk_has_its_own_peak_and_leaves_nothing_for_reuse() -> None:
    bench = Bench()
    bench.add(1, 101)
    bench.run(DropRow(1))
    [done] = bench.run(start(2, 51), RunChunk(2, 7, 0, 50))
    assert isinstance(done, ChunkDone)
    assert done.active_bytes == 10_000_000 + 150_000
    assert done.peak_bytes == done.active_bytes + 500
    assert bench.read()[1] == 0


def test_ballast_is_in_use_and_nobody_s() -> None:
    bench = Bench()
    bench.engine.memory.set_ballast(7_000)
    assert bench.read() == (7_000, 0, 7_000)
    bench.engine.memory.set_ballast(0)
    assert bench.read() == (0, 0, 7_000)


def test_a_row_that_is_filled_takes_all_its_room_at_once() -> None:
    bench = Bench()
    for command in (start(1, 350), RestoreRow(1, ("a" * 64,), 16, ())):
        bench.engine.submit(command)
    while bench.engine.commands:
        bench.engine.work()
    assert bench.read()[0] == 50_000 + 400 * 1_000
    bench.port.restoring.result = RowRestored(1, 0, 0, 0, 0, 0)
    bench.run()
    assert bench.read()[:2] == (0, 450_000)
    assert bench.run(DropRow(1)) == [RowFreed(1, 0)]


# Tails


def test_a_tail_waits_for_the_step_with_its_row_and_no_longer() -> None:
    """Another row decodes on all the time."""
    bench = Bench()
    bench.add(1, 10)
    bench.add(2, 20)
    bench.run(SetBatch(1, (1, 2)))
    bench.run(SetBatch(2, (2,)), SaveTail(1, "req_1", 0), ReleaseStep())
    assert bench.port.answers == [], "its last token is delivered and not committed"
    assert bench.engine.ahead is not None
    bench.run(ReleaseStep())
    assert bench.port.answers == [(1, 11)]
    assert bench.engine.unreleased, "the other one decoded meanwhile"


def test_a_tail_of_a_row_that_decodes_in_no_batch_is_cut_at_once() -> None:
    bench = Bench()
    bench.add(1, 10)
    bench.run(SaveTail(1, "req_1", 0))
    assert bench.port.answers == [(1, 9)]


def test_a_row_that_is_gone_gets_no_tail() -> None:
    bench = Bench()
    bench.add(1, 10)
    bench.run(SaveTail(7, "req_7", 0))
    bench.run(SetBatch(1, (1,)))
    bench.run(SetBatch(2, ()), SaveTail(1, "req_1", 0), DropRow(1), start(1, 5))
    assert bench.port.answers == [(7, GONE)], "the step before is not committed"
    assert bench.run(ReleaseStep()) == [], "the row of that number is another one now"
    assert bench.port.answers == [(7, GONE), (1, GONE)]


def test_a_row_that_has_ended_or_failed_gets_no_tail() -> None:
    bench = Bench()
    bench.engine.failures.append(Failure(2, "prefill"))
    bench.add(1, 10, max_tokens=2)
    bench.add(2, 10)
    [step] = [r for r in bench.run(SetBatch(1, (1,))) if isinstance(r, StepDone)]
    assert step.rows[0].ended is None
    bench.run(SetBatch(2, ()), SaveTail(1, "req_1", 0), SaveTail(2, "req_2", 0), ReleaseStep())
    bench.run(ReleaseStep())
    assert bench.port.answers == [(1, GONE), (2, GONE)]
