"""A copy of a journal that somebody may be writing: `fermata journal backup`.

The pages are copied by SQLite within one read transaction, so the copy is the journal of one
moment. In WAL mode that holds nobody up: the writer goes on, and its log, which cannot begin anew
meanwhile, grows by what it writes. VACUUM INTO would give the same with every row decoded and
written again in that transaction, which takes about twice as long. The connection is read-only:
it neither checkpoints nor removes the log, both of which are the writer's.

What takes longest comes after the transaction: everything in the copy is verified before it gets
its name.
"""

import os
import shutil
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from journal.database import BUSY_TIMEOUT_MS, READER_PRAGMAS, Run, file_uri
from journal.errors import JournalError
from journal.files import flush, make_part, unfit_name
from journal.reader import JournalReader
from journal.untouched import Source
from journal.verify import verify

PORTION_LENGTH = 4096
"""SQLite's pages that are copied before they are flushed. A flush of all at the end could hold up
those of the writer, where both files lie on one disk.
"""

SPARE_BYTES = 2**28
"""What a backup leaves free: a server on the same disk stands still without any space."""


class BackupError(JournalError):
    """There is no backup; the message names the file and says what to do."""


class BackupUnsound(BackupError):
    """The journal was copied and is not what it promises to be: see `findings`, a line each."""

    def __init__(self, message: str, findings: list[str]) -> None:
        super().__init__(message)
        self.findings = findings


class Backup(NamedTuple):
    """A backup that was made. Both seqs are 0 in an empty journal."""

    file: Path
    first_seq: int
    last_seq: int
    num_events: int
    num_bytes: int


def back_up(path: Path, file: Path, *, replace: bool = False) -> Backup:
    """Copies the journal of a state folder (or of a file `.db`), verifies the copy, and gives it
    its name, where an older file lies only to `replace` it. Beside a writer or without one. What
    has an earlier schema is copied as it is, and verified as an upgrade finds it.

    Raises JournalError when the journal cannot be read, BackupError when the copy cannot be
    written, and BackupUnsound. Then there is no new file.
    """
    with JournalReader.as_it_is(path) as reader:
        refuse(reader.file, file, replace=replace)
        with unfinished(file) as (copy, descriptor):
            with reader.source() as source:
                copy_moment(source, copy, descriptor)
            backup = examine(copy, reader.file)._replace(file=file)
            try:
                flush(copy)
                refuse(reader.file, file, replace=replace)
                copy.rename(file)
                flush(file.parent)
            except OSError as error:
                raise unwritable(file, error) from error
    return backup


def refuse(source: Path, file: Path, *, replace: bool) -> None:
    """Raises BackupError for a name that cannot be that of a backup."""
    if file.exists() and file.samefile(source):
        raise BackupError(f"{file}: is the journal itself; choose another name")
    unfit = unfit_name(file)
    if unfit is not None:
        raise BackupError(unfit)
    if os.path.lexists(file) and not replace:
        raise BackupError(f"{file}: exists; choose another name, or replace it with --force")


@contextmanager
def unfinished(file: Path) -> Generator[tuple[Path, int], None, None]:
    """An empty file of its owner's beside `file`, open, which is gone afterwards if it still has
    its own name. Raises BackupError.
    """
    try:
        part, descriptor = make_part(file)
    except OSError as error:
        raise unwritable(file, error) from error
    try:
        yield part, descriptor
    finally:
        # Not before: closing it gives up the locks that SQLite holds on it in this process.
        os.close(descriptor)
        for ending in ("", "-wal", "-shm"):
            part.with_name(part.name + ending).unlink(missing_ok=True)


def copy_moment(source: Source, copy: Path, descriptor: int) -> None:
    """All pages as they are at one moment. The copy, whose descriptor is given, stands alone then,
    without a log beside it. Raises BackupError.
    """

    def flush_portion(_status: int, _remaining: int, _total: int) -> None:
        os.fsync(descriptor)

    uri = file_uri(*source)
    timeout_s = BUSY_TIMEOUT_MS / 1000
    try:
        with (
            closing(sqlite3.connect(uri, uri=True, isolation_level=None, timeout=timeout_s)) as one,
            closing(sqlite3.connect(copy, isolation_level=None)) as other,
        ):
            for pragma in READER_PRAGMAS:
                one.execute(pragma)
            one.execute("BEGIN")
            refuse_full_disk(one, copy)
            # Nothing is to be rolled back: a copy that is not whole is removed.
            for pragma in ("PRAGMA journal_mode = OFF", "PRAGMA synchronous = OFF"):
                other.execute(pragma)
            one.backup(other, pages=PORTION_LENGTH, progress=flush_portion)
            one.execute("ROLLBACK")
        with closing(sqlite3.connect(copy, isolation_level=None)) as other:
            (mode,) = other.execute("PRAGMA journal_mode = DELETE").fetchone()
            assert mode == "delete", "nobody else has it open"
    except sqlite3.Error as error:
        raise copy_error(source.file, copy, error) from error
    except OSError as error:
        raise unwritable(copy.parent, error) from error


def refuse_full_disk(connection: sqlite3.Connection, copy: Path) -> None:
    """Reads the size of the journal, with which its moment is chosen. Raises BackupError when there
    is no space for the copy.
    """
    query = "SELECT page_count * page_size FROM pragma_page_count, pragma_page_size"
    (copy_bytes,) = connection.execute(query).fetchone()
    need_bytes = copy_bytes + SPARE_BYTES
    free_bytes = shutil.disk_usage(copy.parent).free
    if free_bytes < need_bytes:
        raise BackupError(
            f"{copy.parent}: has {free_bytes / 1e6:.0f} MB free, and the backup needs "
            f"{need_bytes / 1e6:.0f} MB with what others need; make space, or choose another disk"
        )


def copy_error(source: Path, copy: Path, error: sqlite3.Error) -> BackupError:
    """A failure of SQLite in words. It does not say which of the two files it is about."""
    code = getattr(error, "sqlite_errorcode", 0) & 0xFF
    if code == sqlite3.SQLITE_FULL:
        return BackupError(f"{copy.parent}: no space left; make some, or choose another disk")
    return BackupError(f"{source}: cannot be copied to {copy.parent} ({error})")


def examine(copy: Path, source: Path) -> Backup:
    """What the copy holds. Raises BackupUnsound, and BackupError, which speaks of the `source`:
    the copy has no name that somebody knows, and is soon gone.
    """
    try:
        with JournalReader.open(copy) as reader, reader.transaction() as run:
            findings = list(verify(run))
            first, last, count = seqs(run)
    except JournalError as error:
        words = str(error).removeprefix(f"{copy}: ")
        raise BackupError(f"{source}: {words}") from error
    if findings:
        raise BackupUnsound("the journal is not sound, and was not backed up", findings)
    return Backup(copy, first, last, count, copy.stat().st_size)


def seqs(run: Run) -> tuple[int, int, int]:
    """The first and last seq, and how many events there are."""
    row = run("SELECT coalesce(min(seq), 0), coalesce(max(seq), 0), count(*) FROM events").one()
    return row[0], row[1], row[2]


def unwritable(file: Path, error: OSError) -> BackupError:
    """The error for a backup that cannot be written."""
    return BackupError(f"{file}: cannot be written ({error.strerror}); choose another place")
