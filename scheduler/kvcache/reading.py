"""Blocks of mlx arrays from their files, with every bit checked."""

import time
from collections.abc import Callable
from typing import cast

import mlx.core as mx

from scheduler.kvcache.arrays import Block, block_bytes, block_checksum
from scheduler.kvcache.naming import KeptFile
from scheduler.kvcache.readahead import Read
from scheduler.kvcache.store import BlockStore, OpenFile, ReadFailed, Unreadable

Loader = Callable[[str], Block]


def load_block(path: str) -> Block:
    """The arrays of a safetensors file, evaluated. Raises RuntimeError when they cannot be read."""
    block = cast("dict[str, mx.array]", mx.load(path))
    mx.eval(block)
    return block


def read(store: BlockStore, file: KeptFile, load: Loader = load_block) -> Read | ReadFailed:
    """Reads a file of the store. May be called in any thread; one that ends afterwards calls
    `mx.clear_streams()` first.
    """
    begun_ns = time.monotonic_ns()
    try:
        with OpenFile(store, file) as opened:
            if not opened.header.names:
                return Read(file, {}, "ssd", time.monotonic_ns() - begun_ns)
            try:
                block = load(str(store.path(file)))
            except RuntimeError as error:
                return ReadFailed(file, "io_error", str(error))
            # The bytes that are checked are those that will be used, not a second reading.
            opened.compare(block_checksum(block, opened.header.names))
    except Unreadable as error:
        return error.failed
    return Read(file, block, "ssd", time.monotonic_ns() - begun_ns, block_bytes(block))
