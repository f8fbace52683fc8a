"""The engine's port to saved KV, with the real codec: rows go to disk and come back to the bit."""

import errno
import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from journal import events
from scheduler.effects import RemoveFiles
from scheduler.engine.base import BadFile, RestoreRow
from scheduler.keptfiles import file_of
from scheduler.kvcache.layout import Layout
from tests.kvcache.damage import DAMAGES, delete, exchange, truncate
from tests.kvcache.faults import FaultyFiles
from tests.kvcache.models import Case
from tests.kvcache.port import (
    BLOCK_TOKENS,
    HYBRID,
    NAMES,
    NUM_BLOCKS,
    PLAIN,
    POSITION,
    WINDOWS,
    Port,
    check_goes_on,
    hold_back,
    plan,
)
from tests.kvcache.rows import fed_row, logprobs, numbers, zero_position

pytestmark = pytest.mark.engine


@pytest.mark.parametrize("memory_bytes", [0, 2**24])
@pytest.mark.parametrize("case", [PLAIN, HYBRID, WINDOWS])
def test_a_row_comes_back_to_the_bit(
    make_port: Callable[..., Port], case: Case, memory_bytes: int
) -> None:
    port = make_port(case, memory_bytes=memory_bytes)
    row = port.save_row()
    restored, result = port.restore()
    assert port.content(restored, POSITION) == port.content(row, POSITION)
    check_goes_on(port, POSITION, restored)
    assert (result.number, result.num_tokens, result.bad) == (7, POSITION, ())
    in_memory, on_disk = (POSITION, 0) if memory_bytes else (0, POSITION)
    assert (result.num_memory_tokens, result.num_disk_tokens) == (in_memory, on_disk)
    assert (result.read_bytes > 0) == (memory_bytes == 0)


def test_the_last_block_is_trimmed(make_port: Callable[..., Port]) -> None:
    port = make_port(PLAIN)
    port.save_row()
    restored, result = port.restore(POSITION - 1)
    assert (result.num_tokens, result.num_disk_tokens) == (POSITION - 1, POSITION - 1)
    check_goes_on(port, POSITION - 1, restored)


