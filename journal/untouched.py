"""What a reader's connections open, so that a journal without a writer stays as it is.

Beside a database in WAL mode lie its log (-wal) and the log's index (-shm). A connection makes them
where they are missing, writes into the index also when it only reads, and may leave both behind.
With a writer that cannot be otherwise: the index is how the two meet. Without one nothing may
change, and a folder that cannot be written has to do.
"""

import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from sqlalchemy.exc import DBAPIError

from journal.database import Access
from journal.errors import JournalError
from journal.files import has_writer


class Stamp(NamedTuple):
    """What tells that a file was written to, or is another one."""

    inode: int
    num_bytes: int
    changed_ns: int


Stamps = tuple[Stamp | None, Stamp | None]
"""Of a database and its log."""


class Source(NamedTuple):
    """A file, and how it is opened."""

    file: Path
    access: Access


def stamp_of(file: Path) -> Stamp | None:
    """The stamp, or None where there is no file. Raises OSError."""
    try:
        status = file.stat()
    except FileNotFoundError:
        return None
    return Stamp(status.st_ino, status.st_size, status.st_mtime_ns)


class Untouched:
    """Decides for each connection of a reader what it opens. Use it from any thread; close it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.log = file.with_name(f"{file.name}-wal")
        self.index = file.with_name(f"{file.name}-shm")
        self._decided: tuple[Stamps, Source] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @contextmanager
    def source(self) -> Generator[Source, None, None]:
        """What to open for one transaction. Raises JournalError when a writer has come and changed
        what was taken for closed, and OSError.
        """
        before = stamp_of(self.file)
        source = self._source(before)
        try:
            yield source
        except DBAPIError:
            self._refuse_changed(source, before)
            raise
        self._refuse_changed(source, before)

    def _refuse_changed(self, source: Source, before: Stamp | None) -> None:
        if source.access == "closed" and stamp_of(self.file) != before:
            raise self._changed()

    def _changed(self) -> JournalError:
        return JournalError(f"{self.file}: was written to while it was read; read it again")

    def _source(self, database: Stamp | None) -> Source:
        """Asks whether there is a writer only once for files that stay as they are: who asks holds
        the lock for an instant.
        """
        stamps = database, stamp_of(self.log)
        decided = self._decided
        if decided is not None and decided[0] == stamps:
            return decided[1]
        source = self._decide(stamps)
        if source.access != "ro":
            self._decided = stamps, source
        return source

    def _decide(self, stamps: Stamps) -> Source:
        _, log = stamps
        if has_writer(self.file):
            return Source(self.file, "ro")
        if log is None or log.num_bytes == 0:
            return Source(self.file, "closed")
        if stamp_of(self.index) is not None:
            return Source(self.file, "left")
        copy = self._copy()
        if (stamp_of(self.file), stamp_of(self.log)) != stamps:
            raise self._changed()
        return Source(copy, "ro")

    def _copy(self) -> Path:
        """A database and the log that its writer has left, in a folder of their own: without an
        index, which SQLite would make beside them.
        """
        self.close()
        self._folder = folder = tempfile.TemporaryDirectory(prefix="fermata-journal-")
        copy = Path(folder.name) / self.file.name
        try:
            shutil.copyfile(self.file, copy)
            shutil.copyfile(self.log, copy.with_name(self.log.name))
        except OSError as error:
            raise JournalError(
                f"{self.file}: its log can only be read with a copy of both, which cannot be made "
                f"in {folder.name} ({error.strerror}); set TMPDIR to another place"
            ) from error
        return copy

    def close(self) -> None:
        """Removes what was copied."""
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
