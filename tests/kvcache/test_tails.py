"""Tails: what a held request has behind its whole blocks, saved and read with the real codec."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from journal import events
from scheduler.effects import RemoveFiles
from scheduler.engine.base import BadFile, RestoreRow, SaveTail, Tail
from scheduler.kvcache.arrays import settle, tensors
from scheduler.kvcache.layout import Layout
from scheduler.kvcache.naming import TailFile
from scheduler.kvcache.store import Saved
from tests.kvcache.damage import DAMAGES, delete
from tests.kvcache.models import CASES, Case
from tests.kvcache.port import (
    BLOCK_TOKENS,
    HYBRID,
    NAMES,
    PLAIN,
    POSITION,
    STATES,
    WINDOWS,
    Port,
    check_goes_on,
    tail_start,
)
from tests.kvcache.rows import fed_row, numbers, zero_position

pytestmark = pytest.mark.engine

END = POSITION + 7
Ports = Callable[..., Port]


def chain_bytes(port: Port, end: int) -> int:
    """What a row of this length holds, as arrays."""
    states = port.codec.layout.cut_state(fed_row(port.case, end, 0), end)
    return port.codec.layout.bytes_per_token * end + sum(each.nbytes for each in states.values())


@pytest.mark.parametrize("end", [5, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1, END])
@pytest.mark.parametrize("case", [PLAIN, HYBRID, WINDOWS])
def test_a_row_comes_back_at_the_end_of_its_tail(make_port: Ports, case: Case, end: int) -> None:
    port = make_port(case)
    row = port.save_to(end)
    saved = port.save_tail(row, end)
    has_file = end % BLOCK_TOKENS != 0 or port.stateful
    assert saved == events.ChainSaved(
        request_id="req_1",
        number=7,
        tail_start=tail_start(end),
        num_tokens=end,
        tail_bytes=port.tail_path(end).stat().st_size if has_file else 0,
        duration_ns=saved.duration_ns,
    )
    assert port.tail_path(end).exists() == has_file
    restored, result = port.restore_held(end)
    assert port.content(restored, end) == port.content(row, end)
    check_goes_on(port, end, restored)
    assert (result.num_tokens, result.num_disk_tokens, result.bad) == (end, end, ())
    assert result.read_bytes == chain_bytes(port, end)


@pytest.mark.parametrize("case", [PLAIN, HYBRID])
def test_a_zeroed_position_in_a_tail_would_be_noticed(
    make_port: Ports, case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = Layout.cut_tail

    def defective(layout: Layout, caches: list[Any], start: int, position: int) -> Any:
        return settle(zero_position(cut(layout, caches, start, position)))

    port = make_port(case)
    row = port.save_to(END)
    with monkeypatch.context() as patch:
        patch.setattr(Layout, "cut_tail", defective)
        port.save_tail(row, END)
    restored, _ = port.restore_held(END)
    with pytest.raises(AssertionError):
        check_goes_on(port, END, restored)


def test_memory_never_keeps_a_tail(make_port: Ports) -> None:
    port = make_port(HYBRID, memory_bytes=2**24)
    row = port.save_to(END)
    blocks_bytes = port.kv.tier.held_bytes
    port.save_tail(row, END)
    _, result = port.restore_held(END)
    assert (result.num_memory_tokens, result.num_disk_tokens) == (POSITION, END - POSITION)
    assert port.kv.tier.held_bytes == blocks_bytes


# What may be wrong with the file


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("case", [PLAIN, HYBRID])
def test_a_row_ends_before_a_bad_tail(
    make_port: Ports, case: Case, damage: Callable[[Path, Path], None]
) -> None:
    """Swapped with the tail of another request at the same position, among others."""
    port = make_port(case)
    port.save_row()
    row = fed_row(case, END, 0)
    port.save_tail(row, END)
    port.save_tail(row, END, "req_2")
    damage(port.tail_path(END), port.tail_path(END, "req_2"))
    restored, result = port.restore_held(END, STATES if port.stateful else ())
    assert (result.num_tokens, result.num_disk_tokens) == (POSITION, POSITION)
    reason = "missing" if damage is delete else "corrupt"
    assert result.bad == (BadFile(f"req_1-{END}", "tail", reason, result.bad[0].detail),)
    check_goes_on(port, POSITION, restored)


def write_tail(port: Port, block: Any) -> None:
    """Puts a whole, well-named file with another content in the tail's place."""
    result = port.kv.store.save(TailFile(port.kv.domain, "req_1", END), tensors(block))
    assert isinstance(result, Saved)


def check_wrong(port: Port) -> None:
    """The tail is refused as a damaged one, and the row goes on from the deepest state."""
    restored, result = port.restore_held(END, (2, 4) if port.stateful else ())
    depth = 4 if port.stateful else 6
    assert result.num_tokens == depth * BLOCK_TOKENS
    assert [(bad.part, bad.reason) for bad in result.bad] == [("tail", "corrupt")]
    check_goes_on(port, depth * BLOCK_TOKENS, restored)


