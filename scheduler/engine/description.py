"""What a model's files say without its weights: estimates for `ModelFacts`, and its fingerprint.

Reads configuration and headers. Imports no mlx.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from journal.events import ModelFacts, WindowLayers
from scheduler.engine import weights
from scheduler.engine.fields import Fields, first_line
from scheduler.engine.model import ModelError

KV_STEP_TOKENS = 256
"""mlx-lm's cache classes grow in steps of so many positions."""

CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "seq_length", "n_ctx", "max_seq_len")

FINGERPRINT_PATTERNS = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken")
"""Configuration, tokenizer and chat template."""

TOKENIZER_PATTERNS = ("tokenizer.model", "vocab.json", "*.tiktoken")
"""What a tokenizer may be made of where there is no tokenizer.json."""

_SIZES = {"F32": 4, "F16": 2, "BF16": 2}


@dataclass(frozen=True)
class ModelFiles:
    """A model's folder that has what it must have, with its configuration and weight headers."""

    folder: Path
    config: Fields
    generation_config: Fields
    weight_files: tuple[Path, ...]
    tensors: Mapping[str, weights.TensorEntry]

    @property
    def text_config(self) -> Fields:
        """The language model's part of the configuration."""
        return self.config.inner("text_config") or self.config

    @property
    def num_parameters(self) -> int:
        """Elements of all arrays; packed weights count as many as they hold."""
        quantization = self.config.inner("quantization")
        bits = quantization.count("bits", default=32) if quantization else 32
        return sum(
            entry.num_elements * (32 // bits if entry.dtype == "U32" else 1)
            for entry in self.tensors.values()
        )

    @property
    def activation_bytes(self) -> int:
        """Bytes of one number while the model computes: those of its norms and scales."""
        names = Counter(
            entry.dtype for entry in self.tensors.values() if entry.dtype in _SIZES
        ).most_common(1)
        return _SIZES[names[0][0]] if names else 2


def open_folder(folder: Path) -> ModelFiles:
    """Looks whether the folder holds a model. Raises ModelError for what is not or wrong."""
    if not folder.is_dir():
        raise ModelError(f"{folder} is no folder: give a built-in name or an mlx-lm model's folder")
    config = _read_json(folder / "config.json")
    if not isinstance(config.values.get("model_type"), str):
        raise ModelError(f"{folder}/config.json names no model_type: it is no model's folder")
    weight_files = tuple(sorted(folder.glob("model*.safetensors")))
    if not weight_files:
        raise ModelError(f"{folder} has no model*.safetensors: convert the model with mlx_lm")
    if not (folder / "tokenizer_config.json").is_file():
        raise ModelError(f"{folder} has no tokenizer_config.json: fetch the model again")
    _check_tokenizer(folder)
    tensors: dict[str, weights.TensorEntry] = {}
    for file in weight_files:
        tensors |= weights.read_header(file)
    generation = folder / "generation_config.json"
    generation_config = _read_json(generation) if generation.is_file() else Fields(generation, {})
    files = ModelFiles(folder, config, generation_config, weight_files, tensors)
    files.text_config.check()
    return files


def _check_tokenizer(folder: Path) -> None:
    """Looks whether there is a tokenizer at all. Raises ModelError."""
    file = folder / "tokenizer.json"
    if file.is_file():
        if not _read_json(file).inner("model"):
            raise ModelError(f"{file} holds no tokenizer: fetch the model again")
    elif not any(found for name in TOKENIZER_PATTERNS for found in folder.glob(name)):
        raise ModelError(f"{folder} has no tokenizer.json: fetch the model again")


def _read_json(path: Path) -> Fields:
    try:
        body = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelError(f"{path.parent} has no {path.name}: it is no model's folder") from error
    except (OSError, ValueError) as error:
        message = f"{path} cannot be read ({first_line(error)}): fetch the model again"
        raise ModelError(message) from error
    if not isinstance(body, dict):
        raise ModelError(f"{path} holds no JSON object: fetch the model again")
    return Fields(path, cast("dict[str, Any]", body))


def estimate(name: str, files: ModelFiles, fingerprint: str) -> ModelFacts:
    """The facts as the files tell them. Measured numbers replace them when the model is loaded."""
    text = files.text_config
    context = text.count(*CONTEXT_KEYS)
    if not context:
        raise ModelError(f"{files.folder}/config.json has no max_position_embeddings: add it")
    size = files.activation_bytes
    layer_bytes = 2 * _num_kv_heads(text) * _head_size(text) * size
    kinds = Counter(_layer_kinds(text))
    window = text.count("sliding_window")
    windows = (
        (WindowLayers(bytes_per_token=layer_bytes * kinds["sliding"], window_tokens=window),)
        if kinds["sliding"]
        else ()
    )
    return ModelFacts(
        name=name,
        fingerprint=fingerprint,
        context_tokens=context,
        weights_bytes=sum(entry.num_bytes for entry in files.tensors.values()),
        kv_bytes_per_token=layer_bytes * kinds["full"],
        kv_step_tokens=KV_STEP_TOKENS,
        window_layers=windows,
        state_bytes=_linear_state_bytes(text, size) * kinds["linear"],
        transient_bytes_per_token=_transient_bytes(text, size),
    )


def _num_kv_heads(text: Fields) -> int:
    return text.count("num_key_value_heads", "num_attention_heads", default=1)


def _head_size(text: Fields) -> int:
    even = text.count("hidden_size") // text.count("num_attention_heads", default=1)
    return text.count("head_dim", default=even)


def _layer_kinds(text: Fields) -> Sequence[str]:
    """`full`, `sliding` or `linear` for each layer, by the ways in which configurations say so."""
    num_layers = text.count("num_hidden_layers", "n_layer")
    named = text.words("layer_types")
    if named:
        words = {"sliding_attention": "sliding", "linear_attention": "linear"}
        return [words.get(name, "full") for name in named]
    for key, other in (
        ("full_attention_interval", "linear"),
        ("sliding_window_pattern", "sliding"),
    ):
        if interval := text.count(key):
            return [other if (layer + 1) % interval else "full" for layer in range(num_layers)]
    return ["full"] * num_layers


def _linear_state_bytes(text: Fields, size: int) -> int:
    """A gated delta layer's state: the convolution's last inputs, and a matrix per value head that
    is kept in float32.
    """
    key_size = text.count("linear_key_head_dim")
    keys = text.count("linear_num_key_heads") * key_size
    values = text.count("linear_num_value_heads") * text.count("linear_value_head_dim")
    kept = (text.count("linear_conv_kernel_dim", default=1) - 1) * (2 * keys + values) * size
    return kept + 4 * values * key_size


def _transient_bytes(text: Fields, size: int) -> int:
    """A layer's inner arrays for one token, roughly: two of the MLP's width, six of the model's."""
    width = text.count("hidden_size")
    inner = text.count("intermediate_size", default=4 * width)
    return (2 * inner + 6 * width) * size


def fingerprint(files: ModelFiles, digests: Path) -> str:
    """SHA-256 over configuration and tokenizer files, and for each weight file its name, size,
    header and digest. Digests of whole files are kept in the file `digests`, by size, time of
    change and inode.
    """
    total = hashlib.sha256()
    small = {path for pattern in FINGERPRINT_PATTERNS for path in files.folder.glob(pattern)}
    for path in sorted(small):
        total.update(f"{path.name}\0{file_digest(path)}\0".encode())
    kept = _read_digests(digests)
    for path in files.weight_files:
        status = path.stat()
        key = f"{path.resolve()}:{status.st_size}:{status.st_mtime_ns}:{status.st_ino}"
        kept[key] = kept.get(key) or file_digest(path)
        header = hashlib.sha256(weights.read_header_bytes(path)).hexdigest()
        total.update(f"{path.name}\0{status.st_size}\0{header}\0{kept[key]}\0".encode())
    _write_digests(digests, kept)
    return total.hexdigest()


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


MAX_DIGESTS = 1000
"""Digests of the latest files that are kept."""


def _read_digests(path: Path) -> dict[str, str]:
    """What was kept. A file that is not there or broken is a cache that is empty."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return cast("dict[str, str]", kept) if isinstance(kept, dict) else {}


def _write_digests(path: Path, kept: Mapping[str, str]) -> None:
    """Keeps them for the next start; where that cannot be written the next start digests again."""
    latest = dict(list(kept.items())[-MAX_DIGESTS:])
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".new")
        temporary.write_text(json.dumps(latest, indent=1), encoding="utf-8")
        temporary.replace(path)
    except OSError:
        return
