"""A row that was saved and restored is, to the bit, the row that was never away."""

import threading
from pathlib import Path

import mlx.core as mx
import pytest

from scheduler.kvcache import filling
from scheduler.kvcache.layout import layout_of
from tests.kvcache.models import CASES, WINDOW, Case
from tests.kvcache.rows import (
    BLOCK_TOKENS,
    Change,
    fed_row,
    logprobs,
    make_store,
    numbers,
    restore_row,
    save_row,
    whole_row,
    zero_position,
)

pytestmark = pytest.mark.engine

OFFSETS = (
    1,
    BLOCK_TOKENS - 1,
    BLOCK_TOKENS,
    BLOCK_TOKENS + 1,
    WINDOW - 1,
    WINDOW,
    WINDOW + 1,
    2 * WINDOW + 3,
)
STEPS = 6
"""Single tokens before saving, so that a ring has begun to turn, and after restoring."""


def check_restored(folder: Path, case: Case, position: int, change: Change | None = None) -> None:
    """Saves a row, restores it into empty caches, and lets both go on: the same bytes and
    log-probabilities at every point.
    """
    original = fed_row(case, position, STEPS)
    layout, store = layout_of(original, position), make_store(folder)
    save_row(store, layout, original, position, change or (lambda block: block))
    restored = case.make_caches()
    restore_row(store, layout, restored, position)
    assert whole_row(layout, restored, position) == whole_row(layout, original, position)

    # One by one through a turn of the ring and past a step of the buffers, then a chunk.
    chunks = [numbers(index, index + 1) for index in range(position, position + STEPS)]
    chunks += [numbers(position + STEPS, position + STEPS + 9), numbers(0, 1)]
    end = position + STEPS + 10
    for chunk in chunks:
        expected, found = case.feed(original, chunk), case.feed(restored, chunk)
        assert logprobs(found) == logprobs(expected)
    assert whole_row(layout, restored, end) == whole_row(layout, original, end)


@pytest.mark.parametrize("position", OFFSETS)
@pytest.mark.parametrize("name", CASES)
def test_a_restored_row_goes_on_to_the_bit(name: str, position: int, tmp_path: Path) -> None:
    check_restored(tmp_path, CASES[name], position)


@pytest.mark.parametrize("name", CASES)
def test_a_zeroed_position_would_be_noticed(name: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check_restored(tmp_path, CASES[name], WINDOW + 1, zero_position)


@pytest.mark.parametrize("name", CASES)
def test_a_zeroed_position_changes_log_probabilities(name: str, tmp_path: Path) -> None:
    """The bytes are compared first above; this is the other half of what the tests rest on."""
    case = CASES[name]
    original = fed_row(case, WINDOW + 1, STEPS)
    layout, store = layout_of(original, WINDOW + 1), make_store(tmp_path)
    save_row(store, layout, original, WINDOW + 1, zero_position)
    restored = case.make_caches()
    restore_row(store, layout, restored, WINDOW + 1)
    expected, found = (case.feed(row, numbers(9, 10)) for row in (original, restored))
    assert logprobs(found) != logprobs(expected)


def test_growth_past_the_restored_room(tmp_path: Path) -> None:
    """Beyond a step of the buffers they are made anew, with all that was restored."""
    case, position = CASES["KVCache"], 255
    original = fed_row(case, position, 0)
    layout, store = layout_of(original, position), make_store(tmp_path)
    save_row(store, layout, original, position)
    restored = case.make_caches()
    restore_row(store, layout, restored, position)
    for chunk in (numbers(0, 1), numbers(1, 2), numbers(2, 40)):
        assert logprobs(case.feed(restored, chunk)) == logprobs(case.feed(original, chunk))
    assert whole_row(layout, restored, 295) == whole_row(layout, original, 295)


def test_the_restored_row_is_evaluated_and_alone(tmp_path: Path) -> None:
    """Its arrays may be used at once, and hold no block alive."""
    case, position = CASES["ArraysCache and KVCache"], 2 * BLOCK_TOKENS
    original = fed_row(case, position, 0)
    layout, store = layout_of(original, position), make_store(tmp_path)
    save_row(store, layout, original, position)
    restored = case.make_caches()
    before = mx.get_active_memory()
    restore_row(store, layout, restored, position)
    row_bytes = layout.state_bytes + 256 * layout.bytes_per_token
    assert mx.get_active_memory() - before <= row_bytes + 2**14


def test_a_restored_row_writes_in_place(tmp_path: Path) -> None:
    """Else each step would copy all that was restored."""
    case, position = CASES["KVCache"], 2 * BLOCK_TOKENS
    original = fed_row(case, position, 0)
    layout, store = layout_of(original, position), make_store(tmp_path)
    save_row(store, layout, original, position)
    caches = case.make_caches()
    filler = restore_row(store, layout, caches, position, room=2**17)
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    case.feed(caches, numbers(position, position + 1))
    assert mx.get_peak_memory() - before < caches[0].nbytes // 8
    assert filler.num_filled == position


def test_rows_of_one_thread_share_a_second_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream is a thread of mlx, which lives as long as the process."""
    made: list[mx.Stream] = []
    new_stream = mx.new_stream

    def note(device: mx.Device) -> mx.Stream:
        made.append(new_stream(device))
        return made[-1]

    monkeypatch.setattr(filling, "_of_this_thread", threading.local())
    monkeypatch.setattr(mx, "new_stream", note)
    case = CASES["KVCache"]
    layout = layout_of(fed_row(case, 1, 0), 1)
    for _ in range(3):
        filling.RowFiller(layout, case.make_caches(), 64)
    assert len(made) == (mx.default_device() == mx.Device(mx.cpu))
