"""Connections to a journal's file: how they are opened, and what their failures mean."""

import sqlite3
from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from sqlalchemy import Connection, CursorResult, Engine, create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from journal.errors import JournalBroken, JournalError, JournalFull, JournalTooNew
from journal.files import Lock, make_private
from journal.tables import SCHEMA

Durability = Literal["process", "power"]
Access = Literal["ro", "rw"]
Run = Callable[..., CursorResult[*tuple[Any, ...]]]
"""`exec_driver_sql` of a connection."""

BUSY_TIMEOUT_S = 5.0

WRITER_PRAGMAS = (
    # One commit is one append to the log, and readers never wait for the writer.
    "PRAGMA journal_mode = WAL",
    # The journal decides when the log is copied into the file: see Database.checkpoint.
    "PRAGMA wal_autocheckpoint = 0",
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
READER_PRAGMAS = (
    # Beside mode=ro: a statement that writes is refused before it takes a lock.
    "PRAGMA query_only = ON",
    "PRAGMA temp_store = MEMORY",
    "PRAGMA trusted_schema = OFF",
)
SYNCHRONOUS: dict[Durability, str] = {
    # The log is written at each commit and flushed at checkpoints only.
    "process": "PRAGMA synchronous = NORMAL",
    # The log is flushed at the commit, and with it all earlier ones.
    "power": "PRAGMA synchronous = FULL",
}


def make_engine(file: Path, access: Access) -> Engine:
    """An engine whose connections are in autocommit mode: BEGIN and COMMIT are ours to say."""

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(
            f"file:{quote(str(file))}?mode={access}",
            uri=True,
            isolation_level=None,
            timeout=BUSY_TIMEOUT_S,
            check_same_thread=False,
        )

    return create_engine(
        "sqlite+pysqlite://", creator=connect, poolclass=NullPool, isolation_level="AUTOCOMMIT"
    )


def error_of(error: DBAPIError, file: Path) -> JournalError:
    """What a failure of SQLite means for the caller, by its result code."""
    code = getattr(error.orig, "sqlite_errorcode", None)
    if code is not None and code & 0xFF == sqlite3.SQLITE_FULL:
        return JournalFull(f"{file}: no space left for a commit; free some, it will be retried")
    if code is not None and code & 0xFF == sqlite3.SQLITE_BUSY:
        return JournalBroken(f"{file}: another program holds the file locked ({error.orig})")
    return JournalBroken(f"{file}: {error.orig}")


@contextmanager
def translated(file: Path) -> Generator[None, None, None]:
    """Raises SQLite's failures as JournalFull or JournalBroken."""
    try:
        yield
    except DBAPIError as error:
        raise error_of(error, file) from error


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
    elif found > SCHEMA:
        raise JournalTooNew(
            f"{file}: written by a later release (schema {found}, this one knows {SCHEMA}); "
            "install that release, or choose another --state folder"
        )


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

    def __init__(self, file: Path, connection: Connection, resources: ExitStack) -> None:
        self.file = file
        self.run: Run = connection.exec_driver_sql
        self._connection = connection
        self._resources = resources
        self._durability: Durability | None = None

    @classmethod
    def open(cls, file: Path) -> "Database":
        """Locks, opens and migrates; makes what is missing. Raises JournalError and those below
        it.
        """
        make_private(file)
        with translated(file), ExitStack() as stack:
            stack.callback(Lock(file).release)
            engine = make_engine(file, "rw")
            stack.callback(engine.dispose)
            connection = stack.enter_context(engine.connect())
            migrate(connection, file)
            return cls(file, connection, stack.pop_all())

    @contextmanager
    def transaction(self, durability: Durability) -> Generator[None, None, None]:
        """All or nothing. Raises JournalFull (nothing was written, try again) or JournalBroken."""
        with translated(self.file):
            if durability != self._durability:
                # SQLite refuses to change it inside a transaction.
                self.run(SYNCHRONOUS[durability])
                self._durability = durability
            with all_or_nothing(self._connection):
                yield

    def checkpoint(self) -> int:
        """Copies the log into the file as far as readers allow, and returns how many frames it
        holds. This is the only place that does: two connections that write and checkpoint at
        once can damage a log before SQLite 3.51.3.
        """
        with translated(self.file):
            _, num_frames, _ = self.run("PRAGMA wal_checkpoint(PASSIVE)").one()
            return num_frames

    def close(self) -> None:
        """Gives file and lock back. SQLite checkpoints as the last connection closes."""
        self._resources.close()
