"""The projections of phases and of files that were written: in the file, its twin and a rebuild."""

from itertools import pairwise
from pathlib import Path

import pytest

from journal import audit, sums
from journal.events import BlockSaveFailed, ChainSaveFailed, Decision, RequestDeferred
from journal.journal import Journal
from journal.queries import select_rows
from journal.reader import JournalReader
from journal.rows import DiskWriteRow, PhaseRow
from journal.span import Span
from journal.tables import disk_write, phase
from tests.journal_steps import START_NS, request_id, run_of, run_sql
from tests.pause_steps import (
    TAIL_BYTES,
    A,
    B,
    Held,
    HoldingSteps,
    cancelled,
    decoding,
    hold,
    join_again,
    pause_started,
    request_paused,
    resume_started,
)

C = "c" * 64


def phases_of(held: Held, number: int) -> list[PhaseRow]:
    where = f"WHERE number = {number} ORDER BY seq"
    rows = select_rows(run_of(held.file.journal), phase, PhaseRow, where)
    twin = held.twin.journal.phases
    assert rows == sorted((r for r in twin.values() if r.number == number), key=lambda r: r.seq)
    return rows


def writes_of(held: Held) -> list[DiskWriteRow]:
    rows = select_rows(run_of(held.file.journal), disk_write, DiskWriteRow, "ORDER BY seq")
    assert {row.seq: row for row in rows} == held.twin.journal.writes
    return rows


def test_phases_follow_one_another_from_receipt_to_end(tmp_path: Path) -> None:
    held = decoding(tmp_path)
    hold(held)
    held("resume", 1, 0, 40)
    join_again(held)
    held("decide", cancelled(1))
    rows = phases_of(held, 1)
    assert [row.phase for row in rows] == [
        *("waiting", "prefilling", "decoding", "pausing", "paused", "resuming"),
        *("prefilling", "decoding"),
    ]
    for row, following in pairwise(rows):
        assert (row.ended_seq, row.ended_ns, row.next_phase) == (
            following.seq,
            following.began_ns,
            following.phase,
        )
    assert rows[-1].next_phase == "cancelled"
    assert [row.gave_row_back for row in rows] == [0, 0, 0, 1, 0, 0, 0, 1]
    (request,) = held.requests()
    assert (rows[0].began_ns, rows[-1].ended_ns) == (request.received_ns, request.ended_ns)
    held.close()


def test_a_phase_knows_who_else_is_there(tmp_path: Path) -> None:
    held = Held(tmp_path)
    held("start")
    for number in (1, 2, 3):
        held("receive", number)
    held("join", 1)
    held("decide", request_paused(2, "operator", had_row=False))
    held("receive", 4)
    counts = [
        (row.num_waiting, row.num_rows, row.num_held)
        for number in (1, 2, 3, 4)
        for row in phases_of(held, number)[-1:]
    ]
    assert counts == [(2, 0, 0), (1, 1, 0), (2, 0, 0), (1, 1, 1)]
    held.close()


def test_a_start_ends_what_was_in_the_engine_and_nothing_else(tmp_path: Path) -> None:
    held = decoding(tmp_path)
    held("receive", 2)
    held.kill()
    held("start")
    assert [row.phase for row in phases_of(held, 1)][2:] == ["decoding", "waiting"]
    (waiting,) = phases_of(held, 2)
    assert (waiting.phase, waiting.ended_seq) == ("waiting", None)
    assert phases_of(held, 1)[-1].num_waiting == 1
    held.close()


def test_phases_are_the_same_after_a_compaction(tmp_path: Path) -> None:
    held = decoding(tmp_path)
    hold(held)
    held("plan_blocks", 1, [A, B, C])
    before = phases_of(held, 1)
    held.compact()
    assert phases_of(held, 1) == before
    assert writes_of(held) == []
    held("save", C, 7)
    (write,) = writes_of(held)
    assert (write.number, write.reason, write.saved_bytes) == (1, "serving", 7)
    held("resume", 1, 0, 40)
    assert [row.phase for row in phases_of(held, 1)[-2:]] == ["resuming", "prefilling"]
    held.close()


def test_files_are_written_for_a_request_and_a_reason(tmp_path: Path) -> None:
    held = decoding(tmp_path)
    held("begin_pause", 1)
    held("plan_blocks", 1, [A, B, C])
    failed = BlockSaveFailed(hash=C, part="block", reason="disk_full", detail="")
    held("know", failed)
    held("end_pause", 1, [A, B])
    written = [(row.part, row.reason, row.outcome, row.saved_bytes) for row in writes_of(held)]
    assert written == [
        ("block", "serving", "saved", 100),
        ("block", "serving", "saved", 100),
        ("block", "high", "disk_full", 0),
        ("tail", "high", "saved", TAIL_BYTES),
    ]
    assert {row.number for row in writes_of(held)} == {1}
    held.close()


