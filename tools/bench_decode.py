"""`fermata bench decode`: the server's engine against mlx-lm on the same model, in one process.

One row against mlx-lm's `generate_step`; rows of 100, 400 and 1,200 tokens together against its
`BatchGenerator`. Prompts are prefilled once; then the two sides take turns, so that whatever else
the machine does meets both, and each round gives one ratio. A round is timed from its first token
to its last.
"""

import queue
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from scheduler.engine.base import (
    ChunkDone,
    EngineDied,
    EngineLoaded,
    EngineResult,
    ReleaseStep,
    RowFailed,
    RunChunk,
    SetBatch,
    StartRow,
    StepDone,
)
from scheduler.engine.model import ModelDescription, ModelError
from scheduler.engine.models import MlxSource, resolve
from scheduler.parameters import SamplingParameters
from scheduler.settings import Settings
from tools.bench_common import Details, Measurement, measure, show

if TYPE_CHECKING:
    from scheduler.engine.loading import LoadedModel
    from scheduler.engine.mlx_engine import MlxEngine

ROW_LENGTHS = (100, 400, 1200)
ONE_ROW_LENGTH = 100
CHUNK_TOKENS = 512
SEED = 1
WAIT_S = 600.0
"""The longest wait for one result of the engine: a chunk on a slow machine."""


@dataclass(frozen=True)
class Size:
    """How long it measures: rounds that count, and tokens that each row gets in a round."""

    rounds: int = 5
    num_tokens: int = 32


QUICK = Size(rounds=2, num_tokens=8)


class BenchError(Exception):
    """The engine failed while it was measured."""


@dataclass
class EngineSide:
    """The engine, driven as the scheduler's loop drives it, but with nothing to commit."""

    engine: "MlxEngine"
    results: "queue.SimpleQueue[EngineResult]"
    num_batches: int = 0

    def wait(self, kind: type[Any]) -> Any:
        """The next result, which must be of this kind."""
        result = self.results.get(timeout=WAIT_S)
        if isinstance(result, EngineDied | RowFailed):
            raise BenchError(result.error)
        assert isinstance(result, kind), f"{result} instead of {kind.__name__}"
        return result

    def add(self, number: int, prompt: Sequence[int]) -> None:
        """Starts and prefills a row that never ends by itself."""
        sampling = SamplingParameters(seed=0, ignore_end_of_turn=True)
        row = StartRow(number, f"row {number}", tuple(prompt), len(prompt), 10**6, sampling)
        self.engine.submit(row)
        for start in range(0, len(prompt) - 1, CHUNK_TOKENS):
            length = min(CHUNK_TOKENS, len(prompt) - 1 - start)
            self.engine.submit(RunChunk(number, start, start, length))
            self.wait(ChunkDone)

    def decode(self, numbers: tuple[int, ...], num_tokens: int) -> float:
        """Tokens per second of these rows together, each getting `num_tokens`."""
        self.num_batches += 1
        self.engine.submit(SetBatch(self.num_batches, numbers))
        self.wait(StepDone)
        begun = time.perf_counter()
        for _ in range(num_tokens - 1):
            self.engine.submit(ReleaseStep())
            self.wait(StepDone)
        elapsed = time.perf_counter() - begun
        # The step that was launched ahead is delivered, and then nothing is launched.
        self.engine.submit(SetBatch(0, ()))
        self.engine.submit(ReleaseStep())
        self.wait(StepDone)
        self.engine.submit(ReleaseStep())
        return len(numbers) * (num_tokens - 1) / elapsed


def bare_rate(tokens: Iterator[Any], num_tokens: int) -> float:
    """Tokens per second of mlx-lm's loop over one row."""
    next(tokens)
    begun = time.perf_counter()
    for _ in range(num_tokens - 1):
        next(tokens)
    return (num_tokens - 1) / (time.perf_counter() - begun)


def bare_tokens(model: Any, prompt: Sequence[int]) -> Iterator[Any]:
    """mlx-lm's loop over one row, greedy, without an end."""
    import mlx.core as mx
    from mlx_lm.generate import generate_step

    return generate_step(
        mx.array(list(prompt)), model, max_tokens=-1, prefill_step_size=CHUNK_TOKENS
    )


