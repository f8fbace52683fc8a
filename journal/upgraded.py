"""A journal of an earlier schema is read in a private copy that is upgraded: the file itself stays
as it is, and so does what an older server that runs beside it sees.

The copy is the journal of one moment, taken by SQLite within one read transaction. It lies where
temporary files do, for its owner only, and goes with its reader.
"""

import logging
import shutil
import sqlite3
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path

from sqlalchemy.exc import DBAPIError

from journal.database import (
    BUSY_TIMEOUT_MS,
    DAMAGED,
    READER_PRAGMAS,
    file_uri,
    make_engine,
    migrate,
)
from journal.errors import JournalBroken, JournalError
from journal.tables import SCHEMA
from journal.untouched import Source

NO_PLACE = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_CANTOPEN)

log = logging.getLogger(__name__)

LARGE_BYTES = 100 * 10**6
"""From this size on it is said that a copy is made, and how large it gets: that takes a while."""


class UpgradedCopy:
    """See the module's text. `file` is the copy; close it to remove that."""

    def __init__(self, source: Source, name: Path, schema: str) -> None:
        """Copies what lies at `source` and upgrades it from `schema`; messages call it `name`.
        Raises JournalError when there is no place for the copy, or the file is damaged.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="fermata-journal-")
        self.file = Path(self._folder.name) / name.name
        self._name, self._schema = name, schema
        with ExitStack() as undo:
            undo.callback(self.close)
            self._fill(source)
            self._upgrade()
            undo.pop_all()

    def _fill(self, source: Source) -> None:
        self.file.touch(mode=0o600)
        timeout_s = BUSY_TIMEOUT_MS / 1000
        uri = file_uri(*source)
        try:
            with (
                closing(
                    sqlite3.connect(uri, uri=True, isolation_level=None, timeout=timeout_s)
                ) as one,
                closing(sqlite3.connect(self.file, isolation_level=None)) as other,
            ):
                for pragma in READER_PRAGMAS:
                    one.execute(pragma)
                one.execute("BEGIN")
                self._announce(one)
                for pragma in ("PRAGMA journal_mode = OFF", "PRAGMA synchronous = OFF"):
                    other.execute(pragma)
                one.backup(other)
                one.execute("ROLLBACK")
        except sqlite3.Error as error:
            raise self._failed(error) from error

    def _announce(self, one: sqlite3.Connection) -> None:
        query = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
        (copy_bytes,) = one.execute(query).fetchone()
        folder = self.file.parent
        if shutil.disk_usage(folder).free < copy_bytes:
            raise self._unmade(f"it needs {copy_bytes / 1e6:.0f} MB")
        if copy_bytes >= LARGE_BYTES:
            log.warning(
                "%s: has schema %s: %.0f MB are copied to %s and upgraded to %s there",
                *(self._name, self._schema, copy_bytes / 1e6, folder, SCHEMA),
            )

    def _upgrade(self) -> None:
        engine = make_engine(self.file, "rw")
        try:
            with engine.connect() as connection:
                connection.exec_driver_sql("PRAGMA synchronous = OFF").close()
                migrate(connection, self._name)
        except DBAPIError as error:
            raise self._failed(error.orig) from error
        finally:
            engine.dispose()

    def _failed(self, error: BaseException | None) -> JournalError:
        """A failure of SQLite. It does not say which of the two files it is about."""
        code = getattr(error, "sqlite_errorcode", 0) & 0xFF
        if code in NO_PLACE:
            return self._unmade(str(error))
        if code in DAMAGED:
            return JournalBroken(f"{self._name}: {error}; use a backup")
        return JournalError(
            f"{self._name}: has schema {self._schema}, and a copy of it cannot be upgraded to "
            f"{SCHEMA} ({error}); use a backup"
        )

    def _unmade(self, why: str) -> JournalError:
        return JournalError(
            f"{self._name}: has schema {self._schema}, which is read in a copy upgraded to "
            f"{SCHEMA}, and that cannot be made in {self.file.parent} ({why}); set TMPDIR to "
            "another place"
        )

    def close(self) -> None:
        """Removes the copy."""
        self._folder.cleanup()
