"""Blocks in memory: named arrays that are contiguous, evaluated and never changed.

Evaluated, because a lazy array can only be computed in the thread that made it; contiguous and with
memory of its own, because a view keeps the whole row alive that it looks at.
"""

from collections.abc import Mapping, Sequence
from typing import cast

import mlx.core as mx

from scheduler.kvcache.fileformat import Tensor, checksum

Block = Mapping[str, mx.array]
"""What one file holds: a piece of the layers that can be cut, or the state layers, or both."""

CODES = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.uint64: "U64",
    mx.int64: "I64",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.float32: "F32",
    mx.complex64: "C64",
}
"""mlx's number formats in the words of the safetensors format, as mlx itself writes them."""

_INTEGERS = (mx.uint64, mx.uint32, mx.uint16)


def block_bytes(block: Block) -> int:
    """The memory that a block holds."""
    return sum(array.nbytes for array in block.values())


def settle(arrays: Mapping[str, mx.array]) -> Block:
    """Makes a block of arrays or views of the calling thread."""
    block = {name: mx.contiguous(array) for name, array in arrays.items()}
    mx.eval(block)
    return block


def tensors(block: Block) -> dict[str, Tensor]:
    """The block as bytes, without a copy; each tensor keeps its array alive."""
    return {
        name: Tensor(CODES[array.dtype], array.shape, _bytes_of(array))
        for name, array in block.items()
    }


def block_checksum(block: Block, names: Sequence[str]) -> str:
    """The checksum of the arrays' bytes in this order."""
    return checksum(_bytes_of(block[name]) for name in names)


def widest(last_size: int, dtype: mx.Dtype) -> mx.Dtype:
    """The widest integer that a last axis of so many numbers can be read as.

    mlx copies strided arrays number by number on a CPU: four times faster as 8 bytes than as 2.
    """
    num_bytes = last_size * dtype.size
    fitting = (wide for wide in _INTEGERS if wide.size >= dtype.size and not num_bytes % wide.size)
    return next(fitting, dtype) if num_bytes else dtype


def _bytes_of(array: mx.array) -> memoryview:
    if not array.size:
        return memoryview(b"")  # One with a zero in its shape cannot be cast.
    return memoryview(cast("bytes", array)).cast("B")