def bare_batch(model: Any, prompts: Sequence[Sequence[int]]) -> Callable[[int], float]:
    """mlx-lm's batches over these rows; the function returned measures a round of so many tokens
    for each row.
    """
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(model, max_tokens=10**6, prefill_step_size=CHUNK_TOKENS)
    generator.insert([list(prompt) for prompt in prompts])
    while len(generator.next()[1]) < len(prompts):
        pass

    def rate(num_tokens: int) -> float:
        generator.next()
        begun = time.perf_counter()
        for _ in range(num_tokens - 1):
            generator.next()
        return len(prompts) * (num_tokens - 1) / (time.perf_counter() - begun)

    return rate


def take_turns(
    ours: Callable[[int], float], theirs: Callable[[int], float], size: Size
) -> tuple[list[float], list[float]]:
    """The rates of both sides, round by round; a first round that warms up is not counted."""
    rates: tuple[list[float], list[float]] = ([], [])
    for turn in range(size.rounds + 1):
        pair = (theirs(size.num_tokens), ours(size.num_tokens))
        if turn:
            rates[0].append(pair[1])
            rates[1].append(pair[0])
    return rates


def start_engine(description: ModelDescription, source: MlxSource) -> tuple[EngineSide, Any]:
    """The engine, loaded, and the model that it loaded, to be run by mlx-lm as well."""
    from scheduler.engine.mlx_engine import MlxEngine

    loaded: list[LoadedModel] = []
    results: queue.SimpleQueue[EngineResult] = queue.SimpleQueue()

    def load() -> "LoadedModel":
        loaded.append(source.load(description))
        return loaded[0]

    side = EngineSide(MlxEngine(load, description.tokenizer), results)
    side.engine.start(results.put)
    side.wait(EngineLoaded)
    return side, loaded[0].model


def compare(
    name: str,
    rates: tuple[list[float], list[float]],
    peer: str,
    at_least: float,
) -> list[Measurement]:
    """The ratio of each round as the headline, and both rates."""
    ratios = [ours / theirs for ours, theirs in zip(*rates, strict=True)]
    return [
        measure(f"{name}.ratio", f"of {peer}", ratios, at_least=at_least),
        measure(f"{name}.engine", "tokens/s", rates[0]),
        measure(f"{name}.{peer}", "tokens/s", rates[1]),
    ]


def run(size: Size, model: str, *, as_json: bool) -> int:
    """Measures and prints. Returns 0, 1 when a target is missed, or 2 when nothing could be
    measured.
    """
    try:
        measurements, details = measure_all(size, model)
    except (ModelError, BenchError) as error:
        print(f"fermata: {error}", file=sys.stderr)
        return 2
    show("decode", measurements, seed=SEED, as_json=as_json, details=details)
    return int(any(measurement.met is False for measurement in measurements))


def measure_all(size: Size, model: str) -> tuple[list[Measurement], Details]:
    """Both comparisons, and what they were made with. Raises ModelError for a model that cannot be
    served, BenchError when the engine fails.
    """
    source = resolve(Settings(model=model))
    if not isinstance(source, MlxSource):
        raise BenchError(f"the model {model} computes nothing that could be compared")
    description = source.describe()
    side, bare_model = start_engine(description, source)
    draw = random.Random(SEED)
    num_vocabulary = description.tokenizer.vocab_size
    prompts = [
        [draw.randrange(num_vocabulary) for _ in range(length)]
        for length in (ONE_ROW_LENGTH, *ROW_LENGTHS)
    ]
    for number, prompt in enumerate(prompts):
        side.add(number, prompt)
    tokens = bare_tokens(bare_model, prompts[0])
    one = take_turns(partial(side.decode, (0,)), partial(bare_rate, tokens), size)
    numbers = tuple(range(1, len(prompts)))
    batch = bare_batch(bare_model, prompts[1:])
    several = take_turns(partial(side.decode, numbers), batch, size)
    side.engine.stop()
    measurements = compare("one_row", one, "generate_step", 0.95)
    measurements += compare("rows", several, "batch_generator", 1.0)
    details = {
        "model": description.name,
        "blas": description.blas,
        "tokens_per_round": size.num_tokens,
    }
    return measurements, details
