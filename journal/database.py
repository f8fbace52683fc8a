"""Connections to a journal's file: how they are opened, and what their failures mean."""

import errno
import os
import sqlite3
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from sqlalchemy import Connection, CursorResult, Engine, create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from journal.crashpoints import reach
from journal.errors import (
    JournalBroken,
    JournalError,
    JournalFull,
    JournalTooNew,
    UnreadableEvent,
)
from journal.files import (
    NUM_SEALS,
    Lock,
    flush,
    make_folder,
    make_private,
    remove_half,
    replacement_of,
)
from journal.tables import SCHEMA

Durability = Literal["process", "power"]
Access = Literal["ro", "rw", "closed", "left"]
"""How a file is opened; the last two write nothing at all, into no file. Nobody writes to what is
`closed`, and what its log may hold is not read. `left` is a log by a writer that has died: its
index is only read, and made anew in memory.
"""
Run = Callable[..., CursorResult[*tuple[Any, ...]]]
"""`exec_driver_sql` of a connection."""

BUSY_TIMEOUT_MS = 5_000

UNMADE = (
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_IOERR_SHMOPEN,
    sqlite3.SQLITE_IOERR_SHMSIZE,
)
SEALED = "a bundle, which is read and not written; choose another --state folder"
LOG_BYTES = 64 * 2**10
"""What a log and its index take at first."""

# One commit is one append to the log, and readers never wait for the writer.
WAL = "PRAGMA journal_mode = WAL"
WRITER_PRAGMAS = (
    WAL,
    # The journal decides when the log is copied into the file: see Database.checkpoint.
    "PRAGMA wal_autocheckpoint = 0",
    # After a reader has held the log back, it shrinks again. In bytes.
    "PRAGMA journal_size_limit = 67108864",
    # Deleted token ids are overwritten: what is purged is gone from the file.
    "PRAGMA secure_delete = ON",
    # On macOS a plain fsync leaves the data in the drive's cache. No effect elsewhere.
    "PRAGMA fullfsync = ON",
    "PRAGMA checkpoint_fullfsync = ON",
    # Sorting spills into memory, never into temporary files outside the state folder.
    "PRAGMA temp_store = MEMORY",
    # The inner nodes of all trees stay in memory, also with a million events. In KiB.
    "PRAGMA cache_size = -16384",
    # Functions that a changed schema could smuggle in are not run.
    "PRAGMA trusted_schema = OFF",
)
# A reader's connection is opened with mode=ro: it cannot write, checkpoint or remove the log.
READER_PRAGMAS = ("PRAGMA temp_store = MEMORY", "PRAGMA trusted_schema = OFF")
SYNCHRONOUS: dict[Durability, str] = {
    # The log is written at each commit and flushed at checkpoints only.
    "process": "PRAGMA synchronous = NORMAL",
    # The log is flushed at the commit, and with it all earlier ones.
    "power": "PRAGMA synchronous = FULL",
}


URI_OPTIONS: dict[Access, str] = {
    "ro": "mode=ro",
    "rw": "mode=rw",
    "closed": "mode=ro&immutable=1",
    "left": "mode=ro&readonly_shm=1",
}


def file_uri(file: Path, access: Access) -> str:
    """The name by which SQLite opens a file that must exist."""
    return f"file:{quote(str(file))}?{URI_OPTIONS[access]}"


def make_engine(file: Path, access: Access) -> Engine:
    """An engine whose connections are in autocommit mode: BEGIN and COMMIT are ours to say."""

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(
            file_uri(file, access),
            uri=True,
            isolation_level=None,
            timeout=BUSY_TIMEOUT_MS / 1000,
            check_same_thread=False,
        )

    return create_engine(
        "sqlite+pysqlite://", creator=connect, poolclass=NullPool, isolation_level="AUTOCOMMIT"
    )


def result_code(error: DBAPIError) -> int | None:
    """SQLite's primary result code: the low byte of the extended one."""
    code: int | None = getattr(error.orig, "sqlite_errorcode", None)
    return None if code is None else code & 0xFF


DAMAGED = (sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_CORRUPT)
"""What lies there is no database, or not a whole one."""


