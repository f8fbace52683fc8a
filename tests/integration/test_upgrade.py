"""A journal of the schema before is upgraded: it stays sound, and new columns are filled from its
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
from journal.reader import JournalReader
from tests.journal_steps import Steps, request_id, run_sql

OLD_REQUEST = (
    "number, request_id, client_request_id, model_fingerprint, route, stream, phase, run_id,"
    " received_seq, received_ns, queued_ns, admitted_ns, prefill_started_ns, decode_started_ns,"
    " first_token_ns, ended_ns, ended_run_id, ended_seq, outcome, reason, detail,"
    " num_prompt_tokens, asked_max_tokens, max_tokens, num_cached_tokens, {}, num_output_tokens,"
    " prefill_duration_ns, reserved_bytes, num_waiting, required_bytes, capacity_bytes,"
    " max_context_tokens, num_admissions, num_retries, num_recoveries, num_deaths"
)


def make_old(file: Path) -> None:
    """An empty journal of the first schema."""
    make_private(file)
    engine = make_engine(file, "rw")
    with engine.connect() as connection:
        config = Config()
        config.set_main_option("script_location", migrations.__path__[0])
        config.attributes["connection"] = connection
        connection.exec_driver_sql("BEGIN")
        command.upgrade(config, "0001")
        connection.exec_driver_sql("COMMIT")
    engine.dispose()


def downgraded(new: Path, old: Path) -> None:
    """Puts what a journal holds into one of the first schema."""
    make_old(old)
    with closing(sqlite3.connect(old)) as connection:
        connection.execute("ATTACH ? AS new", (str(new),))
        for table in ("events", "step_tokens", "token_ids", "request_parameters", "minute"):
            connection.execute(f"INSERT INTO {table} SELECT * FROM new.{table}")
        columns = [row[1] for row in connection.execute("PRAGMA main.table_info(run)")]
        names = ", ".join(columns)
        connection.execute(f"INSERT INTO run SELECT {names} FROM new.run")
        connection.execute(
            f"INSERT INTO request ({OLD_REQUEST.format('num_prefilled_tokens')})"
            f" SELECT {OLD_REQUEST.format('num_fed_tokens')} FROM new.request"
        )
        for seq, body in connection.execute("SELECT seq, body FROM new.carried_rows").fetchall():
            base = json.loads(body)
            del base["blocks"], base["rows"]["run"]["kv_domain"]
            del base["rows"]["run"]["kv_block_tokens"]
            for row in base["rows"]["requests"]:
                row["num_prefilled_tokens"] = row.pop("num_fed_tokens")
                for name in NEW_COLUMNS:
                    del row[name]
            connection.execute("INSERT INTO carried_rows VALUES (?, ?)", (seq, json.dumps(base)))
        connection.commit()


NEW_COLUMNS = (
    "num_memory_tokens",
    "num_disk_tokens",
    "parted_because",
    "parted_at_tokens",
    "waited_ns",
)


@pytest.fixture(params=["whole", "compacted"])
def old(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A journal of the first schema: one request has finished, one decodes, one waits."""
    journal = Journal.open(tmp_path / "new")
    steps = Steps(journal)
    steps.start()
    steps.receive(1)
    steps.receive(2)
    steps.join(1, 2)
    steps.decode({1: [11], 2: [21]})
    through_seq = steps.finish(1, [12], 2)[-1].seq
    steps.receive(3)
    if request.param == "compacted":
        journal.begin_compaction(through_seq, 1, {})
        while not journal.advance_compaction():
            pass
    journal.close()
    file = tmp_path / "old.db"
    downgraded(tmp_path / "new" / "journal.db", file)
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
