"""The allocator's counters, giving back what it keeps, and rows whose tails are not cut."""

from collections.abc import Callable

import mlx.core as mx
import pytest

from scheduler.engine.allocator import Allocator
from scheduler.engine.base import (
    ChunkDone,
    DropRow,
    MemoryReading,
    MemoryReturned,
    ReclaimMemory,
    ReleaseStep,
    SaveTail,
    SetBatch,
    StartRow,
)
from scheduler.engine.mlx_engine import MlxEngine
from tests.engine.driver import GREEDY, Driver, LetterTokenizer
from tests.engine.models import TinyModel, numbers
from tests.tail_port import TailPort

pytestmark = pytest.mark.engine

BIG = 2**22
GONE = "the row is gone, has ended or has failed"
PROMPT, OTHER = numbers(9, 1), numbers(14, 2)


def use(num_bytes: int) -> None:
    """Takes so much memory, and lets go of it."""
    mx.eval(mx.ones((num_bytes // 4,), dtype=mx.float32))


def never() -> None:
    raise AssertionError("the engine is not started")


def test_nothing_is_read_before_the_model_is_loaded() -> None:
    engine = MlxEngine(never, LetterTokenizer())  # pyright: ignore[reportArgumentType]
    assert engine.read_memory() == MemoryReading(0, 0, 0)


def test_the_peak_is_that_since_the_reading_before() -> None:
    allocator = Allocator()
    allocator.read()
    use(BIG)
    peak_bytes = allocator.read().peak_bytes
    reading = allocator.read()
    assert peak_bytes >= reading.active_bytes + BIG
    assert reading.peak_bytes == reading.active_bytes == mx.get_active_memory()


def test_a_reading_takes_nothing_from_the_peak_of_a_chunk_and_a_chunk_nothing_from_it() -> None:
    allocator = Allocator()
    allocator.read()
    use(4 * BIG)
    allocator.begin_chunk()
    use(2 * BIG)
    assert allocator.read().peak_bytes >= mx.get_active_memory() + 4 * BIG
    use(BIG)
    chunk_bytes = allocator.chunk_peak_bytes() - mx.get_active_memory()
    assert 2 * BIG <= chunk_bytes < 4 * BIG
    assert BIG <= allocator.read().peak_bytes - mx.get_active_memory() < 2 * BIG


def test_what_is_kept_is_given_back(get_model: Callable[[str], TinyModel]) -> None:
    driver = Driver(get_model("plain"))
    use(BIG)
    kept_bytes = mx.get_cache_memory()
    assert kept_bytes >= BIG
    driver.work(ReclaimMemory())
    [returned] = driver.of(MemoryReturned)
    # What the work before has released late is given back with it.
    assert returned.freed_bytes >= kept_bytes
    assert returned.cached_bytes == 0
    assert returned.active_bytes == mx.get_active_memory()


def test_the_engine_counts_what_it_feeds(get_model: Callable[[str], TinyModel]) -> None:
    driver = Driver(get_model("plain"))
    driver.add(1, PROMPT, chunk_tokens=5)
    driver.set_batch(1)
    driver.steps(3)
    assert len(driver.of(ChunkDone)) == 2
    assert driver.worker.num_prefilled_tokens == len(PROMPT) - 1


@pytest.fixture
def port() -> TailPort:
    return TailPort()


@pytest.fixture
def driver(get_model: Callable[[str], TinyModel], port: TailPort) -> Driver:
    """Rows 1, which has two tokens to go, and 2, both prefilled."""
    driver = Driver(get_model("plain"), kv=port)
    driver.add(1, PROMPT, max_tokens=2)
    driver.add(2, OTHER)
    return driver


def test_a_row_that_is_gone_gets_no_tail(driver: Driver, port: TailPort) -> None:
    """Also when its number has come back with another row."""
    driver.set_batch(1, 2)
    driver.step()
    again = StartRow(1, "req_1", OTHER, len(OTHER), 9, GREEDY)
    driver.work(SetBatch(2, (2,)), SaveTail(7, "req_7", 0), SaveTail(1, "req_1", 0), DropRow(1))
    assert port.answers == [], "the last step is not committed"
    driver.step(again)
    assert port.answers == [(7, GONE), (1, GONE)]


def test_a_row_that_ended_in_its_last_step_gets_no_tail(driver: Driver, port: TailPort) -> None:
    driver.set_batch(1, 2)
    driver.step()
    driver.step(SetBatch(2, (2,)), SaveTail(1, "req_1", 0))
    assert port.answers == []
    driver.step()
    assert port.answers == [(1, GONE)]


def test_a_row_whose_work_raised_gets_no_tail(driver: Driver, port: TailPort) -> None:
    driver.work(StartRow(3, "req_3", (10**6, 1), 2, 9, GREEDY))
    driver.work(SaveTail(3, "req_3", 0))
    assert port.answers == [(3, GONE)]


def test_a_tail_of_a_row_at_rest_is_cut_at_once(driver: Driver, port: TailPort) -> None:
    driver.work(SaveTail(2, "req_2", 0), ReleaseStep())
    assert port.answers == [(2, len(OTHER) - 1)]
