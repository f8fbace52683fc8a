"""The engine's thread: loading, the seam's self-test, and its end."""

import queue
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import qwen3_next
from mlx_lm.models.cache import ArraysCache

from scheduler.engine import attention, loading, tiny
from scheduler.engine.base import (
    ChunkDone,
    EngineDied,
    EngineLoaded,
    EngineResult,
    ReleaseStep,
    RunChunk,
    SetBatch,
    StartRow,
    StepDone,
)
from scheduler.engine.loading import LoadedModel
from scheduler.engine.mlx_engine import MlxEngine
from scheduler.engine.model import ModelError
from tests.engine.driver import GREEDY, LetterTokenizer
from tests.engine.models import NO_FACTS, STOCK, decode_alone, numbers

pytestmark = pytest.mark.engine

WAIT_S = 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tiny.make(tmp_path, "hybrid")
    return tmp_path


class Running:
    """An engine with its thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.results: queue.SimpleQueue[EngineResult] = queue.SimpleQueue()
        self.engine = MlxEngine(self.load, LetterTokenizer())
        self.loaded: LoadedModel | None = None

    def load(self) -> LoadedModel:
        self.loaded = loading.load(self.folder, NO_FACTS, bitwise=STOCK)
        return self.loaded

    def next(self) -> EngineResult:
        return self.results.get(timeout=WAIT_S)


@pytest.fixture
def running(folder: Path) -> Iterator[Running]:
    running = Running(folder)
    running.engine.start(running.results.put)
    yield running
    running.engine.stop()


def test_engine_computes_in_its_own_thread(running: Running) -> None:
    loaded = running.next()
    assert isinstance(loaded, EngineLoaded)
    assert not loaded.one_row_only, loaded.note
    prompt = numbers(20)
    running.engine.submit(StartRow(1, "req_1", prompt, 20, 5, GREEDY))
    running.engine.submit(RunChunk(1, 1, 0, 19))
    assert isinstance(running.next(), ChunkDone)
    running.engine.submit(SetBatch(1, (1,)))
    tokens: list[int] = []
    for index in range(5):
        step = running.next()
        assert isinstance(step, StepDone)
        tokens += step.rows[0].token_ids
        assert step.rows[0].ended == ("length" if index == 4 else None)
        running.engine.submit(ReleaseStep())
    assert running.loaded is not None
    assert tokens == decode_alone(running.loaded.model, prompt, 5).tokens


def test_engine_stops_with_a_step_in_flight(running: Running) -> None:
    running.next()
    running.engine.submit(StartRow(1, "req_1", numbers(3), 3, 100, GREEDY))
    running.engine.submit(RunChunk(1, 1, 0, 2))
    running.engine.submit(SetBatch(1, (1,)))
    assert isinstance(running.next(), ChunkDone)
    assert isinstance(running.next(), StepDone)
    running.engine.stop()
    assert running.results.empty()


def test_model_that_cannot_be_loaded_is_reported_in_one_line(folder: Path) -> None:
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"qwen3_5"', '"no_such_model"'))
    running = Running(folder)
    running.engine.start(running.results.put)
    died = running.next()
    assert isinstance(died, EngineDied)
    assert died.while_loading
    assert "no_such_model" in died.error
    assert "\n" not in died.error
    running.engine.stop()


def test_defect_of_the_engine_ends_its_thread_with_a_traceback(running: Running) -> None:
    running.next()
    running.engine.submit(SetBatch(1, (7,)))
    died = running.next()
    assert isinstance(died, EngineDied)
    assert not died.while_loading
    assert "KeyError: 7" in died.error
    assert "_launchable" in died.error


class PaddingModel:
    """A model that lets the first row of a batch see the others' positions."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        logits = self._model(inputs, cache=cache)
        return logits + 1e-5 * (len(inputs) - 1)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)


class OwnCache(ArraysCache):
    """A cache class that the seam does not know."""


class OwnCacheModel(PaddingModel):
    def make_cache(self) -> Sequence[Any]:
        caches = self._model.make_cache()
        own = OwnCache(2)
        return [own if type(cache) is ArraysCache else cache for cache in caches]


@pytest.fixture
def wrap(monkeypatch: pytest.MonkeyPatch) -> Callable[[type[PaddingModel]], None]:
    """Makes every model that is loaded one of this class."""
    real = loading.load_weights

    def wrap(wrapper: type[PaddingModel]) -> None:
        monkeypatch.setattr(loading, "load_weights", lambda path: wrapper(real(path)))

    return wrap


Wrap = Callable[[type[PaddingModel]], None]


@pytest.mark.parametrize(
    ("wrapper", "words"),
    [(PaddingModel, "differ from rows alone by 1"), (OwnCacheModel, "OwnCache")],
)
def test_self_test_notices_a_model_that_the_seam_does_not_fit(
    folder: Path, wrap: Wrap, wrapper: type[PaddingModel], words: str
) -> None:
    wrap(wrapper)
    result = loading.load(folder, NO_FACTS, bitwise=True).result
    assert result.one_row_only
    assert words in result.note


def test_small_differences_pass_where_a_batch_changes_low_bits(folder: Path, wrap: Wrap) -> None:
    wrap(PaddingModel)
    assert not loading.load(folder, NO_FACTS, bitwise=False).result.one_row_only


def test_self_test_notices_attention_that_was_not_replaced(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attention, "install", lambda _: None)
    monkeypatch.setattr(qwen3_next, "scaled_dot_product_attention", attention.ORIGINAL_ATTENTION)
    result = loading.load(folder, NO_FACTS, bitwise=True).result
    assert result.one_row_only
    assert "TypeError" in result.note


def test_folder_without_a_model_is_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be loaded"):
        loading.load(tmp_path, NO_FACTS, bitwise=True)
