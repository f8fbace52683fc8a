"""Reads a GGUF file: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3.

Only what `smollm2.py` needs: metadata of all types, arrays as float32 or in 32-element blocks of 4
and 8 bits.
"""

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]
Value = int | float | bool | str | list[Any]

BLOCK = 32
"""Elements that share a scale."""

FLOAT32, FLOAT16, Q4_1, Q8_0 = 0, 1, 3, 8

_NUMBERS: dict[int, str] = dict(
    zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True)
)
"""GGUF's number types as codes of the struct module."""
_STRING, _ARRAY = 8, 9

_BLOCKS = {
    Q4_1: np.dtype([("scale", "<f2"), ("bias", "<f2"), ("codes", "u1", (BLOCK // 2,))]),
    Q8_0: np.dtype([("scale", "<f2"), ("codes", "i1", (BLOCK,))]),
}


class GgufError(Exception):
    """The file is not the GGUF that was expected."""


@dataclass(frozen=True)
class Quantized:
    """An array as codes: element = scale * code + bias, for each block of 32 along the last axis.

    `codes` has the array's shape and unsigned values below 2 ** bits; `scales` and `biases` are
    float16 with a last axis 32 times shorter.
    """

    bits: int
    codes: Array
    scales: Array
    biases: Array

    def dequantized(self) -> Array:
        """The values in float32."""
        blocks = self.codes.reshape(*self.scales.shape, BLOCK).astype(np.float32)
        values = blocks * self.scales[..., None].astype(np.float32)
        values += self.biases[..., None].astype(np.float32)
        return values.reshape(self.codes.shape)


class GgufFile:
    """The file's metadata, and its arrays by name. Raises GgufError when it is another format."""

    def __init__(self, path: Path) -> None:
        self._data = np.memmap(path, dtype=np.uint8, mode="r")
        self._position = 0
        if bytes(self._take(4)) != b"GGUF" or self._number("I") != 3:
            raise GgufError(f"{path} is no GGUF file of version 3")
        num_tensors, num_entries = self._number("Q"), self._number("Q")
        self.metadata: dict[str, Value] = {}
        for _ in range(num_entries):
            name = self._string()
            self.metadata[name] = self._value(self._number("I"))
        self._tensors = dict(self._tensor_entry() for _ in range(num_tensors))
        alignment = int(cast("int", self.metadata.get("general.alignment", 32)))
        self._start = -(-self._position // alignment) * alignment

    def names(self) -> list[str]:
        """The names of all arrays."""
        return list(self._tensors)

    def read(self, name: str) -> Array | Quantized:
        """The array with this name: float32, or its codes."""
        shape, kind, offset = self._tensors[name]
        count = int(np.prod(shape))
        begin = self._start + offset
        if kind in (FLOAT32, FLOAT16):
            dtype = np.dtype("<f4" if kind == FLOAT32 else "<f2")
            raw = self._data[begin : begin + count * dtype.itemsize]
            return raw.view(dtype).reshape(shape).astype(np.float32)
        if kind not in _BLOCKS:
            raise GgufError(f"{name} is of type {kind}; 4-bit (Q4_1) and 8-bit (Q8_0) are known")
        dtype = _BLOCKS[kind]
        raw = self._data[begin : begin + count // BLOCK * dtype.itemsize]
        return _quantized(kind, raw.view(dtype).reshape(*shape[:-1], shape[-1] // BLOCK))

    def _tensor_entry(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        name = self._string()
        axes = [self._number("Q") for _ in range(self._number("I"))]
        return name, (tuple(reversed(axes)), self._number("I"), self._number("Q"))

    def _take(self, length: int) -> Array:
        self._position += length
        return self._data[self._position - length : self._position]

    def _number(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)).tobytes())[0]

    def _string(self) -> str:
        return bytes(self._take(self._number("Q"))).decode()

    def _value(self, kind: int) -> Value:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            item, length = self._number("I"), self._number("Q")
            if item in _NUMBERS:
                dtype = np.dtype("<" + _NUMBERS[item])
                return self._take(length * dtype.itemsize).view(dtype).tolist()
            return [self._value(item) for _ in range(length)]
        return self._number(_NUMBERS[kind])


def _quantized(kind: int, blocks: Array) -> Quantized:
    shape = (*blocks.shape[:-1], blocks.shape[-1] * BLOCK)
    codes = blocks["codes"]
    if kind == Q4_1:
        # The low halves of the 16 bytes are the first 16 elements, the high halves the others.
        whole = np.concatenate([codes & 0xF, codes >> 4], axis=-1)
        return Quantized(4, whole.reshape(shape), blocks["scale"], blocks["bias"])
    # Signed codes around 0 become unsigned ones around 128; the bias takes that back.
    unsigned = (codes.astype(np.int16) + 128).astype(np.uint8)
    scales = blocks["scale"]
    return Quantized(8, unsigned.reshape(shape), scales, (scales * np.float16(-128)))