@pytest.mark.parametrize("length", [0, 6, 8])
@pytest.mark.parametrize("case", [PLAIN, HYBRID])
def test_a_tail_of_another_length_is_refused(make_port: Ports, case: Case, length: int) -> None:
    port = make_port(case)
    port.save_row()
    write_tail(port, port.codec.layout.cut_tail(fed_row(case, END, 0), END - length, END))
    check_wrong(port)


@pytest.mark.parametrize("case", [PLAIN, HYBRID])
def test_a_tail_of_another_layout_is_refused(make_port: Ports, case: Case) -> None:
    port = make_port(case)
    port.save_row()
    other = make_port(CASES["KVCache, two heads"])
    write_tail(port, other.codec.cut_tail(fed_row(other.case, END, 0), POSITION, END))
    check_wrong(port)


def test_a_tail_without_its_state_is_refused(make_port: Ports) -> None:
    port = make_port(HYBRID)
    port.save_row()
    row = fed_row(HYBRID, END, 0)
    write_tail(port, port.codec.layout.cut_block(row, POSITION, END - POSITION))
    check_wrong(port)


def test_a_tail_with_the_state_of_another_position_is_refused(make_port: Ports) -> None:
    port = make_port(WINDOWS)
    port.save_row()
    tail = port.codec.layout.cut_tail(fed_row(WINDOWS, END, 0), POSITION, END)
    state = port.codec.layout.cut_state(fed_row(WINDOWS, END - 1, 0), END - 1)
    write_tail(port, {**tail, **state})
    check_wrong(port)


def test_without_any_state_a_bad_tail_leaves_an_empty_row(make_port: Ports) -> None:
    port = make_port(HYBRID)
    port.save_to(END)
    restored, result = port.restore_held(END)
    assert (result.num_tokens, result.num_disk_tokens) == (0, 0)
    assert [(bad.part, bad.reason) for bad in result.bad] == [("tail", "missing")]
    HYBRID.feed(restored, numbers(0, 4))
    assert port.content(restored, 4) == port.content(fed_row(HYBRID, 4, 0), 4)


@pytest.mark.parametrize("case", [PLAIN, HYBRID])
def test_a_bad_block_before_a_tail_ends_the_row_there(make_port: Ports, case: Case) -> None:
    port = make_port(case)
    port.save_row()
    port.save_tail(fed_row(case, END, 0), END)
    port.path(3).unlink()
    restored, result = port.restore_held(END, STATES if port.stateful else ())
    depth = 2 if port.stateful else 3
    assert result.num_tokens == depth * BLOCK_TOKENS
    assert [(bad.hash, bad.part) for bad in result.bad] == [(NAMES[3], "block")]
    assert result.lost == ()
    check_goes_on(port, depth * BLOCK_TOKENS, restored)


@pytest.mark.parametrize("case", [PLAIN, HYBRID])
def test_all_that_is_lost_of_a_held_chain_is_found_at_once(make_port: Ports, case: Case) -> None:
    port = make_port(case)
    port.save_row()
    port.save_tail(fed_row(case, END, 0), END)
    shutil.rmtree(port.kv.store.folder)
    _, result = port.restore_held(END, STATES if port.stateful else ())
    assert [(bad.hash, bad.part) for bad in result.bad] == [(NAMES[0], "block")]
    lost = [(name, "block") for name in NAMES[1:]] + [(f"req_1-{END}", "tail")]
    lost += [(NAMES[depth - 1], "state") for depth in STATES] if port.stateful else []
    assert [(bad.hash, bad.part) for bad in result.lost] == lost
    assert {bad.reason for bad in result.lost} == {"missing"}


# What the journal knows, and what it does not


def test_a_tail_is_unlinked_when_it_is_committed(make_port: Ports) -> None:
    port = make_port(PLAIN)
    port.save_tail(fed_row(PLAIN, END, 0), END)
    port.kv.remove(RemoveFiles(1, port.kv.domain, (), (), (f"req_1-{END}",)))
    assert not port.tail_path(END).exists()


def test_a_row_whose_tail_cannot_be_cut_is_answered(
    make_port: Ports, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise RuntimeError("no memory")

    monkeypatch.setattr(Layout, "cut_tail", broken)
    port = make_port(PLAIN)
    with pytest.raises(RuntimeError, match="no memory"):
        port.kv.save_tail(fed_row(PLAIN, END, 0), SaveTail(7, "req_1", POSITION), END)
    [failed] = port.wait_for(events.ChainSaveFailed, 1)
    assert (failed.request_id, failed.number, failed.reason) == ("req_1", 7, "not_taken")
    assert len(port.facts) == 1


def test_a_restore_with_a_tail_takes_the_row_and_two_files_at_most(make_port: Ports) -> None:
    port = make_port(PLAIN)
    port.save_tail(port.save_to(END), END)
    layout = port.codec.layout
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    command = RestoreRow(7, NAMES, END, (), Tail("req_1", POSITION, END))
    restored, result = port.fill(command)
    peak = mx.get_peak_memory() - before
    assert result.num_tokens == END
    assert peak <= (256 + 2 * BLOCK_TOKENS) * layout.bytes_per_token
    check_goes_on(port, END, restored)
