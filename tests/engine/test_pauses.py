"""A row that was held and goes on is, to the bit, the row that was never held."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from scheduler.engine.base import (
    ReleaseStep,
    RestoreRow,
    RunChunk,
    SaveTail,
    SetBatch,
    StartRow,
    StepDone,
)
from scheduler.parameters import SamplingParameters
from tests.engine.driver import GREEDY, Driver
from tests.engine.holding import BLOCK, WAIT_S, Holding, chain
from tests.engine.models import TinyModel, held, numbers, same_logprobs

pytestmark = pytest.mark.engine

PROMPT, OTHER = numbers(90, 1), numbers(40, 2)
NUM_TOKENS = 175
"""Output: beyond the step of 256 positions in which caches grow."""

PAUSES = (92, 95, 97, 112, 127, 129, 144, 193, 200, 254, 256, 258)
"""Positions at which the row is held: about the ends of blocks, of windows of 8 and of 256."""

ASKED = {"logprobs": True, "top_logprobs": 3}
SAMPLINGS = {
    "greedy": SamplingParameters(seed=1, **ASKED),
    "seeded, penalised": SamplingParameters(
        seed=7,
        temperature=0.9,
        top_p=0.95,
        repetition_penalty=1.1,
        presence_penalty=0.3,
        frequency_penalty=0.1,
        **ASKED,
    ),
}

Get = Callable[[str], TinyModel]
Make = Callable[[str], Holding]


@pytest.fixture
def make_holding(get_model: Get, tmp_path: Path) -> Iterator[Make]:
    """An engine over a store, for the model with this name."""
    made: list[Holding] = []

    def make(name: str) -> Holding:
        made.append(Holding(get_model(name), tmp_path))
        return made[-1]

    yield make
    for holding in made:
        holding.kv.close(WAIT_S)


def run_alone(
    model: TinyModel,
    prompt: tuple[int, ...],
    num_tokens: int,
    sampling: SamplingParameters = GREEDY,
    chunk_tokens: int = 4096,
) -> Driver:
    """The row as it is when nobody disturbs it, under number 1."""
    driver = Driver(model)
    driver.add(1, prompt, sampling=sampling, chunk_tokens=chunk_tokens)
    driver.set_batch(1)
    while len(driver.tokens(1)) < num_tokens and (
        not driver.of(StepDone) or driver.of(StepDone)[-1].rows[0].ended is None
    ):
        driver.step()
    return driver


def check_same(driver: Driver, number: int, alone: Driver) -> None:
    """Tokens, log-probabilities, and what the caches hold in the end, with the launched step."""
    assert driver.tokens(number) == alone.tokens(1)
    assert same_logprobs(driver.logprobs(number), alone.logprobs(1))
    driver.worker.settle()
    alone.worker.settle()
    pairs = zip(held(driver.row(number).caches), held(alone.row(1).caches), strict=True)
    assert all(np.array_equal(found, expected) for found, expected in pairs)


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize("name", ["plain", "hybrid", "gemma3_text"])
def test_twelve_pauses_leave_no_trace(
    make_holding: Make, name: str, sampling: SamplingParameters
) -> None:
    holding = make_holding(name)
    driver = holding.driver
    driver.add(1, PROMPT, sampling=sampling)
    for position in PAUSES:
        driver.set_batch(1)
        while len(PROMPT) + len(driver.tokens(1)) < position:
            driver.step()
        row = holding.pause(1)
        assert row.num_tokens == position
        holding.resume(row)
    driver.set_batch(1)
    driver.steps(NUM_TOKENS - len(driver.tokens(1)))
    check_same(driver, 1, run_alone(driver.model, PROMPT, NUM_TOKENS, sampling))


@pytest.mark.parametrize("name", ["plain", "hybrid"])
def test_a_stop_string_ends_a_row_across_a_pause(make_holding: Make, name: str) -> None:
    holding = make_holding(name)
    tokens = run_alone(holding.driver.model, PROMPT, 12).tokens(1)
    stop = "".join(chr(ord("A") + token) for token in tokens[7:11])
    sampling = SamplingParameters(seed=1, stop=(stop,))
    holding.driver.add(1, PROMPT, sampling=sampling)
    holding.driver.set_batch(1)
    holding.driver.steps(8)  # the launched step brings the ninth, in the middle of the string
    holding.resume(holding.pause(1))
    holding.driver.set_batch(1)
    holding.driver.steps(2)
    assert holding.driver.of(StepDone)[-1].rows[0].ended == "stop"
    check_same(holding.driver, 1, run_alone(holding.driver.model, PROMPT, 40, sampling))


@pytest.mark.parametrize("name", ["plain", "hybrid"])
def test_a_tail_waits_for_the_row_and_for_no_other(make_holding: Make, name: str) -> None:
    """It is asked for while the last step with the row is under way. The other row decodes on."""
    holding = make_holding(name)
    driver = holding.driver
    driver.add(1, PROMPT)
    driver.add(2, OTHER)
    driver.set_batch(1, 2)
    driver.steps(5)
    position = len(PROMPT) + 5
    start = position // BLOCK * BLOCK
    holding.save(1)
    driver.work(SetBatch(2, (2,)), SaveTail(1, "req_1", start), ReleaseStep())
    assert [row.number for row in driver.of(StepDone)[-1].rows] == [1, 2]
    assert holding.facts.empty()
    driver.step()
    row = holding.end_pause(1, start)
    assert row.num_tokens == position
    driver.steps(3)
    holding.resume(row)
    driver.set_batch(1, 2)
    driver.steps(8)
    driver.set_batch()
    driver.work(ReleaseStep())
    driver.work(ReleaseStep())
    for number, prompt in ((1, PROMPT), (2, OTHER)):
        alone = run_alone(driver.model, prompt, len(driver.tokens(number)))
        assert driver.tokens(number) == alone.tokens(1)


@pytest.mark.parametrize("name", ["plain", "hybrid"])
def test_rows_that_stand_still_are_saved_as_they_are(make_holding: Make, name: str) -> None:
    """Nothing is launched after the last step of both: each has to get its own state back."""
    holding = make_holding(name)
    driver = holding.driver
    driver.add(1, PROMPT)
    driver.add(2, OTHER)
    driver.set_batch(1, 2)
    driver.steps(9)
    rows = [holding.pause(1), holding.pause(2)]
    for row in rows:
        holding.resume(row)
    driver.set_batch(1, 2)
    driver.steps(9)
    for number, prompt in ((1, PROMPT), (2, OTHER)):
        check_same(driver, number, run_alone(driver.model, prompt, len(driver.tokens(number))))


@pytest.mark.parametrize("name", ["plain", "hybrid"])
def test_a_pause_between_two_chunks(make_holding: Make, name: str) -> None:
    """Not at the end of a block, beside a row that decodes, and with one that shares the prefix."""
    holding = make_holding(name)
    driver = holding.driver
    driver.add(2, OTHER)
    driver.set_batch(2)
    driver.steps(3)
    driver.work(StartRow(1, "req_1", PROMPT, len(PROMPT), 1000, GREEDY))
    driver.step(RunChunk(1, 10, 0, 2 * BLOCK))
    holding.save(1, with_state=True)
    driver.step(RunChunk(1, 11, 2 * BLOCK, 5))
    row = holding.pause(1, 2)
    assert (row.num_tokens, len(row.hashes)) == (2 * BLOCK + 5, 2)

    states = (2,) if name == "hybrid" else ()
    third = StartRow(3, "req_3", (*PROMPT[:50], 7, 8, 9), 53, 1000, GREEDY)
    shared = RestoreRow(3, chain(PROMPT, 2), 2 * BLOCK, states)
    assert holding.restore(third, shared).num_tokens == 2 * BLOCK
    driver.step(RunChunk(3, 12, 2 * BLOCK, 52 - 2 * BLOCK))
    driver.step()

    holding.resume(row)
    driver.step(RunChunk(1, 13, row.num_tokens, len(PROMPT) - 1 - row.num_tokens))
    driver.step()
    driver.set_batch(1, 2, 3)
    driver.steps(12)
    for number, prompt in ((1, PROMPT), (2, OTHER), (3, third.token_ids)):
        check_same(driver, number, run_alone(driver.model, prompt, len(driver.tokens(number))))
