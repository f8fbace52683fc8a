"""The views of who was without a client, who adopted what, and who joined an earlier request."""

from datetime import datetime
from pathlib import Path

import msgspec
import pytest

from journal import audit, sums
from journal.audit import Adoption, Orphan, RequestFigures
from journal.events import DrainEnded, RequestQueued, ServerStopping
from journal.journal import Journal
from journal.reader import JournalReader
from journal.tokens import SideRows, pack_ids
from tests.client_steps import GRACE_NS, adopts, arrival, attached, gone, started
from tests.journal_steps import KV_DOMAIN, SECOND_NS, request_id, run_sql
from tests.pause_steps import HoldingSteps, cancelled


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    """Request 1 loses its client twice: it comes back, then request 5 adopts 1, which finishes.
    Request 2 finishes alone and is adopted by 6. Request 3 has a key, which 7 and 8 bring again,
    and has no client now. Request 4 is given up.
    """
    journal = Journal.open(tmp_path)
    steps = HoldingSteps(journal)
    steps.know(started())
    steps.ready(KV_DOMAIN)
    steps.receive(1)
    steps.receive(2)
    keyed = msgspec.structs.replace(arrival(3, "key"), client_request_id="mine")
    side = SideRows([(request_id(3), pack_ids([1]))], [(request_id(3), b"{}")])
    queued = RequestQueued(request_id=request_id(3), max_tokens=100, num_waiting=1)
    steps.commit([keyed], [queued], side)
    steps.receive(4)
    steps.join(1, 2, 4)
    steps.know(gone(1))
    steps.decode({4: [7, 8]})
    steps.know(attached(1))
    steps.know(gone(1), gone(2), gone(4))
    steps.commit([arrival(5)], adopts(5, 1))
    steps.finish(1, [11], 1)
    steps.finish(2, [12], 1)
    again = msgspec.structs.replace(arrival(6), client_request_id="mine again")
    steps.commit([again], adopts(6, 2, orphaned_ns=1_500_000))
    steps.commit([arrival(7, "key")], adopts(7, 3, "key", None, 0))
    steps.know(gone(3))
    steps.commit([arrival(8, "key")], adopts(8, 3, "key"))
    steps.decide(cancelled(4))
    steps.know(gone(3))
    journal.close()
    return journal


@pytest.fixture
def reader(journal: Journal) -> JournalReader:
    return JournalReader.open(journal.file)


def orphans(reader: JournalReader, number: int) -> list[Orphan]:
    return [row for row in audit.orphans(reader) if row.number == number]


def request_of(reader: JournalReader, number: int) -> RequestFigures:
    return list(audit.requests(reader))[number - 1]


def test_each_loss_with_what_came_of_it(reader: JournalReader) -> None:
    back, adopted = orphans(reader, 1)
    assert (back.outcome, back.orphaned_ms, back.adopter_id) == ("attached", 2_000, None)
    assert (adopted.outcome, adopted.orphaned_ms) == ("adopted", 1_000)
    assert (adopted.adopter_id, adopted.phase) == (request_id(5), "finished")
    assert (adopted.reason, adopted.from_phase) == (None, "decoding"), "it ended with a client"


def test_one_that_finished_alone_and_was_adopted_then(reader: JournalReader) -> None:
    (row,) = orphans(reader, 2)
    assert (row.outcome, row.reason, row.adopter_id) == ("finished", "length", request_id(6))


def test_one_that_nobody_came_for(reader: JournalReader) -> None:
    (row,) = orphans(reader, 4)
    assert (row.outcome, row.reason, row.adopter_id) == ("cancelled", "deadline", None)
    until = datetime.fromisoformat(str(row.until_at)).timestamp()
    assert until - datetime.fromisoformat(row.orphaned_at).timestamp() == GRACE_NS / SECOND_NS
    assert (row.has_key, row.needs_client, row.orphaned_by) == (0, 1, "client_gone")


