"""SQLite that fails on demand: with the result code that a broken or full disk would give."""

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

NAMES = {
    sqlite3.SQLITE_FULL: "database or disk is full",
    sqlite3.SQLITE_READONLY: "attempt to write a readonly database",
    sqlite3.SQLITE_CANTOPEN: "unable to open database file",
}


class SqliteFailures:
    """Statements that begin with `failing` fail with SQLite's extended result `code`, `times` times
    (0: always). `tried` are those that did.
    """

    def __init__(self) -> None:
        self.failing: str | None = None
        self.code = 0
        self.left = 0
        self.tried: list[str] = []
        self.happened = threading.Event()

    def fail(self, failing: str, code: int, times: int = 0) -> None:
        """From here on."""
        self.code, self.left = code, times or -1
        self.failing = failing

    def heal(self) -> None:
        """No more of it."""
        self.failing = None

    def check(self, statement: str) -> None:
        """Called before each statement. Raises what SQLite would."""
        if self.failing is None or not statement.startswith(self.failing) or not self.left:
            return
        self.left -= 1
        self.tried.append(statement)
        error = sqlite3.OperationalError(NAMES.get(self.code & 0xFF, "disk I/O error"))
        error.sqlite_errorcode = self.code
        self.happened.set()
        raise error


@contextmanager
def failing_sqlite() -> Iterator[SqliteFailures]:
    """Connections that are opened meanwhile can be made to fail."""
    failures = SqliteFailures()
    connect: Callable[..., sqlite3.Connection] = sqlite3.connect

    class Cursor(sqlite3.Cursor):
        def execute(self, sql: str, parameters: Any = (), /) -> "Cursor":
            failures.check(sql)
            super().execute(sql, parameters)
            return self

        def executemany(self, sql: str, parameters: Any, /) -> "Cursor":
            failures.check(sql)
            super().executemany(sql, parameters)
            return self

    class FailingConnection(sqlite3.Connection):
        def cursor(self, factory: Any = Cursor) -> Any:
            return super().cursor(factory)

    def connect_failing(*arguments: Any, **options: Any) -> sqlite3.Connection:
        return connect(*arguments, **options, factory=FailingConnection)

    with mock.patch("journal.database.sqlite3.connect", connect_failing):
        yield failures