def test_a_tail_that_is_not_saved_is_an_attempt(tmp_path: Path) -> None:
    held = decoding(tmp_path)
    held("begin_pause", 1, "operator")
    lost = ChainSaveFailed(request_id=request_id(1), number=1, reason="io_error", detail="")
    held("know", lost)
    row = writes_of(held)[-1]
    assert (row.part, row.reason, row.outcome, row.duration_ns) == (
        *("tail", "operator", "io_error"),
        None,
    )
    held.close()


def test_what_a_run_left_under_way_is_nobodys(tmp_path: Path) -> None:
    held = decoding(tmp_path)
    held("plan_blocks", 1, [C])
    held.kill()
    held("start")
    assert run_sql(held.file.journal, "SELECT count(*) FROM disk_plan").scalar() == 0
    held("save", C)
    assert (writes_of(held)[-1].number, writes_of(held)[-1].reason) == (0, "unknown")
    held.close()


@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        ("UPDATE phase SET num_rows = 7 WHERE phase = 'waiting'", "num_rows is 7, rebuilt 0"),
        ("UPDATE phase SET num_rows = 7 WHERE ended_seq IS NULL", "num_rows is 7, rebuilt 0"),
        ("DELETE FROM phase WHERE phase = 'decoding'", "phase: rows after which nothing follows"),
        ("UPDATE phase SET number = 9", "phase: rows of requests that were never received: 3"),
        ("UPDATE disk_write SET saved_bytes = 7", "saved_bytes is 7, rebuilt 100"),
        ("UPDATE disk_write SET seq = seq + 99", "disk_write: rows of no event: 2"),
        ("UPDATE disk_plan SET number = 7", "number is 7, rebuilt 1"),
    ],
)
def test_verify_compares_phases_and_writes(tmp_path: Path, statement: str, finding: str) -> None:
    held = decoding(tmp_path)
    held("plan_blocks", 1, [C])
    run_sql(held.file.journal, statement)
    assert finding in "\n".join(held.file.journal.verify())
    held.file.journal.close()


@pytest.fixture
def waited(tmp_path: Path) -> JournalReader:
    """Request 2 waits for the block of 1, then for room; 1 is held, goes on before 2, and ends."""
    steps = HoldingSteps(Journal.open(tmp_path))
    steps.start()
    steps.receive(1, range(39))
    steps.join(1)
    steps.receive(2)
    put_off: Decision = RequestDeferred(
        request_id=request_id(2), number=2, hash=A, computed_by=1, until_ns=0
    )
    steps.decide(put_off)
    steps.begin_pause(1)
    steps.end_pause(1, [])
    steps.resume(1, 0, 40)
    steps.join_again(1)
    steps.decide(pause_started(1), request_paused(1), resume_started(1, 0))
    steps.decide(cancelled(1))
    steps.join(2)
    steps.journal.close()
    return JournalReader.open(tmp_path)


def test_a_wait_names_who_gave_room_and_who_went_first(waited: JournalReader) -> None:
    rows = list(audit.waits(waited))
    assert [(row.number, row.phase) for row in rows] == [
        *((1, "waiting"), (2, "waiting"), (1, "paused"), (1, "paused"))
    ]
    first, second = rows[:2]
    assert (first.block_of_id, first.room_from_id, first.held_first_id) == (None, None, None)
    assert (second.num_rows, second.num_deferrals, second.block_of_id) == (1, 1, request_id(1))
    assert (second.room_from_id, second.room_from_phase) == (request_id(1), "cancelled")
    assert (second.held_first_id, second.next_phase) == (request_id(1), "prefilling")
    assert second.wait_ms is not None
    assert all(row.room_from_id != row.request_id for row in rows)


def test_the_phases_of_a_request_add_up_to_its_time(waited: JournalReader) -> None:
    times = [row.phase_ms for row in audit.phases(waited) if row.number == 1]
    request = next(audit.requests(waited))
    assert sum(time for time in times if time is not None) == request.total_ms


def test_sums_over_all_times_are_those_of_the_views(tmp_path: Path) -> None:
    held = decoding(tmp_path)
    held("receive", 2)
    held("join", 2)
    held("finish", 2, [7], 1)
    held.close()
    queries = {
        "cache_hits": sums.cache_hits,
        "first_tokens": sums.first_tokens,
        "miss_causes": sums.miss_causes,
    }
    with JournalReader.open(tmp_path) as reader:
        for view, rows in queries.items():
            with reader.transaction() as run:
                expected = [tuple(row) for row in run(f"SELECT * FROM {view}").fetchall()]
            found = [
                tuple(getattr(row, name) for name in row.__struct_fields__) for row in rows(reader)
            ]
            assert found == expected != []
            assert rows(reader, Span(0, START_NS)) == []
        (write,) = sums.request_writes(reader)
        assert (write.num_files, write.written_bytes, write.part) == (2, 200, "block")
        assert list(sums.request_writes(reader, Span(0, START_NS))) == []
