"""A journal of an earlier schema is upgraded: it stays sound, and new columns are filled from its
events.
"""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from alembic import command
from alembic.config import Config

import migrations
from journal import audit
from journal.database import make_engine
from journal.files import make_private
from journal.journal import Journal
from journal.migration import fold_again
from journal.reader import JournalReader
from tests.client_steps import adopts, arrival, attached, gone, started
from tests.journal_steps import Steps, request_id, run_of, run_sql
from tests.pause_steps import HoldingSteps, decoding, hold, sample

RENAMED = {"0001": {"num_prefilled_tokens": "num_fed_tokens"}}
"""What a column is called now, by the revision that called it otherwise."""

COPIED = ("events", "step_tokens", "token_ids", "request_parameters", "minute", "run", "request")


def make_old(file: Path, revision: str) -> None:
    """An empty journal of an earlier schema."""
    make_private(file)
    engine = make_engine(file, "rw")
    with engine.connect() as connection:
        config = Config()
        config.set_main_option("script_location", migrations.__path__[0])
        config.attributes["connection"] = connection
        connection.exec_driver_sql("BEGIN")
        command.upgrade(config, revision)
        connection.exec_driver_sql("COMMIT")
    engine.dispose()


def downgraded(new: Path, old: Path, revision: str) -> None:
    """Puts what a journal holds into one of an earlier schema."""
    make_old(old, revision)
    with closing(sqlite3.connect(old)) as connection:
        connection.execute("ATTACH ? AS new", (str(new),))
        columns: dict[str, dict[str, str]] = {}
        for table in (*COPIED, *(("block",) if revision > "0001" else ()), *held_tables(revision)):
            info = connection.execute(f"PRAGMA main.table_info({table})")
            names: list[str] = [row[1] for row in info]
            renamed = RENAMED.get(revision, {}) if table == "request" else {}
            columns[table] = {name: renamed.get(name, name) for name in names}
            connection.execute(
                f"INSERT INTO {table} ({', '.join(names)})"
                f" SELECT {', '.join(columns[table].values())} FROM new.{table}"
            )
        for seq, body in connection.execute("SELECT seq, body FROM new.carried_rows").fetchall():
            base = json.loads(body)
            rows = base["rows"]
            del rows["phases"], rows["plans"]
            if revision < "0005":
                del rows["orphans"]
            if not held_tables(revision):
                del rows["pauses"], rows["pins"]
            if revision == "0001":
                del base["blocks"]
            rows["requests"] = [as_before(row, columns["request"]) for row in rows["requests"]]
            rows["run"] = as_before(rows["run"], columns["run"])
            rows["minute"] = as_before(rows["minute"], columns["minute"])
            connection.execute("INSERT INTO carried_rows VALUES (?, ?)", (seq, json.dumps(base)))
        connection.commit()


def held_tables(revision: str) -> tuple[str, ...]:
    """The tables of held requests, if the schema has them."""
    tables = ("pause", "pin", "memory_sample") if revision > "0002" else ()
    return (*tables, "orphan", "adoption") if revision > "0004" else tables


def as_before(row: dict[str, object], columns: dict[str, str]) -> dict[str, object]:
    """A row with the columns that it had."""
    return {old: row[new] for old, new in columns.items()}


@pytest.fixture(params=["whole", "compacted"])
def kind(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(params=["0001", "0002", "0003", "0004", "0005"])
def old(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> Path:
    """A journal of an earlier schema: one request has finished, one decodes, one waits."""
    journal = Journal.open(tmp_path / "new")
    steps = Steps(journal)
    steps.start()
    steps.receive(1)
    steps.receive(2)
    steps.join(1, 2)
    steps.decode({1: [11], 2: [21]})
    through_seq = steps.finish(1, [12], 2)[-1].seq
    steps.receive(3)
    if kind == "compacted":
        journal.begin_compaction(through_seq, 1, {})
        while not journal.advance_compaction():
            pass
    journal.close()
    file = tmp_path / "old.db"
    downgraded(tmp_path / "new" / "journal.db", file, request.param)
    return file


def test_an_old_journal_is_upgraded_and_sound(old: Path) -> None:
    journal = Journal.open(old)
    assert journal.verify() == []
    assert run_sql(journal, "SELECT count(*) FROM block").scalar() == 0
    journal.close()
    with JournalReader.open(old) as reader:
        ended, running, waiting = audit.requests(reader)
    assert (ended.num_prompt_tokens, ended.num_prefilled_tokens) == (3, 3)
    assert (ended.parted_because, ended.num_memory_tokens) == ("off", 0)
    assert (running.request_id, running.phase) == (request_id(2), "decoding")
    assert (waiting.num_prefilled_tokens, waiting.parted_because) == (0, None)
    assert (running.num_pauses, running.held_ms) == (0, 0)
    assert (running.num_orphaned, running.orphaned_by, running.has_key) == (0, None, 0)


def test_an_upgraded_journal_goes_on(old: Path) -> None:
    journal = Journal.open(old)
    steps = Steps(journal)
    steps.to_prefill = {2: 3, 3: 2}
    steps.start()
    steps.join(2, 3)
    steps.decode({2: [22], 3: [31]})
    steps.finish(2, [23], 3)
    assert journal.verify() == []
    journal.close()


@pytest.mark.parametrize("revision", ["0003", "0004"])
def test_clients_that_were_lost_before_the_upgrade_are_missed_after_it(
    tmp_path: Path, kind: str, revision: str
) -> None:
    """The events may be older than the tables that are folded from them."""
    journal = Journal.open(tmp_path / "new")
    steps = HoldingSteps(journal)
    steps.know(started())
    steps.receive(1)
    steps.receive(2)
    through_seq = steps.receive(3)[-1].seq
    steps.know(gone(1), gone(2))
    steps.commit([arrival(4)], adopts(4, 2))
    if kind == "compacted":
        journal.begin_compaction(through_seq, 1, {})
        while not journal.advance_compaction():
            pass
    journal.close()
    file = tmp_path / "old.db"
    downgraded(tmp_path / "new" / "journal.db", file, revision)
    upgraded = HoldingSteps(Journal.open(file))
    assert upgraded.journal.verify() == []
    upgraded.know(started(), attached(1))
    assert upgraded.journal.verify() == []
    upgraded.journal.close()
    with JournalReader.open(file) as reader:
        assert [(row.number, row.outcome) for row in audit.orphans(reader)] == [
            (1, "attached"),
            (2, "adopted"),
            (2, "open"),
            (3, "open"),
        ]
        assert [row.adopter_id for row in audit.adoptions(reader)] == [request_id(4)]
        joined = list(audit.requests(reader))[3]
        assert (joined.outcome, joined.joined_id) == ("joined", request_id(2))


def test_what_was_carried_is_folded_again(tmp_path: Path) -> None:
    """As a later schema will do it: nothing of a held request is lost."""
    held = decoding(tmp_path)
    hold(held)
    held.compact()
    held("know", sample())
    for statement in (
        "DELETE FROM pin",
        "DELETE FROM block",
        "DELETE FROM memory_sample",
        "UPDATE minute SET num_pauses = 0",
    ):
        run_sql(held.file.journal, statement)
    fold_again(run_of(held.file.journal))
    assert held.file.journal.verify() == []
    held.close()