def error_of(error: DBAPIError, file: Path) -> JournalError:
    """What a failure of SQLite means for the caller, by its result code.

    A log or its index that cannot be made for lack of space has codes of its own, which other
    failures have as well. Nothing was written then, so the free space may say which it is.
    """
    code = result_code(error)
    unmade = getattr(error.orig, "sqlite_errorcode", None) in UNMADE
    if code == sqlite3.SQLITE_FULL or (unmade and has_no_space(file)):
        return JournalFull(f"{file}: no space left for a commit; free some, it will be retried")
    if code == sqlite3.SQLITE_BUSY:
        return JournalBroken(f"{file}: another program holds the file locked ({error.orig})")
    if code in DAMAGED:
        return JournalBroken(
            f"{file}: {error.orig}; put a backup in its place, with no -wal and -shm beside it, or "
            "choose another folder"
        )
    return JournalBroken(f"{file}: {error.orig}")


def has_no_space(file: Path) -> bool:
    """Whether the file system has no room for a log and its index."""
    try:
        status = os.statvfs(file.parent)
    except OSError:
        return False
    return status.f_bavail * status.f_frsize < LOG_BYTES


@contextmanager
def translated(file: Path) -> Generator[None, None, None]:
    """Raises failures of SQLite and of the file system as JournalFull or JournalBroken, and names
    the file of an event that cannot be read.
    """
    try:
        yield
    except UnreadableEvent as error:
        if error.file is not None:
            raise
        raise UnreadableEvent(str(error), file) from error
    except DBAPIError as error:
        raise error_of(error, file) from error
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise JournalFull(f"{file}: no space left ({error.strerror})") from error
        raise JournalBroken(f"{file}: {error.strerror}") from error


def schema_of(run: Run) -> str | None:
    """The revision of the schema, or None when no migration has run. Needs no alembic."""
    query = "SELECT count(*) FROM sqlite_master WHERE name = 'alembic_version'"
    if not run(query).scalar():
        return None
    return run("SELECT version_num FROM alembic_version").scalar()


def refuse_foreign(run: Run, file: Path, found: str | None) -> None:
    """Raises JournalError for a database with other tables, JournalTooNew for a later schema."""
    if found is None:
        if run("SELECT count(*) FROM sqlite_master").scalar():
            raise JournalError(f"{file}: a database, but no journal; choose another folder")
    elif not (found.isdecimal() and len(found) == len(SCHEMA) and int(found)):
        raise JournalError(f"{file}: has schema {found!r}, which no release has; use a backup")
    elif found > SCHEMA:
        raise JournalTooNew(
            f"{file}: written by a later release (schema {found}, this one knows {SCHEMA}); "
            "install that release, or choose another --state folder"
        )


def is_bundle(run: Run) -> bool:
    """Whether this file is a bundle."""
    return bool(run(NUM_SEALS).scalar())


def migrate(connection: Connection, file: Path) -> None:
    """Brings the schema to `SCHEMA` in one transaction. Imports alembic (which takes most of a
    second) only when there is something to do.
    """
    run = connection.exec_driver_sql
    found = schema_of(run)
    refuse_foreign(run, file, found)
    # The file was looked at before anything is written into it: this is the first write.
    for pragma in WRITER_PRAGMAS:
        run(pragma).close()
    if found != SCHEMA:
        from journal.migration import upgrade

        with all_or_nothing(connection):
            upgrade(connection)


@contextmanager
def all_or_nothing(connection: Connection) -> Generator[None, None, None]:
    """A transaction that takes the write lock at its begin and is rolled back by any failure."""
    driver: Any = connection.connection.driver_connection
    connection.exec_driver_sql("BEGIN IMMEDIATE")
    try:
        yield
        connection.exec_driver_sql("COMMIT")
    finally:
        # SQLite has already rolled back by itself after some errors.
        if driver.in_transaction:
            connection.exec_driver_sql("ROLLBACK")


