"""Two models with random weights, small enough for tests on any machine: `tiny-plain` (qwen3, full
attention) and `tiny-hybrid` (qwen3_5, three layers of linear attention to one of full attention).

Their files are the same byte for byte wherever they are made: the weights are exact fractions out
of a hash, not the result of a library's sine, and the tokenizer learns from a text made here.
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from scheduler.engine import weights

Kind = Literal["plain", "hybrid"]

SEED = 1
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_SIZE = 64, 4, 4, 2, 32
MLP_SIZE = 3 * HIDDEN
CONTEXT_TOKENS = 262_144
INTERVAL = 4
LINEAR_KEY_HEADS, LINEAR_VALUE_HEADS, LINEAR_HEAD_SIZE, KERNEL = 2, 4, 32, 4
VOCABULARY = 1024

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
)

# Chat turns in ChatML; tools and calls as the Qwen models write them.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string -%}{{ content }}
{%- elif content -%}{%- for part in content -%}{{ part['text'] }}{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
<|im_start|>system
Tools:
{% for tool in tools -%}
{{ tool | tojson }}
{% endfor -%}
Call one as <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% endif -%}
{%- for message in messages -%}
<|im_start|>{{ message['role'] }}
{{ text(message['content']) }}
{%- for call in message['tool_calls'] or [] -%}
{%- set tool_call = call['function'] or call %}
<tool_call>
{"name": "{{ tool_call.name }}", "arguments": {{ tool_call.arguments | tojson }}}
</tool_call>
{%- endfor -%}
<|im_end|>
{% endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""

_NOUNS = """
request step fact decision effect block chain row batch token prompt answer cache journal engine
model server client stream memory budget ceiling mark queue number name file folder line word letter
digit city river mountain winter summer morning evening window garden question reason example
function value list table key result error test
"""
_VERBS = """
takes gives holds keeps reads writes sends waits runs stops starts ends counts finds makes joins
leaves grows shrinks returns remembers forgets
"""
_FRAMES = (
    "The {0} {2} the {1}.",
    "A {0} of the {1} {2} when the {0} ends.",
    "def {0}_{1}(self, {0}): return self.{1}[{0}] + {3}",
    '{{"{0}": "{1}", "number": {3}, "items": [{3}, {4}]}}',
    "Why does the {0} that {2} a {1} wait for {3} others?",
    "for {0} in range({3}):\n    print({0}, {1})\n",
    "What is the {0} of {1}? It is {4}, and the {1} {2} it.",
)


def make(folder: Path, kind: Kind) -> None:
    """Writes the model into the folder, which exists and is empty."""
    num_vocabulary, end_of_turn = _make_tokenizer(folder)
    config = _config(kind, num_vocabulary, end_of_turn)
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    shapes = _shapes(kind, num_vocabulary)
    tensors = {name: _values(name, shape) for name, shape in shapes.items()}
    weights.write(folder / "model.safetensors", tensors)


def _fractions(key: str, count: int) -> "np.ndarray[Any, Any]":
    """`count` evenly spread numbers in [-1, 1), exact in float32, that depend on the key alone."""
    raw = hashlib.shake_128(f"{SEED}:{key}".encode()).digest(4 * count)
    integers = np.frombuffer(raw, dtype="<u4") >> 8
    return (integers.astype(np.float32) - np.float32(2**23)) * np.float32(2**-23)


def _values(name: str, shape: tuple[int, ...]) -> "np.ndarray[Any, Any]":
    """Weights with which the context matters: small embeddings, sharp attention, and logits that
    are far enough apart for a sampled text to vary and a greedy one to be stable.
    """
    if name.endswith(("q_norm.weight", "k_norm.weight")):
        return np.full(shape, 2, dtype=np.float32)
    if name.endswith("A_log"):
        # Decay of the linear state: the head with the longest memory keeps a hundred tokens.
        return np.array([-4 + head for head in range(shape[0])], dtype=np.float32)
    if name.endswith(("norm.weight", "dt_bias")):
        return np.ones(shape, dtype=np.float32)
    spread = np.float32(0.0625 if "embed" in name else 0.5 if "lm_head" in name else 0.1875)
    return (_fractions(name, math.prod(shape)) * spread).reshape(shape)


def _shapes(kind: Kind, num_vocabulary: int) -> dict[str, tuple[int, ...]]:
    prefix = "language_model." if kind == "hybrid" else ""
    shapes: dict[str, tuple[int, ...]] = {
        f"{prefix}model.embed_tokens.weight": (num_vocabulary, HIDDEN),
        f"{prefix}model.norm.weight": (HIDDEN,),
        f"{prefix}lm_head.weight": (num_vocabulary, HIDDEN),
    }
    for layer in range(LAYERS):
        is_linear = kind == "hybrid" and (layer + 1) % INTERVAL != 0
        attention = _linear_shapes() if is_linear else _attention_shapes(gated=kind == "hybrid")
        for name, shape in (_mlp_shapes() | attention).items():
            shapes[f"{prefix}model.layers.{layer}.{name}"] = shape
    return shapes


def _mlp_shapes() -> dict[str, tuple[int, ...]]:
    return {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "mlp.gate_proj.weight": (MLP_SIZE, HIDDEN),
        "mlp.up_proj.weight": (MLP_SIZE, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, MLP_SIZE),
    }


def _attention_shapes(*, gated: bool) -> dict[str, tuple[int, ...]]:
    size = HEADS * HEAD_SIZE
    return {
        "self_attn.q_proj.weight": (2 * size if gated else size, HIDDEN),
        "self_attn.k_proj.weight": (KV_HEADS * HEAD_SIZE, HIDDEN),
        "self_attn.v_proj.weight": (KV_HEADS * HEAD_SIZE, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, size),
        "self_attn.q_norm.weight": (HEAD_SIZE,),
        "self_attn.k_norm.weight": (HEAD_SIZE,),
    }


def _linear_shapes() -> dict[str, tuple[int, ...]]:
    values = LINEAR_VALUE_HEADS * LINEAR_HEAD_SIZE
    mixed = 2 * LINEAR_KEY_HEADS * LINEAR_HEAD_SIZE + values
    return {
        "linear_attn.in_proj_qkv.weight": (mixed, HIDDEN),
        "linear_attn.in_proj_z.weight": (values, HIDDEN),
        "linear_attn.in_proj_a.weight": (LINEAR_VALUE_HEADS, HIDDEN),
        "linear_attn.in_proj_b.weight": (LINEAR_VALUE_HEADS, HIDDEN),
        "linear_attn.conv1d.weight": (mixed, KERNEL, 1),
        "linear_attn.dt_bias": (LINEAR_VALUE_HEADS,),
        "linear_attn.A_log": (LINEAR_VALUE_HEADS,),
        "linear_attn.norm.weight": (LINEAR_HEAD_SIZE,),
        "linear_attn.out_proj.weight": (HIDDEN, values),
    }


def _config(kind: Kind, num_vocabulary: int, end_of_turn: int) -> dict[str, object]:
    base: dict[str, object] = {
        "hidden_size": HIDDEN,
        "intermediate_size": MLP_SIZE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_SIZE,
        "rms_norm_eps": 1e-6,
        "vocab_size": num_vocabulary,
        "max_position_embeddings": CONTEXT_TOKENS,
        "tie_word_embeddings": False,
        "eos_token_id": end_of_turn,
        "torch_dtype": "float32",
    }
    if kind == "plain":
        return {"model_type": "qwen3", "rope_theta": 1e6, **base}
    text = {
        **base,
        "model_type": "qwen3_5_text",
        "full_attention_interval": INTERVAL,
        "linear_num_key_heads": LINEAR_KEY_HEADS,
        "linear_num_value_heads": LINEAR_VALUE_HEADS,
        "linear_key_head_dim": LINEAR_HEAD_SIZE,
        "linear_value_head_dim": LINEAR_HEAD_SIZE,
        "linear_conv_kernel_dim": KERNEL,
        "attention_bias": False,
        "rope_parameters": {
            "type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [2, 1, 1],
            "mrope_interleaved": True,
        },
    }
    return {
        "model_type": "qwen3_5",
        "text_config": text,
        "eos_token_id": end_of_turn,
        "tie_word_embeddings": False,
    }


def _sentences(count: int) -> list[str]:
    """Sentences and lines of code out of a fixed list of words, the same each time."""
    choices = hashlib.shake_128(f"{SEED}:text".encode()).digest(5 * count)
    nouns, verbs = _NOUNS.split(), _VERBS.split()
    sentences: list[str] = []
    for index in range(count):
        frame, first, second, verb, number = choices[5 * index : 5 * index + 5]
        sentences.append(
            _FRAMES[frame % len(_FRAMES)].format(
                nouns[first % len(nouns)],
                nouns[second % len(nouns)],
                verbs[verb % len(verbs)],
                number,
                7 * number + first,
            )
        )
    return sentences


def _make_tokenizer(folder: Path) -> tuple[int, int]:
    """Trains and writes the byte-level BPE tokenizer. Returns its size and its end of a turn."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    byte_level: Any = pre_tokenizers.ByteLevel
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    decoder: Any = decoders.ByteLevel
    tokenizer.decoder = decoder()
    trainer: Any = trainers.BpeTrainer
    settings = trainer(
        vocab_size=VOCABULARY,
        special_tokens=list(SPECIALS),
        show_progress=False,
        initial_alphabet=byte_level.alphabet(),
    )
    tokenizer.train_from_iterator(_sentences(2000), settings)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": CONTEXT_TOKENS,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return (
        cast("int", tokenizer.get_vocab_size()),
        cast("int", tokenizer.token_to_id("<|im_end|>")),
    )
