"""A disk that fails while a journal is being shortened, closed or opened."""

import errno
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from journal.database import Database
from journal.errors import JournalBroken, JournalError, JournalFull
from journal.events import StateCarried
from journal.files import replacement_of
from journal.journal import Journal
from tests.failing_sqlite import SqliteFailures, failing_sqlite
from tests.journal_steps import Steps, run_sql

STATE: dict[str, object] = {"requests": {}, "seq": 0}
NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
BROKEN = OSError(errno.EIO, os.strerror(errno.EIO))
READ_ONLY = OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.fixture
def sqlite() -> Iterator[SqliteFailures]:
    with failing_sqlite() as failures:
        yield failures


def filled(folder: Path) -> Steps[Journal]:
    """A journal with two requests."""
    steps = Steps(Journal.open(folder))
    steps.start()
    steps.receive(1)
    steps.join(1)
    steps.decode({1: [11]})
    steps.finish(1, [12], 2)
    steps.receive(2)
    return steps


def shorten(journal: Journal) -> None:
    """The whole of it."""
    through = [record.seq for record in journal.read() if record.step == 3][-1]
    journal.begin_compaction(through, 1, STATE)
    while not journal.advance_compaction():
        pass


def raising(error: OSError) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


STATEMENTS = (
    "PRAGMA journal_mode = OFF",
    "ATTACH",
    "CREATE TABLE",
    "INSERT INTO events SELECT",
    "INSERT INTO carried_rows",
    "INSERT INTO request ",
    "CREATE VIEW",
    "PRAGMA journal_mode = DELETE",
)


@pytest.mark.parametrize("failing", STATEMENTS)
@pytest.mark.parametrize(
    ("code", "kind"),
    [(sqlite3.SQLITE_FULL, JournalFull), (sqlite3.SQLITE_IOERR_WRITE, JournalBroken)],
)
def test_a_statement_that_fails(
    tmp_path: Path, sqlite: SqliteFailures, failing: str, code: int, kind: type[JournalError]
) -> None:
    steps = filled(tmp_path)
    journal = steps.journal
    before = list(journal.read())
    sqlite.fail(failing, code)
    with pytest.raises(kind):
        shorten(journal)
    sqlite.heal()
    assert not replacement_of(journal.file).exists(), "it takes no space for nothing"
    before += steps.receive(3)
    assert list(journal.read()) == before
    assert run_sql(journal, "PRAGMA journal_mode").scalar() == "wal"
    shorten(journal)
    assert isinstance(next(journal.read()).event, StateCarried)
    assert journal.verify() == []
    journal.close()


@pytest.mark.parametrize("operation", ["create_private", "flush"])
@pytest.mark.parametrize(
    ("error", "kind"),
    [(NO_SPACE, JournalFull), (BROKEN, JournalBroken), (READ_ONLY, JournalBroken)],
)
def test_an_operation_that_fails(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    error: OSError,
    kind: type[JournalError],
) -> None:
    steps = filled(tmp_path)
    journal = steps.journal
    with monkeypatch.context() as context:
        context.setattr(f"journal.compaction.{operation}", raising(error))
        with pytest.raises(kind, match=str(error.strerror)):
            shorten(journal)
    assert not replacement_of(journal.file).exists()
    steps.receive(3)
    shorten(journal)
    assert journal.verify() == []
    journal.close()


def test_half_a_successor_makes_room_before_the_log_needs_some(
    tmp_path: Path, sqlite: SqliteFailures, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = filled(tmp_path)
    journal = steps.journal
    enter_wal = Database.enter_wal

    def entered(database: Database) -> None:
        assert not replacement_of(database.file).exists()
        enter_wal(database)

    monkeypatch.setattr(Database, "enter_wal", entered)
    sqlite.fail("INSERT INTO carried_rows", sqlite3.SQLITE_FULL)
    with pytest.raises(JournalFull):
        shorten(journal)
    journal.close()


@pytest.mark.parametrize("error", [NO_SPACE, BROKEN])
@pytest.mark.parametrize("operation", ["flush", "migrate"])
def test_a_failed_replacement_is_the_end_also_without_space(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, operation: str, error: OSError
) -> None:
    journal = filled(tmp_path).journal
    with monkeypatch.context() as context:
        context.setattr(f"journal.database.{operation}", raising(error))
        with pytest.raises(JournalBroken, match="cannot be replaced"):
            shorten(journal)
    journal.abandon()
    again = Journal.open(tmp_path)
    assert isinstance(next(again.read()).event, StateCarried)
    assert again.verify() == []
    again.close()


def test_what_is_left_of_a_successor_and_cannot_be_removed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path).journal.close()
    with monkeypatch.context() as context:
        context.setattr("pathlib.Path.unlink", raising(READ_ONLY))
        with pytest.raises(JournalError, match=r"journal.new: cannot be written \(Read-only"):
            Journal.open(tmp_path)
    Journal.open(tmp_path).close()


def test_a_journal_that_is_abandoned_is_not_copied(tmp_path: Path) -> None:
    """A flush that has failed is not tried again, not even by the close of its connection."""
    steps = filled(tmp_path)
    log = tmp_path / "journal.db-wal"
    data, size = steps.journal.file.read_bytes(), log.stat().st_size
    assert size
    steps.journal.abandon()
    assert steps.journal.file.read_bytes() == data
    assert log.stat().st_size == size
    again = Journal.open(tmp_path)
    assert again.last == steps.journal.last
    again.close()
    assert not log.exists()


def test_a_broken_disk_does_not_keep_a_journal_from_being_abandoned(
    tmp_path: Path, sqlite: SqliteFailures
) -> None:
    steps = filled(tmp_path)
    sqlite.fail("", sqlite3.SQLITE_IOERR_READ)
    steps.journal.abandon()
    sqlite.heal()
    again = Journal.open(tmp_path)
    assert again.last == steps.journal.last
    again.close()


@pytest.mark.parametrize("free", [0, 10**9])
def test_a_log_that_cannot_be_made_is_a_full_disk_if_there_is_no_space(
    tmp_path: Path, sqlite: SqliteFailures, monkeypatch: pytest.MonkeyPatch, free: int
) -> None:
    monkeypatch.setattr("journal.database.has_no_space", lambda _: free == 0)
    sqlite.fail("PRAGMA journal_mode = WAL", sqlite3.SQLITE_IOERR_SHMSIZE)
    with pytest.raises(JournalBroken if free else JournalFull):
        Journal.open(tmp_path)


def test_a_lock_that_cannot_be_written_is_named_and_given_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as context:
        context.setattr("journal.files.os.pwrite", raising(NO_SPACE))
        with pytest.raises(JournalError, match=r"journal.lock: cannot be written \(No space"):
            Journal.open(tmp_path)
    Journal.open(tmp_path).close()