@pytest.mark.parametrize("case", [PLAIN, HYBRID])
def test_a_zeroed_position_would_be_noticed(
    make_port: Callable[..., Port], case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = Layout.cut_block

    def defective(layout: Layout, caches: list[Any], start: int, length: int) -> Any:
        block = zero_position(cut(layout, caches, start, length))
        mx.eval(block)
        return block

    monkeypatch.setattr(Layout, "cut_block", defective)
    port = make_port(case)
    port.save_row()
    restored, _ = port.restore()
    with pytest.raises(AssertionError):
        check_goes_on(port, POSITION, restored)


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("case", [PLAIN, HYBRID])
def test_a_row_ends_before_a_bad_block(
    make_port: Callable[..., Port], case: Case, damage: Callable[[Path, Path], None]
) -> None:
    port = make_port(case)
    port.save_row()
    damage(port.path(3), port.path(4))
    restored, result = port.restore()
    depth = 2 if port.stateful else 3
    assert result.num_tokens == result.num_disk_tokens == depth * BLOCK_TOKENS
    ((name, part, reason),) = [(bad.hash, bad.part, bad.reason) for bad in result.bad]
    assert (name, part) == (NAMES[3], "block")
    assert reason == ("missing" if damage is delete else "corrupt")
    lost = [(NAMES[4], "block", "corrupt")] * (damage is exchange)
    assert [(each.hash, each.part, each.reason) for each in result.lost] == lost
    check_goes_on(port, depth * BLOCK_TOKENS, restored)


@pytest.mark.parametrize("memory_bytes", [0, 2**24])
@pytest.mark.parametrize("case", [PLAIN, HYBRID])
def test_all_that_is_lost_of_a_chain_is_found_at_once(
    make_port: Callable[..., Port], case: Case, memory_bytes: int
) -> None:
    """Without reading a block, and also of what memory still has."""
    port = make_port(case, memory_bytes=memory_bytes)
    port.save_row()
    port.kv.tier.discard(file_of(port.kv.domain, NAMES[1], is_state=False))
    for index in (1, 3, 4):
        port.path(index).unlink()
    truncate(port.path(5), port.path(5))
    if port.stateful:
        port.path(5, is_state=True).unlink()
    _, result = port.restore()
    assert [each.hash for each in result.bad] == [NAMES[1]]
    lost = [(3, "block", "missing"), (4, "block", "missing"), (5, "block", "corrupt")]
    lost += [(5, "state", "missing")] if port.stateful else []
    found = [(NAMES.index(each.hash), each.part, each.reason) for each in result.lost]
    assert sorted(found) == lost
    assert result.num_tokens == (0 if port.stateful else BLOCK_TOKENS)
    gone = [
        file_of(port.kv.domain, each.hash, is_state=each.part == "state") for each in result.lost
    ]
    assert not any(file in port.kv.tier for file in gone)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_row_goes_on_from_the_deepest_good_state(
    make_port: Callable[..., Port], damage: Callable[[Path, Path], None]
) -> None:
    port = make_port(HYBRID)
    port.save_row()
    damage(port.path(5, is_state=True), port.path(3, is_state=True))
    depth = 2 if damage is exchange else 4
    restored, result = port.restore()
    assert result.num_tokens == depth * BLOCK_TOKENS
    assert [(each.hash, each.part) for each in result.bad] == [(NAMES[5], "state")]
    lost = [(NAMES[3], "state")] * (damage is exchange)
    assert [(each.hash, each.part) for each in result.lost] == lost
    check_goes_on(port, depth * BLOCK_TOKENS, restored)


def test_a_row_without_any_good_file_is_empty(make_port: Callable[..., Port]) -> None:
    port = make_port(HYBRID)
    port.save_row()
    port.path(0).unlink()
    restored, result = port.restore()
    assert (result.num_tokens, result.num_disk_tokens) == (0, 0)
    assert result.bad == (BadFile(NAMES[0], "block", "missing", result.bad[0].detail),)
    expected = port.case.feed(port.case.make_caches(), numbers(0, 9))
    assert logprobs(port.case.feed(restored, numbers(0, 9))) == logprobs(expected)


def test_memory_has_what_a_writer_still_holds(
    make_port: Callable[..., Port], monkeypatch: pytest.MonkeyPatch
) -> None:
    port = make_port(PLAIN, memory_bytes=2**24)
    may_write = hold_back(port, monkeypatch)
    row = fed_row(PLAIN, POSITION, 0)
    port.kv.save(row, [plan(index) for index in range(NUM_BLOCKS)])
    assert not port.path(0).exists()
    restored, result = port.restore()
    assert (result.num_tokens, result.num_memory_tokens) == (POSITION, POSITION)
    check_goes_on(port, POSITION, restored)
    may_write.set()
    port.wait_for(events.BlockSaved, NUM_BLOCKS)


def test_a_writer_that_is_held_back_loses_nothing_and_holds_no_more_than_its_bound(
    make_port: Callable[..., Port], monkeypatch: pytest.MonkeyPatch
) -> None:
    block_bytes = BLOCK_TOKENS * 2 * 2 * 32 * 4  # two layers of keys and values, float32
    port = make_port(PLAIN, writing_bytes=block_bytes)  # a state may go over it once: twice that
    assert port.codec.layout.bytes_per_token * BLOCK_TOKENS == block_bytes
    may_write = hold_back(port, monkeypatch)
    row = fed_row(PLAIN, POSITION, 0)
    port.kv.save(row, [plan(index) for index in range(NUM_BLOCKS)])
    assert port.kv.writers.held_bytes == 2 * block_bytes
    refused = port.wait_for(events.BlockSaveFailed, NUM_BLOCKS - 2)
    assert [(fact.hash, fact.reason) for fact in refused] == [
        (name, "not_taken") for name in NAMES[2:]
    ]
    may_write.set()
    port.wait_for(events.BlockSaved, 2)
    for index in range(2, NUM_BLOCKS):
        port.kv.save(row, [plan(index)])
        port.wait_for(events.BlockSaved, index + 1)
    assert port.kv.writers.held_bytes == 0
    restored, result = port.restore()
    assert result.num_tokens == POSITION
    assert port.content(restored, POSITION) == port.content(row, POSITION)


def test_a_file_that_could_not_be_removed_goes_later_unless_it_is_saved_again(
    make_port: Callable[..., Port],
) -> None:
    port = make_port(PLAIN, measure_s=1)
    port.save_row()
    files = FaultyFiles()
    files.fail("unlink", 0, errno.EROFS)
    port.kv.store.files = files
    port.kv.remove(RemoveFiles(1, port.kv.domain, NAMES, ()))
    paths = [port.path(index) for index in range(NUM_BLOCKS)]
    assert all(path.exists() for path in paths)
    port.kv.save(fed_row(PLAIN, POSITION, 0), [plan(0)])
    port.wait_for(events.BlockSaved, NUM_BLOCKS + 1)
    files.heal()
    folder = port.kv.store.folder
    port.kv.begin({str(path.relative_to(folder)): path.stat().st_size for path in paths})
    while any(path.exists() for path in paths[1:]):
        pass
    assert paths[0].exists()


def test_a_block_that_can_never_be_taken_is_answered(make_port: Callable[..., Port]) -> None:
    """A file larger than all that the writers may hold must not end the engine's thread."""
    port = make_port(PLAIN, writing_bytes=1)
    port.kv.save(fed_row(PLAIN, POSITION, 0), [plan(0), plan(1)])
    failed = port.wait_for(events.BlockSaveFailed, 2)
    assert [(fact.hash, fact.reason) for fact in failed] == [
        (name, "not_taken") for name in NAMES[:2]
    ]


def test_a_restore_takes_the_row_and_two_blocks_at_most(make_port: Callable[..., Port]) -> None:
    port = make_port(PLAIN)
    port.save_row()
    layout = port.codec.layout
    row_bytes = 256 * layout.bytes_per_token  # the caches grow by 256 tokens
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    restored, result = port.restore()
    peak = mx.get_peak_memory() - before
    assert result.num_tokens == POSITION
    assert peak <= row_bytes + 2 * BLOCK_TOKENS * layout.bytes_per_token
    assert mx.get_active_memory() - before <= row_bytes
    check_goes_on(port, POSITION, restored)


def test_a_restore_that_is_given_up_leaves_nothing(make_port: Callable[..., Port]) -> None:
    port = make_port(PLAIN)
    port.save_row()
    gc.collect()  # What other tests have left behind must not go meanwhile.
    before = mx.get_active_memory()
    command = RestoreRow(7, NAMES, POSITION, ())
    restoring = port.kv.restore(port.case.make_caches(), command, POSITION, lambda: None)
    assert restoring.advance(wait=True) is None
    restoring.close()
    del restoring
    assert mx.get_active_memory() == before
