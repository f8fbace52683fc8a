"""The memory tier holds what was used last, and never more than its bound."""

import threading

import mlx.core as mx
import pytest

from scheduler.kvcache.arrays import Block, block_bytes
from scheduler.kvcache.tier import MemoryTier
from tests.kvcache.rows import block_file

pytestmark = pytest.mark.engine

BLOCK_BYTES = 400


def made(fill: int = 0) -> Block:
    block = {"0.keys": mx.full((60,), fill), "0.values": mx.full((40,), fill)}
    mx.eval(block)
    return block


def full_tier() -> MemoryTier:
    """Room for three, holding 0, 1 and 2."""
    tier = MemoryTier(3 * BLOCK_BYTES, block_bytes)
    assert [tier.put(block_file(number), made(number)) for number in range(3)] == [[]] * 3
    return tier


def test_what_was_used_longest_ago_goes_first() -> None:
    tier = full_tier()
    assert tier.get(block_file(0)) is not None
    assert tier.put(block_file(3), made()) == [block_file(1)]
    assert tier.get(block_file(1)) is None
    assert (block_file(0) in tier, block_file(1) in tier) == (True, False)
    assert tier.put(block_file(4), made()) == [block_file(2)]
    assert (len(tier), tier.held_bytes) == (3, 3 * BLOCK_BYTES)


def test_the_same_block_again_is_held_once() -> None:
    tier = full_tier()
    assert tier.put(block_file(0), made()) == []
    assert (len(tier), tier.held_bytes) == (3, 3 * BLOCK_BYTES)
    assert tier.shrink(BLOCK_BYTES) == [block_file(1), block_file(2)]


def test_it_shrinks_to_what_it_is_told() -> None:
    tier = full_tier()
    assert tier.shrink(3 * BLOCK_BYTES) == []
    assert tier.shrink(2 * BLOCK_BYTES - 1) == [block_file(0), block_file(1)]
    assert tier.held_bytes == BLOCK_BYTES
    tier.discard(block_file(2))
    tier.discard(block_file(2))
    assert (len(tier), tier.held_bytes, tier.shrink(0)) == (0, 0, [])


def test_a_block_larger_than_the_tier_does_not_stay() -> None:
    tier = MemoryTier(BLOCK_BYTES - 1, block_bytes)
    assert tier.put(block_file(0), made()) == [block_file(0)]
    assert tier.held_bytes == 0


def test_shrinking_frees_memory_but_not_what_is_in_use() -> None:
    tier = MemoryTier(2**24, block_bytes)
    for number in range(2):
        tier.put(block_file(number), {"0.keys": mx.contiguous(mx.zeros((2**20,)))})
    mx.eval([tier.get(block_file(number)) for number in range(2)])
    in_use = tier.get(block_file(0))
    before = mx.get_active_memory()
    tier.shrink(0)
    assert before - mx.get_active_memory() == 4 * 2**20
    assert in_use is not None
    assert in_use["0.keys"].size == 2**20


def test_threads_keep_the_bound_and_the_sum() -> None:
    tier = MemoryTier(5 * BLOCK_BYTES, block_bytes)
    block = made()

    def work(first: int) -> None:
        for number in range(first, first + 300):
            tier.put(block_file(number % 40), block)
            tier.get(block_file(number % 7))
            tier.discard(block_file(number % 11))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tier.held_bytes == len(tier) * BLOCK_BYTES <= 5 * BLOCK_BYTES
