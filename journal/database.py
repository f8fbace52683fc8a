"""Connections to a journal's file: how they are opened, and what their failures mean."""

import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine
from sqlalchemy.exc import DBAPIError
from sqlalchemy.pool import NullPool

from journal.errors import JournalBroken, JournalError, JournalFull, JournalTooNew
from journal.files import Lock, make_private
from journal.tables import SCHEMA

Durability = Literal["process", "power"]
Access = Literal["ro", "rw"]

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


def schema_of(connection: Connection) -> str | None:
    """The revision of the schema, or None when no migration has run. Needs no alembic."""
    query = "SELECT count(*) FROM sqlite_master WHERE name = 'alembic_version'"
    if not connection.exec_driver_sql(query).scalar():
        return None
    return connection.exec_driver_sql("SELECT version_num FROM alembic_version").scalar()


def refuse_foreign(connection: Connection, file: Path, found: str | None) -> None:
    """Raises JournalError for a database with other tables, JournalTooNew for a later schema."""
    if found is None:
        if connection.exec_driver_sql("SELECT count(*) FROM sqlite_master").scalar():
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
    found = schema_of(connection)
    refuse_foreign(connection, file, found)
    if found == SCHEMA:
        return
    from journal.migration import upgrade

    connection.exec_driver_sql("BEGIN IMMEDIATE")
    try:
        upgrade(connection)
    except BaseException:
        connection.exec_driver_sql("ROLLBACK")
        raise
    connection.exec_driver_sql("COMMIT")


class Database:
    """The one connection that writes. All of its statements go through `run`."""

    def __init__(self, file: Path, lock: Lock, engine: Engine, connection: Connection) -> None:
        self.file = file
        self.run = connection.exec_driver_sql
        self._lock = lock
        self._engine = engine
        self._connection = connection
        self._durability: Durability | None = None

    @classmethod
    def open(cls, file: Path) -> "Database":
        """Locks, opens and migrates; makes what is missing. Raises JournalError and those below
        it.
        """
        make_private(file)
        lock = Lock(file)
        engine = make_engine(file, "rw")
        try:
            with translated(file):
                connection = engine.connect()
                try:
                    # The schema is looked at before anything is written into a foreign file.
                    refuse_foreign(connection, file, schema_of(connection))
                    for pragma in WRITER_PRAGMAS:
                        connection.exec_driver_sql(pragma).close()
                    migrate(connection, file)
                except BaseException:
                    connection.close()
                    raise
        except BaseException:
            engine.dispose()
            lock.release()
            raise
        return cls(file, lock, engine, connection)

    @contextmanager
    def transaction(self, durability: Durability) -> Generator[None, None, None]:
        """All or nothing. Raises JournalFull (nothing was written, try again) or JournalBroken."""
        with translated(self.file):
            if durability != self._durability:
                # SQLite refuses to change it inside a transaction.
                self.run(SYNCHRONOUS[durability])
                self._durability = durability
            self.run("BEGIN IMMEDIATE")
            try:
                yield
                self.run("COMMIT")
            except BaseException:
                self._roll_back()
                raise

    def checkpoint(self) -> int:
        """Copies the log into the file as far as readers allow, and returns how many frames it
        holds. This is the only place that does: two connections that write and checkpoint at
        once can damage a log before SQLite 3.51.3.
        """
        with translated(self.file):
            _, num_frames, _ = self.run("PRAGMA wal_checkpoint(PASSIVE)").one()
            return num_frames

    def _roll_back(self) -> None:
        # SQLite has already rolled back by itself after some errors.
        driver: Any = self._connection.connection.driver_connection
        if driver.in_transaction:
            self.run("ROLLBACK")

    def close(self) -> None:
        """Gives file and lock back. SQLite checkpoints as the last connection closes."""
        self._connection.close()
        self._engine.dispose()
        self._lock.release()
