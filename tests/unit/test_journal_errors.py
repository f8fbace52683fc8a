"""What a failing disk does to the journal: nothing is half written, and errors say what to do."""

import os
import sqlite3
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from journal.errors import JournalBroken, JournalError, JournalFull
from journal.events import RequestQueued
from journal.journal import Journal
from journal.tokens import SideRows, pack_ids
from tests.failing_sqlite import SqliteFailures, failing_sqlite
from tests.journal_steps import Steps, received, request_id, run_sql

LARGE_PROMPT = range(200_000)


@pytest.fixture
def sqlite() -> Iterator[SqliteFailures]:
    with failing_sqlite() as failures:
        yield failures


def receive_large(steps: Steps[Journal], number: int) -> None:
    name = request_id(number)
    queued = RequestQueued(request_id=name, max_tokens=100, num_waiting=1)
    side = SideRows([(name, pack_ids(LARGE_PROMPT))], [(name, b"{}")])
    steps.commit([received(number, len(LARGE_PROMPT))], [queued], side)


def test_a_full_disk_heals_in_place(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    steps = Steps(journal)
    steps.start()
    steps.receive(1)
    steps.join(1)
    steps.decode({1: [11]})
    before = list(journal.read())
    allowed = run_sql(journal, "PRAGMA page_count").scalar_one() + 20
    run_sql(journal, f"PRAGMA max_page_count = {allowed}").close()
    with pytest.raises(JournalFull, match="no space left"):
        receive_large(steps, 2)
    assert list(journal.read()) == before
    assert journal.last_seq == before[-1].seq
    assert journal.output_tokens(request_id(1))[0].tolist() == [11]
    # Space comes back: the same commit is tried again, and what was open before goes on.
    run_sql(journal, "PRAGMA max_page_count = 1000000").close()
    receive_large(steps, 2)
    steps.decode({1: [12]})
    prompt = journal.prompt_tokens(request_id(2))
    assert prompt is not None
    assert len(prompt) == len(LARGE_PROMPT)
    assert journal.output_tokens(request_id(1))[0].tolist() == [11, 12]
    assert journal.verify() == []
    journal.close()


@pytest.mark.parametrize("statement", ["INSERT INTO events", "INSERT INTO step_tokens", "COMMIT"])
def test_an_input_output_error_breaks_the_journal(
    tmp_path: Path, sqlite: SqliteFailures, statement: str
) -> None:
    journal = Journal.open(tmp_path)
    steps = Steps(journal)
    steps.start()
    steps.receive(1)
    steps.join(1)
    before = list(journal.read())
    sqlite.fail(statement, sqlite3.SQLITE_IOERR_FSYNC)
    with pytest.raises(JournalBroken, match="disk I/O error"):
        steps.decode({1: [11]})
    sqlite.heal()
    assert list(journal.read()) == before
    assert journal.output_tokens(request_id(1))[0].tolist() == []
    journal.close()


def test_a_full_disk_at_a_checkpoint_is_no_failure_of_the_commit(
    tmp_path: Path, sqlite: SqliteFailures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("journal.journal.CHECKPOINT_BYTES", 1)
    journal = Journal.open(tmp_path)
    steps = Steps(journal)
    sqlite.fail("PRAGMA wal_checkpoint", sqlite3.SQLITE_FULL)
    committed = steps.start()
    assert list(journal.read()) == committed
    journal.close()


def test_an_input_output_error_at_a_checkpoint_breaks_the_journal(
    tmp_path: Path, sqlite: SqliteFailures, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("journal.journal.CHECKPOINT_BYTES", 1)
    journal = Journal.open(tmp_path)
    sqlite.fail("PRAGMA wal_checkpoint", sqlite3.SQLITE_IOERR_FSYNC)
    with pytest.raises(JournalBroken, match="disk I/O error"):
        Steps(journal).start()
    journal.close()


def test_power_is_asked_for_before_the_transaction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(tmp_path)
    statements: list[str] = []

    def listen(statement: str, *values: Any) -> Any:
        statements.append(statement)
        return run_sql(journal, statement, *values)

    database = journal._database  # pyright: ignore[reportPrivateUsage]
    monkeypatch.setattr(database, "run", listen)
    steps = Steps(journal)
    steps.start()
    assert run_sql(journal, "PRAGMA synchronous").scalar() == 1
    steps.receive(1)
    steps.join(1)
    steps.finish(1, [11], 1)
    assert run_sql(journal, "PRAGMA synchronous").scalar() == 2
    assert statements == ["PRAGMA synchronous = FULL"]
    journal.close()


def test_every_commit_is_of_power_when_the_setting_says_so(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, durability="power")
    Steps(journal).start()
    assert run_sql(journal, "PRAGMA synchronous").scalar() == 2
    journal.close()


def test_files_are_private(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    journal = Journal.open(folder)
    Steps(journal).start()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    names = ("journal.db", "journal.db-shm", "journal.db-wal", "journal.lock")
    assert modes == dict.fromkeys(names, 0o600)
    journal.close()


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(JournalError, match=r"file/state: cannot be written \(Not a directory\)"):
        Journal.open(tmp_path / "file" / "state")


def test_deleted_content_is_overwritten(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    assert run_sql(journal, "PRAGMA secure_delete").scalar() == 1
    assert run_sql(journal, "PRAGMA wal_autocheckpoint").scalar() == 0
    journal.close()


def test_the_lock_goes_with_the_journal(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    assert (tmp_path / "journal.lock").read_text() == f"{os.getpid()}\n"
    journal.close()
    Journal.open(tmp_path).close()
