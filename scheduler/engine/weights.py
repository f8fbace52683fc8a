"""Weight files in the safetensors format: https://huggingface.co/docs/safetensors, read by their
headers and written byte for byte the same each time. Needs no mlx.

A file is the header's length (8 bytes, little-endian), the header (JSON: name to type, shape and
place), and the arrays one after the other.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec
import numpy as np

from scheduler.engine.model import ModelError

TYPES: dict[str, int] = {
    "F64": 8,
    "I64": 8,
    "U64": 8,
    "F32": 4,
    "I32": 4,
    "U32": 4,
    "F16": 2,
    "BF16": 2,
    "I16": 2,
    "U16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
}
"""Bytes of one element, by the format's name of the type."""

WRITTEN_TYPES = {
    np.dtype(np.float32): "F32",
    np.dtype(np.float16): "F16",
    np.dtype(np.uint32): "U32",
}

MAX_HEADER_BYTES = 100 * 2**20
"""The format's own limit."""


class TensorEntry(msgspec.Struct, frozen=True):
    """One array in a header. `data_offsets` count from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.data_offsets[1] - self.data_offsets[0]


def read_header_bytes(path: Path) -> bytes:
    """The header as it stands in the file. Raises ModelError when the file is cut or none."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if not 0 < length <= MAX_HEADER_BYTES:
            raise ModelError(f"{path} is no safetensors file: fetch or convert the model again")
        header = file.read(length)
    if len(header) < length:
        raise ModelError(f"{path} ends inside its header: fetch or convert the model again")
    return header


def read_header(path: Path) -> dict[str, TensorEntry]:
    """The arrays of the file by name. Raises ModelError when the file is cut, or no such file."""
    header = read_header_bytes(path)
    try:
        raw = cast("dict[str, object]", json.loads(header))
        raw.pop("__metadata__", None)
        entries = msgspec.convert(raw, dict[str, TensorEntry])
    except (ValueError, AttributeError) as error:
        raise ModelError(f"{path} has a broken header ({error}): fetch the model again") from error
    expected = (
        8 + len(header) + max((entry.data_offsets[1] for entry in entries.values()), default=0)
    )
    found = path.stat().st_size
    if found < expected:
        raise ModelError(f"{path} has {found} of {expected} bytes: fetch the model again")
    return entries


def write(path: Path, tensors: Mapping[str, "np.ndarray[Any, Any]"]) -> None:
    """Writes float32, float16 and uint32 arrays, in the order of their names."""
    header: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    end = 0
    for name in sorted(tensors):
        tensor = tensors[name]
        begin, end = end, end + tensor.nbytes
        header[name] = {
            "dtype": WRITTEN_TYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": (begin, end),
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for name in sorted(tensors):
            file.write(np.ascontiguousarray(tensors[name]).data)
