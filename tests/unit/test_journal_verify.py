"""`verify` finds each way in which a journal can break its promises."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from journal import definitions
from journal.journal import Journal
from tests.journal_steps import SECOND_NS, Steps, run_of, run_sql


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """One request has ended, one decodes, one waits."""
    journal = Journal.open(tmp_path)
    steps = Steps(journal)
    steps.start()
    steps.receive(1)
    steps.receive(2)
    steps.receive(3)
    steps.join(1, 2)
    steps.decode({1: [11], 2: [21]})
    steps.finish(1, [12], 2)
    steps.decode({2: [22]})
    yield journal
    journal.close()


def test_a_sound_journal_has_no_findings(journal: Journal) -> None:
    assert journal.verify() == []


@pytest.mark.parametrize(
    ("statements", "finding"),
    [
        (
            ["DROP VIEW held_times", "CREATE VIEW held_times AS SELECT 7 AS num_pauses"],
            "view held_times is not that of schema",
        ),
        (["DROP VIEW waits"], "view waits is missing"),
        (
            [
                "DROP TRIGGER events_never_go",
                "CREATE TRIGGER events_never_go BEFORE DELETE ON events BEGIN SELECT 1; END",
            ],
            "trigger events_never_go is not that of schema",
        ),
        (
            [
                "CREATE TRIGGER mine AFTER INSERT ON events BEGIN DELETE FROM minute; END",
            ],
            "trigger mine is none of ours",
        ),
        (["DROP TRIGGER events_never_change"], "trigger events_never_change is missing"),
        (["DROP TRIGGER events_never_go"], "trigger events_never_go is missing"),
        (["DROP TRIGGER events_have_no_gap"], "trigger events_have_no_gap is missing"),
        (
            ["DROP TRIGGER events_never_go", "DELETE FROM events WHERE seq = 3"],
            "events: 1 are missing between seq 1 and",
        ),
        (
            ["DROP TRIGGER events_never_go", "DELETE FROM events WHERE seq < 3"],
            "begin with seq 3, and not with state_carried",
        ),
        (
            ["DROP TRIGGER events_never_change", "UPDATE events SET at_ns = 1 WHERE seq = 5"],
            "seq 5 goes back in step, run or time",
        ),
        (
            [
                "DROP TRIGGER events_never_change",
                "UPDATE events SET body = '{}' WHERE kind = 'tokens_decoded'",
            ],
            "tokens_decoded: Object missing required field",
        ),
        (["UPDATE request SET num_prompt_tokens = 9 WHERE number = 1"], "request 1: num_prompt"),
        (["UPDATE request SET num_retries = 9 WHERE number = 2"], "request 2: num_retries is 9"),
        (["UPDATE request SET ended_ns = 9 WHERE number = 3"], "request 3: ended_ns is 9"),
        (["DELETE FROM request WHERE number = 1"], "request: a row is missing"),
        (["UPDATE run SET blas = 'other'"], "run 1: blas is 'other'"),
        (["UPDATE minute SET num_decode_steps = 9"], "num_decode_steps is"),
        (["DELETE FROM step_tokens"], "token_ids: 0 of request 2, decoded 2"),
        (
            ["UPDATE token_ids SET ids = x'01000000' WHERE part = 'output'"],
            "token_ids: 1 of request 1, decoded 2",
        ),
        (["UPDATE alembic_version SET version_num = '0000'"], "schema: 0000"),
        (["INSERT INTO snapshots VALUES (999, 1, 'd', x'00')"], "snapshots: rows of no event: 1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_promise_is_found(journal: Journal, statements: list[str], finding: str) -> None:
    for statement in statements:
        run_sql(journal, statement)
    findings = journal.verify()
    assert any(finding in line for line in findings), findings


def test_the_definitions_are_those_of_the_migrations(journal: Journal) -> None:
    made = {kind: definitions.found(run_of(journal), kind) for kind in definitions.DIGESTS}
    assert made == definitions.DIGESTS


def test_a_view_of_somebodys_own_is_no_finding(journal: Journal) -> None:
    run_sql(journal, "CREATE VIEW mine AS SELECT count(*) AS n FROM requests")
    assert journal.verify() == []


def test_a_damaged_file_is_found(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    steps = Steps(journal)
    steps.start()
    for number in range(1, 60):
        steps.receive(number)
    journal.close()
    file = tmp_path / "journal.db"
    with file.open("r+b") as handle:
        # An entry of the index over request ids: the table says otherwise.
        content = handle.read()
        handle.seek(content.rindex(b"req_00000000000000000000000030"))
        handle.write(b"req_x")
    journal = Journal.open(file)
    assert any(line.startswith("file: ") for line in journal.verify())
    journal.close()


def test_a_purged_journal_is_sound(journal: Journal) -> None:
    assert journal.purge(journal.last_at_ns + 10 * SECOND_NS, 0) == 1
    assert journal.verify() == []
