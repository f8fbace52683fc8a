"""Models for the engine tests, and what plain mlx-lm makes of a row that is alone."""

import importlib
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map_with_path
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from journal.events import ModelFacts
from scheduler.engine import attention, loading
from scheduler.engine.arrays import number
from scheduler.engine.base import EngineLoaded, TokenLogprobs
from scheduler.engine.blas import choose

Array = np.ndarray[Any, np.dtype[Any]]

STOCK = choose("stock", 0) == "stock" and sys.platform == "linux"
"""On mlx's own CPU wheel for Linux a row of a batch equals the row alone, and chunks of all sizes
give the same. Elsewhere low bits differ.
"""

TOLERANCE: dict[str, Any] = {"rtol": 0, "atol": 0} if STOCK else {"rtol": 1e-3, "atol": 5e-3}

NO_FACTS = ModelFacts(
    name="tiny",
    fingerprint="",
    context_tokens=4096,
    weights_bytes=0,
    kv_bytes_per_token=0,
    kv_step_tokens=256,
    window_layers=(),
    state_bytes=0,
    transient_bytes_per_token=0,
)

BASE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": 128,
    "max_position_embeddings": 4096,
    "rope_theta": 1e4,
}

CONFIGS: dict[str, dict[str, Any]] = {
    # Every head has its own keys, and the output layer is the embedding.
    "llama": {**BASE, "model_type": "llama", "num_key_value_heads": 4},
    # Three of four layers see the last 8 tokens only.
    "gemma3_text": {
        **BASE,
        "model_type": "gemma3_text",
        "sliding_window": 8,
        "sliding_window_pattern": 4,
    },
    # Attention sinks, experts, and every other layer with a window.
    "gpt_oss": {
        **BASE,
        "model_type": "gpt_oss",
        "sliding_window": 8,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
}


@dataclass(frozen=True)
class TinyModel:
    """A loaded model with the seam in place."""

    model: Any
    num_vocabulary: int
    one_row_only: bool = False

    def loaded(self) -> loading.LoadedModel:
        """As the engine gets it."""
        result = EngineLoaded(NO_FACTS, self.one_row_only, "", 0)
        return loading.LoadedModel(self.model, self.num_vocabulary, result, [], 0)


def load_tiny(folder: Path) -> TinyModel:
    """A built-in model out of its folder."""
    loaded = loading.load(folder, NO_FACTS, bitwise=STOCK)
    return TinyModel(loaded.model, loaded.num_vocabulary)


def make_random(name: str) -> TinyModel:
    """A model of another family, with random weights and no files."""
    module = importlib.import_module(f"mlx_lm.models.{name}")
    model = module.Model(module.ModelArgs.from_dict(CONFIGS[name]))

    def random_weight(path: str, weight: mx.array) -> mx.array:
        key = mx.random.key(zlib.crc32(path.encode()))
        return 0.3 * mx.random.normal(weight.shape, key=key)

    model.update(tree_map_with_path(random_weight, model.parameters()))
    mx.eval(model.parameters())
    attention.install(model)
    return TinyModel(model, BASE["vocab_size"])


@dataclass(frozen=True)
class Alone:
    """What mlx-lm computes for one row: greedy tokens, log-probabilities of shape (steps,
    vocabulary), and the caches after the last step.
    """

    tokens: list[int]
    logprobs: mx.array
    caches: attention.Caches


def decode_alone(model: Any, prompt: Sequence[int], num_tokens: int) -> Alone:
    """The prompt less its last token in one chunk, then greedy steps, with mlx-lm alone."""
    caches = make_prompt_cache(model)
    if len(prompt) > 1:
        model(mx.array([list(prompt[:-1])]), cache=caches)
        mx.eval([cache.state for cache in caches])
    tokens = [prompt[-1]]
    rows: list[mx.array] = []
    for _ in range(num_tokens):
        logits = model(mx.array([tokens[-1:]]), cache=caches)[0, -1, :]
        rows.append(logits - mx.logsumexp(logits))
        tokens.append(int(number(mx.argmax(rows[-1]))))
    mx.eval([cache.state for cache in caches])
    return Alone(tokens[1:], mx.stack(rows), caches)


def held(caches: attention.Caches) -> list[Array]:
    """All that the caches hold: keys and values up to the position, in temporal order, and
    recurrent state.
    """
    found: list[Array] = []
    for cache in attention.leaves(caches):
        if isinstance(cache, RotatingKVCache):
            arrays = [cache._temporal_order(cache.keys), cache._temporal_order(cache.values)]
        elif hasattr(cache, "keys"):
            arrays = [cache.keys[..., : cache.offset, :], cache.values[..., : cache.offset, :]]
        else:
            arrays = list(cache.cache)
        found += [np.array(array) for array in arrays]
    return found


def same_caches(found: attention.Caches, expected: attention.Caches) -> bool:
    """Whether two rows hold the same, bit for bit where the machine computes so."""
    pairs = zip(held(found), held(expected), strict=True)
    return all(one.shape == two.shape and np.allclose(one, two, **TOLERANCE) for one, two in pairs)


def same_logprobs(found: Sequence[TokenLogprobs], expected: Sequence[TokenLogprobs]) -> bool:
    """Whether two rows were given the same log-probabilities, bit for bit where that can be."""
    if STOCK:
        return list(found) == list(expected)
    one, two = ([logprobs.chosen for logprobs in row] for row in (found, expected))
    return len(one) == len(two) and np.allclose(one, two, **TOLERANCE)


def numbers(length: int, seed: int = 0, below: int = 128) -> tuple[int, ...]:
    """A prompt of this many tokens."""
    return tuple((31 * index + 17 * seed * (index + 1) + 5) % below for index in range(length))
