"""The order of launching, delivering and leaving: scheduler/engine/base.py's rules."""

import queue
from collections.abc import Callable

import mlx.core as mx
import pytest

from scheduler.engine import attention
from scheduler.engine.base import (
    ChunkDone,
    DropRow,
    ReleaseStep,
    RowFreed,
    RowTokens,
    RunChunk,
    SetBatch,
    StartRow,
    StepDone,
)
from scheduler.engine.mlx_engine import Commands
from scheduler.engine.saved import Ready
from scheduler.parameters import SamplingParameters
from tests.engine.driver import GREEDY, Driver
from tests.engine.models import TinyModel, decode_alone, numbers, same_caches

pytestmark = pytest.mark.engine

PROMPT, OTHER = numbers(9, 1), numbers(14, 2)


@pytest.fixture
def driver(get_model: Callable[[str], TinyModel]) -> Driver:
    """Rows 1 and 2, prefilled."""
    driver = Driver(get_model("plain"))
    driver.add(1, PROMPT)
    driver.add(2, OTHER)
    return driver


def expected_tokens(driver: Driver, prompt: tuple[int, ...], count: int) -> list[int]:
    return decode_alone(driver.model.model, prompt, count).tokens


def check_boundary(driver: Driver, number: int) -> None:
    """All tokens that were delivered but the last are cached, and nothing else."""
    row = driver.row(number)
    assert attention.positions(row.caches) == {row.cached}
    assert row.cached == row.start.num_prompt_tokens + len(driver.tokens(number)) - 1


def test_one_token_prompt_needs_no_chunk(get_model: Callable[[str], TinyModel]) -> None:
    driver = Driver(get_model("plain"))
    driver.add(1, (7,))
    driver.set_batch(1)
    driver.steps(3)
    assert driver.of(ChunkDone) == []
    assert driver.tokens(1) == expected_tokens(driver, (7,), 3)


def test_no_step_is_delivered_before_the_one_before_is_committed(driver: Driver) -> None:
    driver.set_batch(1, 2)
    driver.work()
    assert len(driver.of(StepDone)) == 1
    driver.work()
    assert len(driver.of(StepDone)) == 1
    driver.work(ReleaseStep())
    assert len(driver.of(StepDone)) == 2


def test_only_one_step_is_launched_beyond_the_delivered_one(driver: Driver) -> None:
    driver.set_batch(1)
    for num_delivered in range(1, 6):
        driver.step()
        assert driver.row(1).cached == len(PROMPT) + num_delivered


def test_row_that_leaves_gets_its_launched_token_and_stops_at_a_boundary(driver: Driver) -> None:
    driver.set_batch(1, 2)
    driver.steps(3)
    step = driver.step(SetBatch(2, (2,)))
    assert [row.number for row in step.rows] == [1, 2]
    step = driver.step()
    assert [row.number for row in step.rows] == [2]
    check_boundary(driver, 1)
    assert driver.tokens(1) == expected_tokens(driver, PROMPT, 4)


def test_row_that_left_comes_back_where_it_was(driver: Driver) -> None:
    driver.set_batch(1, 2)
    driver.steps(3)
    driver.set_batch(2)
    driver.steps(4)
    driver.set_batch(1, 2)
    driver.steps(3)
    tokens = driver.tokens(1)
    assert len(tokens) == 6
    assert tokens == expected_tokens(driver, PROMPT, 6)


def test_dropped_row_gets_no_token_from_the_launched_step(driver: Driver) -> None:
    driver.set_batch(1, 2)
    driver.steps(3)
    driver.work(SetBatch(2, (2,)), DropRow(1))
    assert [freed.number for freed in driver.of(RowFreed)] == [1]
    driver.work(ReleaseStep())
    assert driver.of(StepDone)[-1].rows[0] == RowTokens(1, (), None)
    driver.steps(2)
    assert driver.tokens(1) == expected_tokens(driver, PROMPT, 3)
    assert driver.tokens(2) == expected_tokens(driver, OTHER, 6)


def test_dropped_row_frees_its_memory(driver: Driver) -> None:
    driver.set_batch(1, 2)
    driver.steps(3)
    held = sum(cache.nbytes for cache in driver.row(1).caches)
    driver.work(SetBatch(2, (2,)), DropRow(1))
    assert driver.of(RowFreed)[0].freed_bytes >= held


def test_row_that_left_holds_nothing_of_the_others(get_model: Callable[[str], TinyModel]) -> None:
    driver = Driver(get_model("hybrid"))
    for number in range(8):
        driver.add(number, PROMPT)
    driver.set_batch(*range(8))
    driver.steps(3)
    driver.set_batch(1, 2)
    driver.steps(2)
    others = [number for number in range(8) if number != 5]
    before = mx.get_active_memory()
    driver.set_batch()
    driver.work(*(DropRow(number) for number in others))
    freed = sum(result.freed_bytes for result in driver.of(RowFreed))
    held = sum(cache.nbytes for cache in driver.row(5).caches)
    assert before - mx.get_active_memory() >= 7 * held
    assert freed >= 7 * held


def test_unknown_row_is_freed_with_nothing(driver: Driver) -> None:
    driver.work(DropRow(99))
    assert driver.results[-1] == RowFreed(99, 0)