class Database:
    """The one connection that writes. All of its statements go through `run`."""

    run: Run

    def __init__(self, file: Path, lock: Lock) -> None:
        self.file = file
        self._lock = lock
        self._durability: Durability | None = None
        self._connect()

    @classmethod
    def open(cls, file: Path) -> "Database":
        """Locks, opens and migrates; makes what is missing. Raises JournalError and those below
        it.
        """
        make_folder(file)
        with ExitStack() as stack:
            lock = Lock(file)
            stack.callback(lock.release)
            reach("journal.open.locked")
            remove_half(replacement_of(file))
            make_private(file)
            database = cls(file, lock)
            stack.pop_all()
            reach("journal.open.connected")
            return database

    def _connect(self) -> None:
        with translated(self.file), ExitStack() as stack:
            engine = make_engine(self.file, "rw")
            stack.callback(engine.dispose)
            self._connection = stack.enter_context(engine.connect())
            if is_bundle(self._connection.exec_driver_sql):
                raise JournalError(f"{self.file}: {SEALED}")
            migrate(self._connection, self.file)
            self._connected = stack.pop_all()
        self.run = self._connection.exec_driver_sql
        self._durability = None

    @contextmanager
    def transaction(self, durability: Durability) -> Generator[None, None, None]:
        """All or nothing. Raises JournalFull (nothing was written, try again) or JournalBroken."""
        with translated(self.file):
            if durability != self._durability:
                # SQLite refuses to change it inside a transaction.
                self.run(SYNCHRONOUS[durability])
                self._durability = durability
            with all_or_nothing(self._connection):
                reach("journal.begin.after")
                yield
                reach(f"journal.commit.before.{durability}")
            reach(f"journal.commit.after.{durability}")

    def checkpoint(self) -> int:
        """Copies the log into the file as far as readers allow, and returns how many frames it
        holds. This is the only place that does: two connections that write and checkpoint at
        once can damage a log before SQLite 3.51.3.
        """
        reach("journal.checkpoint.before")
        with translated(self.file):
            _, num_frames, _ = self.run("PRAGMA wal_checkpoint(PASSIVE)").one()
        reach("journal.checkpoint.after")
        return num_frames

    def leave_wal(self) -> bool:
        """Makes the file stand alone, without a log. False while another connection is open.

        Beside a file in WAL mode lie its log and the log's index, found by name. Before the name
        may mean another file they must be gone, and so must every connection that would remove
        them by name as it closes. Leaving WAL mode ensures both.
        """
        with translated(self.file):
            self.run("PRAGMA busy_timeout = 0").close()
            try:
                return self.run("PRAGMA journal_mode = DELETE").scalar() == "delete"
            except DBAPIError as error:
                if result_code(error) != sqlite3.SQLITE_BUSY:
                    raise
                return False
            finally:
                self.run(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}").close()

    def enter_wal(self) -> None:
        """Goes on as before `leave_wal`."""
        with translated(self.file):
            self.run(WAL).close()

    def replace(self, replacement: Path) -> None:
        """Puts a whole and flushed database in the place of this one, which has left WAL mode, and
        goes on with it.
        """
        self._connected.close()
        try:
            with translated(self.file):
                replacement.rename(self.file)
                reach("journal.compaction.renamed")
                flush(self.file.parent)
                reach("journal.compaction.folder_flushed")
                self._connect()
        except JournalError as error:  # Also without space: there is no connection to go on with.
            raise JournalBroken(f"{self.file}: cannot be replaced ({error})") from error
        reach("journal.compaction.connected")

    def close(self) -> None:
        """Gives file and lock back. SQLite checkpoints as the last connection closes."""
        self._connected.close()
        self._lock.release()

    def abandon(self) -> None:
        """The same after a failure, and without a checkpoint: that would flush the log again, and
        after a failed flush nobody knows what a later one that comes through has not written.

        SQLite lets the last connection checkpoint when it closes, and one that only reads cannot.
        So such a one is the last.
        """
        with suppress(DBAPIError), ExitStack() as stack:
            engine = make_engine(self.file, "ro")
            stack.callback(engine.dispose)
            last = stack.enter_context(engine.connect())
            last.exec_driver_sql("SELECT count(*) FROM sqlite_master").close()
            self._connected.close()
        self._lock.release()
