"""What is cut out of a row, and what must not be mixed up."""

import re
import threading
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import KVCache, QuantizedKVCache, RotatingKVCache

from scheduler.kvcache.arrays import Block, block_bytes, tensors, widest
from scheduler.kvcache.codec import WrongBlock
from scheduler.kvcache.filling import RowFiller
from scheduler.kvcache.layout import Layout, layout_of
from tests.kvcache.models import CASES, WINDOW
from tests.kvcache.rows import BLOCK_TOKENS, block_content, fed_row, numbers, whole_row

pytestmark = pytest.mark.engine

HYBRID = CASES["ArraysCache and KVCache"]
PLAIN = CASES["KVCache"]


def filled_cache(num_tokens: int, heads: int = 1, **parameters: Any) -> KVCache:
    cache = KVCache()
    shape = (1, heads, num_tokens, 64)
    cache.update_and_fetch(mx.random.normal(shape), mx.random.normal(shape))
    mx.eval(cache.state)
    return cache


@pytest.mark.parametrize("heads", [1, 2])
def test_a_block_does_not_hold_its_row_alive(heads: int) -> None:
    caches = [filled_cache(4096, heads)]
    block = layout_of(caches, 4096).cut_block(caches, 256, 256)
    before = mx.get_active_memory()
    del caches
    assert before - mx.get_active_memory() == 2 * heads * 4096 * 64 * 4
    assert block_bytes(block) == 2 * heads * 256 * 64 * 4


def test_a_state_does_not_hold_its_row_alive() -> None:
    ring = RotatingKVCache(64)
    for length in (4096, 1):
        keys = mx.random.normal((1, 1, length, 64))
        ring.update_and_fetch(keys, keys)
    mx.eval(ring.state)
    del keys
    state = layout_of([ring], 4097).cut_state([ring], 4097)
    before = mx.get_active_memory()
    del ring
    assert before - mx.get_active_memory() >= 2 * 64 * 64 * 4
    assert block_bytes(state) == 2 * 64 * 64 * 4 + 16


def test_blocks_may_be_used_in_another_thread() -> None:
    caches = fed_row(HYBRID, WINDOW, 2)
    layout = layout_of(caches, WINDOW)
    block, state = layout.cut_block(caches, 0, BLOCK_TOKENS), layout.cut_state(caches, WINDOW)
    expected = block_content(block) | block_content(state)
    found: dict[str, bytes] = {}
    pieces = tensors(block) | tensors(state)

    def copy() -> None:
        found.update({name: bytes(tensor.data) for name, tensor in pieces.items()})

    thread = threading.Thread(target=copy)
    thread.start()
    thread.join()
    assert found == expected


def test_a_saved_block_stays_as_it_was_when_the_row_goes_on() -> None:
    caches = fed_row(HYBRID, BLOCK_TOKENS, 2)
    layout = layout_of(caches, BLOCK_TOKENS)
    tail = layout.cut_tail(caches, 0, BLOCK_TOKENS)
    content = block_content(tail)
    for index in range(8):
        HYBRID.feed(caches, numbers(index, index + 1))
    assert block_content(tail) == content


def test_a_state_is_had_only_at_the_row_s_own_position() -> None:
    caches = fed_row(HYBRID, BLOCK_TOKENS + 1, 0)
    layout = layout_of(caches, BLOCK_TOKENS + 1)
    with pytest.raises(AssertionError, match="is at 17, not at 16"):
        layout.cut_state(caches, BLOCK_TOKENS)


def test_positions_that_the_row_does_not_hold_are_not_cut() -> None:
    caches = fed_row(PLAIN, BLOCK_TOKENS - 1, 0)
    layout = layout_of(caches, BLOCK_TOKENS - 1)
    with pytest.raises(AssertionError, match="15 positions, not 16"):
        layout.cut_block(caches, 0, BLOCK_TOKENS)


def quantized(bits: int, group_size: int = 32, size: int = 64) -> Layout:
    cache = QuantizedKVCache(group_size, bits)
    cache.update_and_fetch(mx.ones((1, 1, 4, size)), mx.ones((1, 1, 4, size)))
    return layout_of([cache], 4)


def half_precision() -> Layout:
    cache = KVCache()
    keys = mx.ones((1, 1, 4, 64), dtype=mx.bfloat16)
    cache.update_and_fetch(keys, keys)
    return layout_of([cache], 4)


def window(max_size: int, keep: int = 0) -> Layout:
    cache = RotatingKVCache(max_size, keep)
    cache.update_and_fetch(mx.ones((1, 1, 4, 64)), mx.ones((1, 1, 4, 64)))
    return layout_of([cache], 4)


def test_what_the_bytes_mean_is_in_the_digest() -> None:
    layouts = [
        layout_of([filled_cache(4)], 4),
        layout_of([filled_cache(4, heads=2)], 4),
        layout_of([filled_cache(4), filled_cache(4)], 4),
        half_precision(),
        quantized(4),
        quantized(6),
        quantized(8),
        quantized(8, group_size=64),
        quantized(4, group_size=64, size=128),  # The same shapes as 8 bits in groups of 32.
        window(8),
        window(16),
        window(16, keep=2),
    ]
    assert len({layout.digest for layout in layouts}) == len(layouts)