def test_length_ends_a_row_without_a_step_too_many(get_model: Callable[[str], TinyModel]) -> None:
    driver = Driver(get_model("hybrid"))
    driver.add(1, PROMPT, max_tokens=3)
    driver.add(2, OTHER)
    driver.set_batch(1, 2)
    driver.steps(5)
    ends = [(row.number, row.ended) for step in driver.of(StepDone) for row in step.rows]
    assert ends == [(1, None), (2, None)] * 2 + [(1, "length"), (2, None)] + [(2, None)] * 2
    check_boundary(driver, 1)
    driver.worker.settle()
    alone = decode_alone(driver.model.model, PROMPT, 3)
    assert same_caches(driver.row(1).caches, alone.caches)


def test_end_of_turn_takes_the_launched_position_back(
    get_model: Callable[[str], TinyModel],
) -> None:
    model = get_model("plain")
    fourth = decode_alone(model.model, PROMPT, 4).tokens[3]
    driver = Driver(model, end_of_turn_ids=(fourth,))
    driver.add(1, PROMPT)
    driver.add(2, OTHER)
    driver.set_batch(1, 2)
    driver.steps(7)
    assert driver.of(StepDone)[3].rows[0] == RowTokens(1, (fourth,), "end_of_turn")
    assert [row.number for step in driver.of(StepDone)[4:] for row in step.rows] == [2, 2, 2]
    check_boundary(driver, 1)
    driver.worker.settle()
    alone = decode_alone(model.model, PROMPT, 4)
    assert same_caches(driver.row(1).caches, alone.caches)


def test_end_of_turn_can_be_ignored(get_model: Callable[[str], TinyModel]) -> None:
    model = get_model("plain")
    tokens = decode_alone(model.model, PROMPT, 6).tokens
    driver = Driver(model, end_of_turn_ids=(tokens[2],))
    driver.add(1, PROMPT, sampling=SamplingParameters(seed=1, ignore_end_of_turn=True))
    driver.set_batch(1)
    driver.steps(6)
    assert driver.tokens(1) == tokens


def test_stop_string_over_two_tokens_ends_the_row(get_model: Callable[[str], TinyModel]) -> None:
    model = get_model("plain")
    tokens = decode_alone(model.model, PROMPT, 4).tokens
    stop = "".join(chr(ord("A") + token) for token in tokens[2:4])
    driver = Driver(model)
    driver.add(1, PROMPT, sampling=SamplingParameters(seed=1, stop=(stop,)))
    driver.set_batch(1)
    driver.steps(4)
    assert driver.of(StepDone)[-1].rows[0].ended == "stop"
    assert driver.tokens(1) == tokens


def test_stop_string_is_found_across_a_restart(get_model: Callable[[str], TinyModel]) -> None:
    model = get_model("plain")
    tokens = decode_alone(model.model, PROMPT, 4).tokens
    stop = "".join(chr(ord("A") + token) for token in tokens[2:4])
    driver = Driver(model)
    sampling = SamplingParameters(seed=1, stop=(stop,))
    driver.add(1, PROMPT, output=tokens[:3], sampling=sampling)
    driver.set_batch(1)
    assert driver.step().rows[0] == RowTokens(1, (tokens[3],), "stop")


def test_a_decode_step_runs_between_two_chunks(driver: Driver) -> None:
    driver.set_batch(1, 2)
    driver.steps(2)
    driver.work(StartRow(3, "req_3", numbers(40), 40, 10, GREEDY))
    driver.work(RunChunk(3, 0, 0, 8))
    for chunk in range(1, 4):
        driver.results.clear()
        driver.work(RunChunk(3, chunk, 8 * chunk, 8))
        assert driver.results == []
        driver.work(ReleaseStep())
        assert [type(result) for result in driver.results] == [StepDone, ChunkDone]


def test_chunk_of_a_dropped_row_is_not_run(driver: Driver) -> None:
    driver.work(StartRow(3, "req_3", numbers(40), 40, 10, GREEDY))
    driver.work(StartRow(4, "req_4", numbers(30), 30, 10, GREEDY))
    driver.results.clear()
    driver.worker.obey(RunChunk(3, 1, 0, 8))
    driver.worker.obey(RunChunk(4, 2, 0, 8))
    driver.work(DropRow(3))
    assert [done.number for done in driver.of(ChunkDone)] == [4]


def test_chunk_waits_for_no_batch_that_has_ended(get_model: Callable[[str], TinyModel]) -> None:
    driver = Driver(get_model("plain"))
    driver.add(1, PROMPT, max_tokens=1)
    driver.set_batch(1)
    driver.step()
    driver.work(StartRow(2, "req_2", OTHER, len(OTHER), 10, GREEDY))
    for chunk in range(2):
        driver.work(RunChunk(2, chunk, 4 * chunk, 4))
    assert [done.number for done in driver.of(ChunkDone)] == [1, 2, 2]


def test_rows_decode_between_the_blocks_of_a_row_that_is_filled(driver: Driver) -> None:
    driver.set_batch(1)
    commands: Commands = queue.SimpleQueue()
    for command in (Ready(2), Ready(2), None):
        commands.put(command)
    driver.worker.serve(commands)
    assert len(driver.of(StepDone)) == 1, "the next one waits for its release"
