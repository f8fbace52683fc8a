"""Rows that are saved and restored, and what shows whether anything was lost on the way."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx

from scheduler.kvcache.arrays import Block, tensors
from scheduler.kvcache.filling import RowFiller
from scheduler.kvcache.layout import Layout
from scheduler.kvcache.naming import BlockFile, KeptFile, TailFile
from scheduler.kvcache.readahead import Read
from scheduler.kvcache.reading import read
from scheduler.kvcache.store import BlockStore, Saved
from tests.kvcache.models import VOCABULARY, Case

BLOCK_TOKENS = 16
DOMAIN = "d0" * 32

Change = Callable[[Block], Block]


def numbers(start: int, end: int) -> list[int]:
    """Tokens of one fixed text."""
    return [(31 * index + index * index // 7 + 5) % VOCABULARY for index in range(start, end)]


def block_file(number: int) -> BlockFile:
    """A name for the block with this number."""
    return BlockFile(DOMAIN, f"{number:064x}")


def fed_row(case: Case, position: int, steps: int) -> list[Any]:
    """A row at this position: one chunk, and at the end `steps` single tokens."""
    caches = case.make_caches()
    first = max(1, position - steps)
    case.feed(caches, numbers(0, first))
    for index in range(first, position):
        case.feed(caches, numbers(index, index + 1))
    return caches


def save_row(
    store: BlockStore,
    layout: Layout,
    caches: Sequence[Any],
    position: int,
    change: Change = lambda block: block,
) -> None:
    """Saves the full blocks and the tail of a row. `change` is what a defect would do to each."""
    start = 0
    for start in range(0, position - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        block = layout.cut_block(caches, start, BLOCK_TOKENS)
        save(store, block_file(start // BLOCK_TOKENS), change(block))
    start = position - position % BLOCK_TOKENS
    tail = layout.cut_tail(caches, start, position)
    save(store, TailFile(DOMAIN, "req_1", position), change(tail))


def restore_row(
    store: BlockStore, layout: Layout, caches: list[Any], position: int, room: int = 0
) -> RowFiller:
    """Fills empty caches from the store. The filler is of no more use."""
    filler = RowFiller(layout, caches, max(position, room))
    for number in range(position // BLOCK_TOKENS):
        filler.fill(load(store, block_file(number)), BLOCK_TOKENS)
    tail = load(store, TailFile(DOMAIN, "req_1", position))
    if position % BLOCK_TOKENS:
        filler.fill(tail, position % BLOCK_TOKENS)
    filler.finish(position, tail)
    return filler


def save(store: BlockStore, file: KeptFile, block: Block) -> None:
    """Saves, or fails the test."""
    result = store.save(file, tensors(block))
    assert isinstance(result, Saved), result


def load(store: BlockStore, file: KeptFile) -> Block:
    """Reads, or fails the test."""
    result = read(store, file)
    assert isinstance(result, Read), result
    return result.block


def make_store(folder: Path) -> BlockStore:
    """A store in a folder of the test's own."""
    return BlockStore(folder / "kv")


def whole_row(layout: Layout, caches: Sequence[Any], position: int) -> dict[str, bytes]:
    """All that a row holds at its position, state in the order of time, as bytes."""
    return block_content(layout.cut_tail(caches, 0, position))


def block_content(block: Block) -> dict[str, bytes]:
    """The arrays' bytes, by name."""
    return {name: bytes(tensor.data) for name, tensor in tensors(block).items()}


def logprobs(logits: mx.array) -> bytes:
    """The log-probabilities of all tokens after each position, as bytes."""
    values = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    return bytes(memoryview(mx.contiguous(values)))  # pyright: ignore[reportArgumentType]


def zero_position(block: Block) -> Block:
    """A defect: the first position of one layer's keys is zero, where a block has any."""
    name = next((name for name in block if ".keys" in name), None)
    if name is None:
        return block
    keys = block[name]
    kept = mx.arange(keys.shape[2]) > 0
    return {**block, name: mx.contiguous(keys * kept[None, None, :, None].astype(keys.dtype))}