@pytest.mark.parametrize("name", CASES)
def test_the_digest_does_not_depend_on_the_row(name: str) -> None:
    short, long = (fed_row(CASES[name], length, 2) for length in (3, 2 * WINDOW))
    assert layout_of(short, 3).digest == layout_of(long, 2 * WINDOW).digest


def test_bytes_are_those_that_are_saved() -> None:
    caches = fed_row(CASES["RotatingKVCache and KVCache"], 2 * WINDOW, 2)
    layout = layout_of(caches, 2 * WINDOW)
    block = layout.cut_block(caches, 0, BLOCK_TOKENS)
    assert block_bytes(block) == BLOCK_TOKENS * layout.bytes_per_token
    assert block_bytes(layout.cut_state(caches, 2 * WINDOW)) == layout.state_bytes


def test_a_window_is_saved_without_the_rest_of_a_chunk() -> None:
    """A prefill leaves its whole chunk in the cache, of which nothing will look at the most."""
    caches = fed_row(CASES["RotatingKVCache and KVCache"], 4 * WINDOW, 0)
    layout = layout_of(caches, 4 * WINDOW)
    assert block_bytes(layout.cut_state(caches, 4 * WINDOW)) == layout.state_bytes
    assert caches[0].keys.shape[2] > WINDOW


CUT_ONLY = [name for name in CASES if not re.search("Arrays|Rotating|Chunked", name)]


@pytest.mark.parametrize("name", CUT_ONLY)
def test_an_exact_repeat_goes_on_from_a_block_cut_short(name: str) -> None:
    """The last token of a known prompt is computed again, over blocks that hold it already."""
    case = CASES[name]
    original = fed_row(case, 2 * BLOCK_TOKENS, steps=1)
    layout = layout_of(original, 2 * BLOCK_TOKENS)
    caches = case.make_caches()
    filler = RowFiller(layout, caches, 2 * BLOCK_TOKENS)
    for start in (0, BLOCK_TOKENS):
        filler.fill(layout.cut_block(original, start, BLOCK_TOKENS), BLOCK_TOKENS)
    filler.finish(2 * BLOCK_TOKENS - 1)
    case.feed(caches, numbers(2 * BLOCK_TOKENS - 1, 2 * BLOCK_TOKENS))
    assert whole_row(layout, caches, 32) == whole_row(layout, original, 32)


def test_a_row_falls_back_to_an_earlier_boundary() -> None:
    """The state of the deepest boundary was unreadable: an earlier one is taken instead."""
    original = fed_row(HYBRID, BLOCK_TOKENS, 0)
    layout = layout_of(original, BLOCK_TOKENS)
    state = layout.cut_state(original, BLOCK_TOKENS)
    HYBRID.feed(original, numbers(BLOCK_TOKENS, 2 * BLOCK_TOKENS))
    caches = HYBRID.make_caches()
    filler = RowFiller(layout, caches, 2 * BLOCK_TOKENS)
    for start in (0, BLOCK_TOKENS):
        filler.fill(layout.cut_block(original, start, BLOCK_TOKENS), BLOCK_TOKENS)
    filler.finish(BLOCK_TOKENS, state)
    HYBRID.feed(caches, numbers(BLOCK_TOKENS, 2 * BLOCK_TOKENS))
    assert whole_row(layout, caches, 32) == whole_row(layout, original, 32)


def test_wide_copies_keep_the_last_axis_whole() -> None:
    expected = [
        (128, mx.bfloat16, mx.uint64),
        (2, mx.bfloat16, mx.uint32),
        (1, mx.bfloat16, mx.uint16),
        (3, mx.uint8, mx.uint8),
        (1, mx.float32, mx.uint32),
        (0, mx.float32, mx.float32),
    ]
    assert [widest(size, dtype) for size, dtype, _ in expected] == [wide for _, _, wide in expected]


def cut_short(block: Block) -> Block:
    return {name: array[..., :1, :] for name, array in block.items()}


def as_half(block: Block) -> Block:
    return {name: array.astype(mx.float16) for name, array in block.items()}


@pytest.mark.parametrize("defect", [dict, cut_short, as_half])
def test_a_block_of_another_form_changes_nothing(defect: Any) -> None:
    original = fed_row(PLAIN, BLOCK_TOKENS, 0)
    layout = layout_of(original, BLOCK_TOKENS)
    filler = RowFiller(layout, PLAIN.make_caches(), BLOCK_TOKENS)
    block = layout.cut_block(original, 0, BLOCK_TOKENS)
    damaged = {} if defect is dict else defect(block)
    with pytest.raises(WrongBlock):
        filler.fill(damaged, BLOCK_TOKENS)
    assert filler.num_filled == 0


def test_a_state_of_another_position_is_no_state_of_this_row() -> None:
    case = CASES["RotatingKVCache and KVCache"]
    original = fed_row(case, BLOCK_TOKENS, 0)
    layout = layout_of(original, BLOCK_TOKENS)
    block = layout.cut_block(original, 0, BLOCK_TOKENS)
    case.feed(original, numbers(0, 1))
    later = layout.cut_state(original, BLOCK_TOKENS + 1)
    caches = case.make_caches()
    filler = RowFiller(layout, caches, BLOCK_TOKENS)
    filler.fill(block, BLOCK_TOKENS)
    for state in (later, None):
        with pytest.raises(WrongBlock):
            filler.finish(BLOCK_TOKENS, state)
    assert all(cache.empty() for cache in caches)
