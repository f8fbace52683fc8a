"""Requests without a client in the journal: rows of `orphan` and `adoption`, and what they add to
rows of `request`. After each step the file, its twin and a rebuild are compared.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from journal.events import DrainEnded, OrphanLimits, RequestQueued, RequestRejected, ServerStopping
from journal.journal import Journal
from journal.rows import OrphanRow, RequestRow
from tests.client_steps import (
    GRACE_NS,
    RESTART_GRACE_NS,
    OnRestart,
    adopts,
    arrival,
    attached,
    gone,
    orphan_limits,
    released,
    started,
)
from tests.journal_steps import KV_DOMAIN, SECOND_NS, request_id, run_sql
from tests.pause_steps import PROMPT, Held, HoldingSteps, at, cancelled


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    """After step 5 request 1 decodes, request 2 waits, and 3 waits with a key."""
    held = begun(tmp_path)
    yield held
    held.close()


def begun(folder: Path, limits: OrphanLimits | None = None) -> Held:
    held = Held(folder)
    held("commit", [started(limits or orphan_limits())])
    held("ready", KV_DOMAIN)
    held("receive", 1)
    held("receive", 2)
    held("commit", [arrival(3, "key")], [queued(3)])
    held("join", 1)
    return held


def queued(number: int) -> RequestQueued:
    return RequestQueued(request_id=request_id(number), max_tokens=100, num_waiting=1)


def restart(held: Held, limits: OrphanLimits | None) -> None:
    """The process is killed, and another one begins."""
    held.kill()
    held("commit", [started(limits)])


def orphan_of(held: Held, number: int) -> OrphanRow:
    """Its newest time without a client."""
    return [row for row in held.orphans() if row.number == number][-1]


def request_of(held: Held, number: int) -> RequestRow:
    return held.requests()[number - 1]


def losses(held: Held, number: int) -> tuple[int, int]:
    row = request_of(held, number)
    return row.num_orphaned, row.orphaned_ns


# Lost and found


def test_a_lost_client_is_waited_for(held: Held) -> None:
    held("know", gone(1))
    row = orphan_of(held, 1)
    assert (row.request_id, row.run_id, row.orphaned_by) == (request_id(1), 1, "client_gone")
    assert (row.from_phase, row.outcome, row.needs_client) == ("decoding", "open", 1)
    assert (row.lost_ns, row.until_ns, row.ended_ns) == (at(7), at(7) + GRACE_NS, None)
    assert losses(held, 1) == (1, 0), "a time that is not over does not count"


def test_a_client_that_comes_back_ends_it(held: Held) -> None:
    held("know", gone(1))
    held("decode", {1: [7]})
    held("know", attached(1))
    row = orphan_of(held, 1)
    assert (row.outcome, row.ended_ns, row.until_ns) == ("attached", at(9), at(7) + GRACE_NS)
    assert losses(held, 1) == (1, 2 * SECOND_NS)


def test_each_loss_is_a_row(held: Held) -> None:
    for fact in (gone(1), attached(1), gone(1), attached(1)):
        held("know", fact)
    assert [(row.lost_ns, row.ended_ns) for row in held.orphans()] == [
        (at(7), at(8)),
        (at(9), at(10)),
    ]
    assert losses(held, 1) == (2, 2 * SECOND_NS)


def test_what_is_lost_already_is_lost_once_and_what_was_not_lost_is_not_found(held: Held) -> None:
    held("know", attached(2))
    assert held.orphans() == []
    held("know", gone(1))
    held("know", gone(1))
    assert [row.lost_ns for row in held.orphans()] == [at(8)]


def test_a_request_with_a_key_runs_on_and_is_waited_for_without_limit(held: Held) -> None:
    held("know", gone(3))
    row = orphan_of(held, 3)
    assert (row.needs_client, row.until_ns, row.outcome) == (0, None, "open")
    assert [each.has_key for each in held.requests()] == [0, 0, 1]


def test_without_a_time_of_grace_only_those_with_a_key_are_orphans(tmp_path: Path) -> None:
    held = begun(tmp_path, orphan_limits(grace_ns=0))
    held("know", gone(1), gone(3))
    assert [row.number for row in held.orphans()] == [3]
    held.close()


def test_a_run_that_does_not_look_after_clients_has_no_orphans(tmp_path: Path) -> None:
    held = Held(tmp_path)
    held("start")
    held("receive", 1)
    held("know", gone(1))
    restart(held, None)
    assert (held.orphans(), losses(held, 1)) == ([], (0, 0))
    held.close()


def test_a_release_lets_it_go_on_for_as_long_as_after_a_restart(held: Held) -> None:
    held("know", gone(2))
    held("know", released(2))
    row = orphan_of(held, 2)
    assert (row.outcome, row.needs_client, row.until_ns) == ("open", 0, at(8) + RESTART_GRACE_NS)
    held("know", released(2))
    assert orphan_of(held, 2) == row, "it goes on already"


def test_one_that_has_a_key_is_released_for_as_long_as_it_takes(held: Held) -> None:
    restart(held, orphan_limits("hold"))
    row = orphan_of(held, 3)
    assert (row.needs_client, row.until_ns) == (1, at(7) + RESTART_GRACE_NS)
    held("know", released(3))
    row = orphan_of(held, 3)
    assert (row.needs_client, row.until_ns) == (0, None)


# Another run


def test_a_start_finds_everybody_without_a_client(held: Held) -> None:
    restart(held, orphan_limits())
    rows = held.orphans()
    assert [row.number for row in rows] == [1, 2, 3]
    assert {(row.lost_seq, row.run_id, row.orphaned_by) for row in rows} == {
        (rows[0].lost_seq, 2, "restart")
    }
    assert [row.from_phase for row in rows] == ["decoding", "waiting", "waiting"]
    until_ns = at(7) + RESTART_GRACE_NS
    assert [row.until_ns for row in rows] == [until_ns, until_ns, None]


@pytest.mark.parametrize(
    ("on_restart", "needs_client", "grace_ns", "until_ns"),
    [
        ("resume", 0, RESTART_GRACE_NS, None),
        ("hold", 1, RESTART_GRACE_NS, at(7) + RESTART_GRACE_NS),
        ("cancel", 1, 0, at(7)),
    ],
)
def test_a_start_does_with_them_as_the_settings_say(
    held: Held, on_restart: OnRestart, needs_client: int, grace_ns: int, until_ns: int | None
) -> None:
    restart(held, orphan_limits(on_restart))
    assert [row.needs_client for row in held.orphans()] == [needs_client] * 3
    assert orphan_of(held, 2).until_ns == at(7) + grace_ns
    assert orphan_of(held, 3).until_ns == until_ns, "the one that has a key"


@pytest.mark.parametrize("on_restart", ["resume", "hold", "cancel"])
def test_one_that_was_held_for_its_client_stays_so_and_its_time_begins_anew(
    held: Held, on_restart: OnRestart
) -> None:
    held("know", gone(1))
    restart(held, orphan_limits(on_restart))
    row = orphan_of(held, 1)
    assert (row.lost_ns, row.orphaned_by, row.run_id) == (at(7), "client_gone", 1)
    assert (row.needs_client, row.until_ns) == (1, at(8) + GRACE_NS)
    assert losses(held, 1) == (1, 0), "it has lost one client"


def test_one_that_has_a_key_is_given_the_time_of_starts(held: Held) -> None:
    held("know", gone(3))
    restart(held, orphan_limits("hold"))
    row = orphan_of(held, 3)
    assert (row.orphaned_by, row.needs_client) == ("client_gone", 1)
    assert row.until_ns == at(8) + RESTART_GRACE_NS
    restart(held, orphan_limits())
    row = orphan_of(held, 3)
    assert (row.orphaned_by, row.needs_client, row.until_ns) == ("client_gone", 0, None)


def test_one_that_was_released_is_found_by_the_next_start(held: Held) -> None:
    held("know", gone(1))
    held("know", released(1))
    restart(held, orphan_limits())
    row = orphan_of(held, 1)
    assert (row.needs_client, row.until_ns) == (0, at(9) + RESTART_GRACE_NS)


def test_a_later_start_gives_more_time(held: Held) -> None:
    restart(held, orphan_limits())
    restart(held, orphan_limits())
    assert [row.until_ns for row in held.orphans()][:2] == [at(8) + RESTART_GRACE_NS] * 2


def test_a_start_that_does_not_look_after_clients_ends_it(held: Held) -> None:
    held("know", gone(1))
    restart(held, None)
    assert orphan_of(held, 1).outcome == "unwatched"
    assert losses(held, 1) == (1, SECOND_NS)


def test_the_end_of_a_drain_is_in_the_row_of_its_run(held: Held) -> None:
    held("know", ServerStopping(reason="SIGTERM"))
    held("know", DrainEnded())
    (run,) = run_sql(held.file.journal, "SELECT ended_ns, drained_ns FROM run").fetchall()
    assert tuple(run) == (at(7), at(8))


# Adopted


def test_an_open_request_is_adopted(held: Held) -> None:
    held("know", gone(1))
    held("commit", [arrival(4)], adopts(4, 1))
    (adoption,) = held.adoptions()
    assert (adoption.at_ns, adoption.run_id, adoption.number) == (at(8), 1, 1)
    assert (adoption.adopter_number, adoption.adopter_id) == (4, request_id(4))
    assert (adoption.joined_by, adoption.phase) == ("content", "decoding")
    assert (adoption.orphaned_by, adoption.orphaned_ns) == ("client_gone", 5 * SECOND_NS)
    assert (orphan_of(held, 1).outcome, losses(held, 1)) == ("adopted", (1, SECOND_NS))


def test_an_arrival_that_joined_has_ended_and_is_no_other_end(held: Held) -> None:
    held("know", gone(1))
    held("commit", [arrival(4)], adopts(4, 1))
    row = request_of(held, 4)
    assert (row.phase, row.outcome, row.reason) == ("joined", "joined", "content")
    assert (row.joined_id, row.ended_ns, row.num_output_tokens) == (request_id(1), at(8), 0)
    minute = held.minute()
    assert (minute.num_received, minute.num_joined) == (4, 1)
    assert (minute.num_rejected, minute.num_finished, minute.num_cancelled) == (0, 0, 0)


def test_a_finished_request_is_adopted_and_stays_as_it_ended(held: Held) -> None:
    held("know", gone(1))
    held("finish", 1, [11], 1)
    before = request_of(held, 1), orphan_of(held, 1)
    assert before[1].outcome == "finished"
    held("commit", [arrival(4)], adopts(4, 1))
    assert (request_of(held, 1), orphan_of(held, 1)) == before
    assert held.adoptions()[0].phase == "finished"


def test_a_key_joins_many_also_while_there_is_a_client(held: Held) -> None:
    held("commit", [arrival(4, "key")], adopts(4, 3, "key", None, 0))
    held("know", gone(3))
    held("commit", [arrival(5, "key")], adopts(5, 3, "key"))
    assert [(row.adopter_number, row.orphaned_by) for row in held.adoptions()] == [
        (4, None),
        (5, "client_gone"),
    ]
    assert [row.outcome for row in held.orphans()] == ["adopted"]


# Other ends


def test_one_that_ends_without_a_client_says_how(held: Held) -> None:
    held("know", gone(1), gone(2))
    held("decode", {1: [7, 8]})
    held("decide", cancelled(1))
    row = orphan_of(held, 1)
    assert (row.outcome, row.ended_ns, orphan_of(held, 2).outcome) == ("cancelled", at(9), "open")
    assert losses(held, 1) == (1, 2 * SECOND_NS)
    held("know", attached(1))
    assert orphan_of(held, 1) == row, "it has ended"


def test_a_client_may_leave_before_its_request_is_judged(held: Held) -> None:
    refusal = RequestRejected(
        request_id=request_id(4), reason="key_reused", numbers=None, num_waiting=2
    )
    held("commit", [arrival(4, "key", "other"), gone(4)], [refusal])
    held("commit", [arrival(5, "key"), gone(5)], adopts(5, 3, "key", None, 0))
    assert [(row.number, row.outcome, row.orphaned_ns) for row in held.requests()[3:]] == [
        (4, "rejected", 0),
        (5, "joined", 0),
    ]
    assert [row.outcome for row in held.orphans()] == ["rejected", "joined"]


# What is kept


def test_who_is_without_a_client_outlives_a_compaction(held: Held) -> None:
    held("know", gone(1))
    held("commit", [arrival(4)], adopts(4, 1))
    held("know", gone(1))
    held.compact()
    held.check()
    assert len(held.adoptions()) == 1
    held("know", gone(2))
    assert orphan_of(held, 2).until_ns == at(10) + GRACE_NS, "the limits are known"
    held("know", attached(1))
    held.compact()
    held.check()
    assert [row.outcome for row in held.orphans()] == ["adopted", "attached", "open"]
    assert [row.owner_digest for row in held.requests()] == ["", "", "owner", "owner"]


def test_decode_steps_of_an_orphan_write_an_event_and_their_tokens(held: Held) -> None:
    held("know", gone(1))
    held("decode", {1: [1]})
    before = run_sql(held.file.journal, "SELECT total_changes()").scalar()
    for token in range(10):
        held.file.decode({1: [token]})
        held.twin.decode({1: [token]})
    assert run_sql(held.file.journal, "SELECT total_changes()").scalar() == before + 2 * 10


@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        ("UPDATE orphan SET until_ns = 1 WHERE outcome = 'open'", "until_ns is 1, rebuilt"),
        ("UPDATE orphan SET needs_client = 1 WHERE outcome <> 'open'", "needs_client is 1"),
        ("UPDATE orphan SET ended_ns = ended_ns + 1", "otherwise than orphan says: 1"),
        ("DELETE FROM orphan WHERE outcome = 'open'", "orphan: a row is missing"),
        ("DELETE FROM orphan WHERE outcome <> 'open'", "orphan: a row is missing"),
        ("INSERT INTO orphan VALUES (1, 9, 'r', 1, 'x', 'x', 'open', 1, 1, 1, NULL)", "too many"),
        ("UPDATE request SET num_orphaned = 5 WHERE number = 2", "otherwise than orphan says: 1"),
        ("UPDATE adoption SET phase = 'x'", "adoption 10: phase is 'x', rebuilt 'waiting'"),
        ("DELETE FROM adoption", "request: rows that joined another without an adoption: 1"),
        ("UPDATE request SET joined_id = NULL", "adoption: rows of requests that did not join: 1"),
        ("UPDATE request SET has_key = 1 - has_key", "has_key is 1, rebuilt 0"),
        ("UPDATE minute SET num_joined = 9", "num_joined is 9, rebuilt 1"),
        ("UPDATE run SET drained_ns = 1", "drained_ns is 1, rebuilt None"),
    ],
)
def test_verify_finds_what_is_wrong(tmp_path: Path, statement: str, finding: str) -> None:
    steps = HoldingSteps(Journal.open(tmp_path))
    steps.know(started())
    steps.receive(1, PROMPT)
    steps.commit([arrival(2, "key")], [queued(2)])
    steps.know(gone(1), gone(2))
    steps.commit([arrival(3, "key")], adopts(3, 2, "key"))
    assert steps.journal.verify() == []
    run_sql(steps.journal, statement)
    findings = steps.journal.verify()
    steps.journal.close()
    assert any(finding in line for line in findings), findings


def test_limits_of_an_earlier_release_have_no_word_of_clients(tmp_path: Path) -> None:
    steps = HoldingSteps(Journal.open(tmp_path))
    steps.start()
    steps.receive(1)
    limits = msgspec.json.decode(run_sql(steps.journal, "SELECT limits FROM run").scalar())
    del limits["orphans"]
    run_sql(steps.journal, "UPDATE run SET limits = ?", (msgspec.json.encode(limits).decode(),))
    steps.journal.close()
    journal = Journal.open(tmp_path)
    assert run_sql(journal, "SELECT count(*) FROM orphan").scalar() == 0
    journal.close()
