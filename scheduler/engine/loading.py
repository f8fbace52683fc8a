"""Loads a model in the engine's thread, proves the seam on it, measures what its caches cost."""

import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import msgspec
from huggingface_hub.errors import StrictDataclassError
from mlx.utils import tree_flatten
from mlx_lm.models.cache import (
    ArraysCache,
    KVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.utils import load_model, maybe_set_recommended_wired_limit

from journal.events import ModelFacts, WindowLayers
from scheduler.engine import attention
from scheduler.engine.arrays import number
from scheduler.engine.base import EngineLoaded
from scheduler.engine.decoding import ROW_ERRORS
from scheduler.engine.fields import first_line
from scheduler.engine.model import ModelError

PROBE_LENGTHS = (9, 32)
"""Tokens of the two rows of the self-test: unequal, and short enough for a slow machine."""

PROBE_STEPS = 2

LARGEST_DIFFERENCE = 1e-3
"""Between the logits of a row in a batch and of the row alone, in float32."""


@dataclass(frozen=True)
class LoadedModel:
    """The model, evaluated, with its seam in place; `num_vocabulary` is the width of its logits.

    `sample` are the caches of a row that was fed `num_sample_tokens` tokens: they show what is
    kept.
    """

    model: Any
    num_vocabulary: int
    result: EngineLoaded
    sample: attention.Caches
    num_sample_tokens: int


def load(folder: Path, estimate: ModelFacts, *, bitwise: bool) -> LoadedModel:
    """Loads the model of an mlx-lm folder. `estimate` is what its files said; the measured numbers
    replace it. With `bitwise` the self-test accepts no difference at all. Raises ModelError.
    """
    begun_ns = time.monotonic_ns()
    # As mlx-lm does: on Metal large weights stay resident. Elsewhere it does nothing.
    maybe_set_recommended_wired_limit()
    model = load_weights(folder)
    attention.install(model)
    probe = _probe_alone(model)
    note = _self_test(model, probe, bitwise=bitwise)
    result = EngineLoaded(
        model=_measure(estimate, model, probe),
        one_row_only=bool(note),
        note=note,
        load_ns=time.monotonic_ns() - begun_ns,
    )
    mx.clear_cache()
    num_vocabulary = probe.logits[0].shape[-1]
    num_sample_tokens = len(probe.tokens[-1])
    return LoadedModel(model, num_vocabulary, result, probe.caches, num_sample_tokens)


def load_weights(folder: Path) -> Any:
    """mlx-lm's model of the folder, evaluated. Raises ModelError."""
    try:
        return load_model(folder)[0]
    except (OSError, ImportError, StrictDataclassError, *ROW_ERRORS) as error:
        raise ModelError(
            f"the model in {folder} cannot be loaded ({first_line(error)}): fetch the model again"
        ) from error


@dataclass(frozen=True)
class Probe:
    """The self-test's rows, each decoded alone: their logits, shape (steps, vocabulary), and what
    the longer one cost.
    """

    tokens: list[list[int]]
    logits: list[mx.array]
    caches: attention.Caches
    transient_bytes: int


def _probe_alone(model: Any) -> Probe:
    num_tokens = sum(PROBE_LENGTHS) + PROBE_STEPS * len(PROBE_LENGTHS)
    numbers = [1 + 31 * index % 97 for index in range(num_tokens)]
    tokens: list[list[int]] = []
    for length in PROBE_LENGTHS:
        tokens.append(numbers[: length + PROBE_STEPS])
        numbers = numbers[length + PROBE_STEPS :]
    logits: list[mx.array] = []
    caches: attention.Caches = []
    transient_bytes = 0
    for row in tokens:
        caches = make_prompt_cache(model)
        transient_bytes = _prefill(model, caches, row[:-PROBE_STEPS])
        steps = [model(mx.array([[token]]), cache=caches)[:, -1, :] for token in row[-PROBE_STEPS:]]
        logits.append(mx.concatenate(steps))
        mx.eval(logits)
    return Probe(tokens, logits, caches, transient_bytes)


def _prefill(model: Any, caches: attention.Caches, tokens: list[int]) -> int:
    """Feeds the tokens; returns the bytes that were needed meanwhile and are free again."""
    mx.reset_peak_memory()
    model(mx.array(tokens)[None], cache=caches)
    mx.eval([cache.state for cache in caches])
    return mx.get_peak_memory() - mx.get_active_memory()


def _self_test(model: Any, probe: Probe, *, bitwise: bool) -> str:
    """Decodes the probe's rows together. Returns what is wrong, or nothing when they equal the
    rows alone.
    """
    rows = [make_prompt_cache(model) for _ in probe.tokens]
    for caches, tokens in zip(rows, probe.tokens, strict=True):
        _prefill(model, caches, tokens[:-PROBE_STEPS])
    try:
        batch = attention.RaggedBatch(rows)
        steps: list[mx.array] = []
        for step in range(-PROBE_STEPS, 0):
            inputs = mx.array([tokens[step] for tokens in probe.tokens])
            steps.append(model(inputs[:, None], cache=batch.layers)[:, -1, :])
        together = mx.stack(steps, axis=1)
        mx.eval(together)
    except (attention.SeamError, *ROW_ERRORS) as error:
        return f"rows cannot be decoded together: {type(error).__name__}: {error}"
    alone = mx.stack(probe.logits)
    difference = number(mx.abs(together.astype(mx.float32) - alone.astype(mx.float32)).max())
    allowed = 0.0 if bitwise else LARGEST_DIFFERENCE * _coarseness(alone)
    if difference <= allowed:
        return ""
    return f"rows decoded together differ from rows alone by {difference:.2g} in the logits"


def _coarseness(logits: mx.array) -> float:
    """How often the limit is allowed where numbers are coarser than float32. In 16 bits the last
    place of a large logit is above the limit already, and a GPU may multiply float32 in as few bits
    (TF32: 10 of mantissa, as many as float16).
    """
    on_gpu = mx.default_device().type == mx.gpu
    if logits.dtype == mx.float32 and not on_gpu:
        return 1.0
    kind = mx.float16 if logits.dtype == mx.float32 else logits.dtype
    largest = number(mx.abs(logits.astype(mx.float32)).max())
    return max(1.0, 4 * mx.finfo(kind).eps * largest / LARGEST_DIFFERENCE)


def _parameters(model: Any) -> list[mx.array]:
    pairs: Any = tree_flatten(model.parameters())
    return [array for _, array in pairs]


def _measure(estimate: ModelFacts, model: Any, probe: Probe) -> ModelFacts:
    weights_bytes = sum(array.nbytes for array in _parameters(model))
    kv_bytes_per_token = 0
    state_bytes = 0
    windows: defaultdict[int, int] = defaultdict(int)
    for cache in attention.leaves(probe.caches):
        if isinstance(cache, RotatingKVCache):
            windows[cache.max_size] += _bytes_per_token(cache)
        elif isinstance(cache, ArraysCache):
            state_bytes += cache.nbytes
        else:
            kv_bytes_per_token += _bytes_per_token(cache)
    return msgspec.structs.replace(
        estimate,
        weights_bytes=weights_bytes,
        kv_bytes_per_token=kv_bytes_per_token,
        kv_step_tokens=KVCache.step,
        window_layers=tuple(
            WindowLayers(bytes_per_token=size, window_tokens=window)
            for window, size in sorted(windows.items())
        ),
        state_bytes=state_bytes,
        transient_bytes_per_token=-(-probe.transient_bytes // PROBE_LENGTHS[-1]),
    )


def _bytes_per_token(cache: Any) -> int:
    return cache.nbytes // cache.keys.shape[2]