def test_one_that_has_no_client_now(reader: JournalReader) -> None:
    before, now = orphans(reader, 3)
    assert (before.adopter_id, before.client_request_id) == (request_id(8), "mine"), "not 7"
    assert (now.outcome, now.ended_at, now.orphaned_ms) == ("open", None, None)
    assert (now.until_at, now.has_key, now.needs_client) == (None, 1, 0)
    request = request_of(reader, 3)
    assert (request.orphaned_by, request.orphaned_at) == ("client_gone", now.orphaned_at)


def test_who_adopted_what(reader: JournalReader) -> None:
    open_one, finished, first, second = audit.adoptions(reader)
    assert (open_one.number, open_one.adopter_number, open_one.phase) == (1, 5, "decoding")
    assert named(finished) == (request_id(2), None, request_id(6), "mine again")
    assert (finished.phase, finished.orphaned_ms, finished.joined_by) == ("finished", 1, "content")
    assert named(first) == (request_id(3), "mine", request_id(7), None)
    assert (first.joined_by, first.orphaned_by, second.orphaned_by) == ("key", None, "client_gone")


def named(row: Adoption) -> tuple[str | None, ...]:
    return (
        row.request_id,
        row.client_request_id,
        row.adopter_id,
        row.adopter_client_request_id,
    )


def test_requests_say_how_they_were_without_a_client(reader: JournalReader) -> None:
    first, third = request_of(reader, 1), request_of(reader, 3)
    assert (first.num_orphaned, first.orphaned_ms, first.num_adoptions) == (2, 3_000, 1)
    assert (first.orphaned_by, first.orphaned_at, first.has_key) == (None, None, 0)
    assert (third.num_orphaned, third.num_adoptions, third.has_key) == (2, 2, 1)


def test_requests_that_joined_another(reader: JournalReader) -> None:
    fifth, seventh = request_of(reader, 5), request_of(reader, 7)
    assert (fifth.outcome, fifth.joined_id, fifth.joined_by) == ("joined", request_id(1), "content")
    assert (seventh.joined_id, seventh.joined_by, seventh.has_key) == (request_id(3), "key", 1)
    assert (request_of(reader, 1).joined_id, request_of(reader, 1).joined_by) == (None, None)


def test_who_joined_is_counted_apart(reader: JournalReader) -> None:
    minutes = list(audit.throughput(reader))
    assert sum(minute.num_received for minute in minutes) == 8
    assert sum(minute.num_joined for minute in minutes) == 4
    assert sum(minute.num_rejected for minute in minutes) == 0
    assert sum(minute.num_finished for minute in minutes) == 2


def test_who_joined_has_no_prompt_of_its_own(reader: JournalReader) -> None:
    (hour,) = sums.cache_hits(reader)
    assert (hour.num_requests, hour.num_prompt_tokens) == (2, 6)
    assert [row.number for row in audit.cache_misses(reader)] == [1, 2, 4]
    assert list(audit.rejections(reader)) == []


def test_those_that_a_start_has_found_are_told_apart_between_batches(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = HoldingSteps(Journal.open(tmp_path))
    steps.know(started())
    for number in (1, 2, 3):
        steps.receive(number)
    steps.know(started())
    steps.journal.close()
    monkeypatch.setattr(audit, "BATCH_ROWS", 2)
    with JournalReader.open(tmp_path) as reader:
        rows = list(audit.orphans(reader))
    assert [row.number for row in rows] == [1, 2, 3]
    assert len({row.lost_seq for row in rows}) == 1


def test_a_stop_that_held_its_rows_says_when(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    HoldingSteps(journal).know(started(), ServerStopping(reason="SIGTERM"), DrainEnded())
    journal.close()
    with JournalReader.open(tmp_path) as reader:
        (run,) = audit.runs(reader)
    assert run.drained_at == run.ended_at


def test_looking_for_the_client_of_each_request_walks_no_table(journal: Journal) -> None:
    again = Journal.open(journal.file)
    for view in ("requests", "orphans", "adoptions"):
        plan = run_sql(again, f"EXPLAIN QUERY PLAN SELECT * FROM {view}").fetchall()
        assert sum(row[-1].startswith("SCAN") for row in plan) == 1, plan
    again.close()
