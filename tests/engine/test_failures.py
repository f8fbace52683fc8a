"""What goes wrong in one row's work touches that row only."""

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

from scheduler.engine import rows
from scheduler.engine.base import (
    ChunkDone,
    DropRow,
    ReleaseStep,
    RowFailed,
    RunChunk,
    SetBatch,
    StartRow,
)
from scheduler.engine.decoding import Step
from scheduler.engine.sampling import RowSampler
from scheduler.parameters import SamplingParameters
from tests.engine.driver import GREEDY, Driver
from tests.engine.models import TinyModel, decode_alone, numbers

pytestmark = pytest.mark.engine

PROMPTS = {1: numbers(9, 1), 2: numbers(14, 2), 3: numbers(5, 3)}


class BrokenSampler(RowSampler):
    """Fails, or makes its logits no numbers, at one output index of one row."""

    broken_index = 4
    effect = "raise"

    @property
    def changes_logits(self) -> bool:
        return True

    def adjust(self, logits: mx.array) -> mx.array:
        if self.settings.seed != 2 or self.index < self.broken_index:
            return logits
        if self.effect == "raise":
            raise RuntimeError("out of luck")
        return logits * mx.array(float("nan"))


@pytest.fixture(params=["plain", "hybrid"])
def driver(get_model: Callable[[str], TinyModel], request: pytest.FixtureRequest) -> Driver:
    return Driver(get_model(request.param))


def add_all(driver: Driver) -> None:
    """Three rows, of which the one with seed 2 is to fail."""
    for number, prompt in PROMPTS.items():
        driver.add(number, prompt, sampling=SamplingParameters(seed=number))
    driver.set_batch(*PROMPTS)


def check_others(driver: Driver, *others: int) -> None:
    """The other rows have the tokens that they have alone."""
    for number in others:
        tokens = driver.tokens(number)
        assert tokens == decode_alone(driver.model.model, PROMPTS[number], len(tokens)).tokens


@pytest.mark.parametrize("effect", ["raise", "nan"])
def test_failure_in_a_row_of_a_batch_leaves_the_others(
    driver: Driver, monkeypatch: pytest.MonkeyPatch, effect: str
) -> None:
    monkeypatch.setattr(rows, "RowSampler", BrokenSampler)
    monkeypatch.setattr(BrokenSampler, "effect", effect)
    add_all(driver)
    driver.steps(9)
    failed = driver.of(RowFailed)
    assert [(one.number, one.during) for one in failed] == [(2, "decode")]
    assert ("out of luck" if effect == "raise" else "not finite") in failed[0].error
    assert [len(driver.tokens(number)) for number in PROMPTS] == [9, 4, 9]
    check_others(driver, 1, 2, 3)


def test_failed_row_can_be_made_again(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(rows, "RowSampler", BrokenSampler)
        add_all(driver)
        driver.steps(6)
    output = driver.tokens(2)
    driver.work(SetBatch(2, (1, 3)), DropRow(2))
    driver.step()
    driver.set_batch()
    driver.step()
    driver.add(2, PROMPTS[2], output=output)
    driver.set_batch(1, 2, 3)
    driver.steps(4)
    assert len(driver.tokens(2)) == len(output) + 4
    check_others(driver, 1, 2, 3)


class BrokenModel:
    """A model that raises at some of its calls, after some layers have taken the step's keys."""

    def __init__(self, model: Any, *calls: int) -> None:
        self._model = model
        self.calls = calls
        self.num_calls = 0

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        self.num_calls += 1
        if self.num_calls not in self.calls:
            return self._model(inputs, cache=cache)
        broken = [*cache[:-1], None]
        self._model(inputs, cache=broken)
        raise ValueError("broke off inside the model")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


def test_step_that_breaks_off_inside_the_model_is_repeated_row_by_row(
    get_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("plain", "hybrid"):
        tiny = get_model(name)
        # Three chunks, three steps, and the fourth breaks off.
        model = BrokenModel(tiny.model, 7)
        driver = Driver(TinyModel(model, tiny.num_vocabulary))
        add_all(driver)
        driver.steps(8)
        assert driver.of(RowFailed) == []
        assert model.num_calls > 7 + 3
        assert [len(driver.tokens(number)) for number in PROMPTS] == [8, 8, 8]
        driver.model = tiny
        check_others(driver, 1, 2, 3)


@pytest.mark.parametrize("name", ["plain", "hybrid"])
def test_step_that_fails_while_it_is_computed_voids_the_one_launched_upon_it(
    get_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    driver = Driver(get_model(name))
    add_all(driver)
    driver.set_batch(1, 2)
    driver.steps(3)
    broken: list[Step] = []
    wait = Step.wait

    def fail_once(step: Step) -> None:
        wait(step)
        if not broken or step is broken[0]:
            broken.append(step)
            raise RuntimeError("the device gave up")

    with monkeypatch.context() as patch:
        # The launched step of rows 1 and 2 fails; row 3 is in the one that was built upon it.
        patch.setattr(Step, "wait", fail_once)
        driver.work(SetBatch(9, (1, 2, 3)))
        driver.worker.obey(ReleaseStep())
        driver.worker.advance()
    driver.steps(5)
    assert driver.of(RowFailed) == []
    assert [len(driver.tokens(number)) for number in PROMPTS] == [9, 9, 5]
    check_others(driver, 1, 2, 3)


def test_failure_in_a_chunk_leaves_the_other_rows(get_model: Callable[[str], TinyModel]) -> None:
    tiny = get_model("plain")
    driver = Driver(TinyModel(BrokenModel(tiny.model, 2), tiny.num_vocabulary))
    driver.add(1, PROMPTS[1])
    driver.add(2, PROMPTS[2])
    failed = driver.of(RowFailed)
    assert [(one.number, one.during) for one in failed] == [(2, "prefill")]
    driver.work(RunChunk(2, 9, 4, 4))
    assert len(driver.of(ChunkDone)) == 1
    driver.set_batch(1)
    driver.steps(3)
    driver.model = tiny
    check_others(driver, 1)


def test_row_that_cannot_be_made_is_reported(driver: Driver) -> None:
    unknown = driver.model.num_vocabulary
    driver.work(StartRow(1, "req_1", (5, unknown), 2, 10, GREEDY))
    bias = SamplingParameters(seed=1, logit_bias={unknown: 1.0})
    driver.work(StartRow(2, "req_2", (5, 6), 2, 10, bias))
    driver.work(StartRow(3, "req_3", (5, 6, 7), 2, 1, GREEDY))
    failed = driver.of(RowFailed)
    assert [(one.number, one.during) for one in failed] == [
        (1, "start"),
        (2, "start"),
        (3, "start"),
    ]
    driver.work(DropRow(1), DropRow(2), DropRow(3))
    assert driver.worker.rows == {}
