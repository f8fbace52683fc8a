"""Tiny random models, one for each way in which mlx-lm keeps what it has read."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.utils import tree_map
from mlx_lm.models.cache import (
    ConcatenateKVCache,
    QuantizedKVCache,
    RotatingKVCache,
    make_prompt_cache,
)
from mlx_lm.utils import _get_classes

VOCABULARY = 61
WINDOW = 24

_ATTENTION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
}

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "plain": {**_ATTENTION, "model_type": "qwen3", "rope_theta": 1e4},
    "two_heads": {
        **_ATTENTION,
        "model_type": "qwen3",
        "rope_theta": 1e4,
        "num_key_value_heads": 2,
    },
    "hybrid": {
        "model_type": "qwen3_5",
        "tie_word_embeddings": True,
        "text_config": {
            **_ATTENTION,
            "model_type": "qwen3_5_text",
            "linear_num_value_heads": 2,
            "linear_num_key_heads": 1,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
            "linear_conv_kernel_dim": 4,
            "attention_bias": False,
            "full_attention_interval": 2,
            "rope_parameters": {
                "type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.25,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
    },
    "windows": {
        **_ATTENTION,
        "model_type": "gemma3_text",
        "sliding_window": WINDOW,
        "sliding_window_pattern": 2,
    },
    "chunks": {
        "model_type": "llama4",
        "text_config": {
            **_ATTENTION,
            "model_type": "llama4_text",
            "num_hidden_layers": 4,
            "attention_bias": False,
            "attention_chunk_size": WINDOW,
            "interleave_moe_layer_step": 8,
            "intermediate_size_mlp": 48,
            "num_experts_per_tok": 1,
            "num_local_experts": 1,
            "rope_scaling": None,
            "rope_theta": 1e4,
            "use_qk_norm": True,
        },
    },
    "mixed_lists": {
        "model_type": "falcon_h1",
        **_ATTENTION,
        "mamba_d_head": 16,
        "mamba_d_ssm": 32,
        "mamba_d_state": 8,
        "mamba_n_heads": 2,
        "mamba_chunk_size": 8,
    },
    "attention_lists": {
        "model_type": "deepseek_v32",
        **_ATTENTION,
        "index_head_dim": 32,
        "index_n_heads": 2,
        "index_topk": 16,
        "kv_lora_rank": 16,
        "q_lora_rank": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "qk_nope_head_dim": 16,
        "first_k_dense_replace": 2,
        "rope_scaling": None,
    },
}


@cache
def tiny_model(name: str) -> Any:
    """The model, evaluated; the same weights each time."""
    configuration = CONFIGURATIONS[name]
    kind, arguments = _get_classes(configuration)
    model: Any = kind(arguments.from_dict(configuration))
    key = mx.random.key(7)

    def random_weights(weight: mx.array) -> mx.array:
        nonlocal key
        key, own = mx.random.split(key)
        # Large enough that attention looks somewhere, so that a wrong position shows.
        return mx.random.normal(weight.shape, key=own) * (0.3 if weight.ndim > 1 else 0.1) + (
            0 if weight.ndim > 1 else 1
        )

    model.update(tree_map(random_weights, model.parameters()))
    model.eval()
    mx.eval(model.parameters())
    return model


@dataclass(frozen=True)
class Case:
    """A model, and how its rows keep what they have read."""

    model: str
    make: Callable[[Any], list[Any]]

    def make_caches(self) -> list[Any]:
        return self.make(tiny_model(self.model))

    def feed(self, caches: list[Any], tokens: list[int]) -> mx.array:
        """Feeds the tokens at once and returns their logits, shape (tokens, vocabulary)."""
        logits = tiny_model(self.model)(mx.array(tokens)[None], cache=caches)[0]
        mx.eval(logits, [cache.state for cache in caches])
        return logits


def _each(kind: Callable[[], Any]) -> Callable[[Any], list[Any]]:
    return lambda model: [kind() for _ in make_prompt_cache(model)]


CASES = {
    "KVCache": Case("plain", make_prompt_cache),
    "KVCache, two heads": Case("two_heads", make_prompt_cache),
    "ConcatenateKVCache": Case("plain", _each(ConcatenateKVCache)),
    "QuantizedKVCache, 4 bits": Case("plain", _each(lambda: QuantizedKVCache(32, 4))),
    "QuantizedKVCache, 8 bits": Case("plain", _each(lambda: QuantizedKVCache(32, 8))),
    "ArraysCache and KVCache": Case("hybrid", make_prompt_cache),
    "RotatingKVCache and KVCache": Case("windows", make_prompt_cache),
    "RotatingKVCache that keeps its first": Case(
        "plain", _each(lambda: RotatingKVCache(WINDOW, 4))
    ),
    "ChunkedKVCache and KVCache": Case("chunks", make_prompt_cache),
    "CacheList of ArraysCache and KVCache": Case("mixed_lists", make_prompt_cache),
    "CacheList of two KVCache": Case("attention_lists", make_prompt_cache),
}
