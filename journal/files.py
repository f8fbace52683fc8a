"""Where a journal lies, who may read its files, and who may write it."""

import fcntl
import glob
import os
import sqlite3
import sys
import time
from contextlib import closing, suppress
from pathlib import Path
from urllib.parse import quote

from journal.errors import JournalError, JournalLocked

NAME = "journal.db"
NUM_SEALS = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'bundle'"
"""Over 0 in a bundle."""
LOCK_TRIES, LOCK_PAUSE_S = 3, 0.01


def journal_file(path: Path) -> Path:
    """The database of a state folder, or the path itself when it names a file (`.db`)."""
    return path if path.suffix == ".db" and not path.is_dir() else path / NAME


def make_durable_folder(folder: Path) -> None:
    """Makes the folder of a journal (0700) where it is missing, and those above it, each durable in
    the one above it: what is in them is lost with them. Raises OSError.
    """
    missing = [each for each in (folder, *folder.parents) if not each.exists()]
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for made in reversed(missing):
        flush(made.parent)


def make_folder(file: Path) -> None:
    """Makes the folder of a journal where it is missing. Raises JournalError."""
    try:
        make_durable_folder(file.parent)
    except OSError as error:
        raise unwritable(file.parent, error) from error


def make_private(file: Path) -> None:
    """Makes an empty database (0600) where it is missing; SQLite gives the files beside it the same
    permissions. Raises JournalError when it cannot be written.

    A database that exists is not opened here: closing it would give up the locks that SQLite
    holds in this process.
    """
    try:
        create_private(file)
    except OSError as error:
        raise unwritable(file, error) from error


def create_private(file: Path) -> None:
    """The same, but raises OSError."""
    if not file.exists():
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
    file.chmod(0o600)


def remove_half(file: Path) -> None:
    """Removes what an earlier process left of a successor. Raises JournalError."""
    try:
        file.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(file, error) from error


def unwritable(path: Path, error: OSError) -> JournalError:
    """The error for a path that cannot be written."""
    return JournalError(
        f"{path}: cannot be written ({error.strerror}); choose another --state folder"
    )


def flush(path: Path) -> None:
    """Waits until a file or folder is on the disk: on macOS past the drive's own cache."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        if sys.platform == "darwin" and path.is_file():
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        else:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unfit_name(file: Path) -> str | None:
    """Why a new journal cannot be written under this name: what readers would not find, or would
    read together with another database's log. Null when it can.
    """
    if file.suffix != ".db":
        return f"{file}: has to end in .db, by which a journal's file is known"
    if not file.parent.is_dir():
        return f"{file}: there is no folder {file.parent}; make it first"
    if file.is_dir():
        return f"{file}: is a folder; choose another name"
    for ending in ("-wal", "-shm", "-journal"):
        beside = file.with_name(file.name + ending)
        if beside.exists():
            return (
                f"{beside}: belongs to another database of this name, and would be read as part of "
                f"{file.name}; choose another name"
            )
    return None


def make_part(file: Path) -> tuple[Path, int]:
    """A new empty file of its owner's beside `file`, and its descriptor: a copy is written there
    until it is whole and gets its name. What dead processes have left of such copies is removed.
    Raises OSError.
    """
    for other in file.parent.glob(f".{glob.escape(file.name)}.*.part.db*"):
        process = other.name.removeprefix(f".{file.name}.").partition(".")[0]
        if process.isdecimal() and not is_alive(int(process)):
            other.unlink(missing_ok=True)
    part = file.with_name(f".{file.name}.{os.getpid()}.part.db")
    return part, os.open(part, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)


def is_alive(process_id: int) -> bool:
    """Whether there is another process with this id; what this one has left was one before it."""
    if process_id == os.getpid():
        return False
    try:
        os.kill(process_id, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def is_bundle_file(file: Path) -> bool:
    """Whether a bundle lies there. Imports nothing heavy, and opens the file as one that nobody
    writes; what is no database, or cannot be read, is none.
    """
    uri = f"file:{quote(str(file))}?mode=ro&immutable=1"
    try:
        with closing(sqlite3.connect(uri, uri=True)) as database:
            return bool(database.execute(NUM_SEALS).fetchone()[0])
    except sqlite3.DatabaseError:
        return False  # whoever opens the journal says what is wrong with it, if it is there


def lock_of(file: Path) -> Path:
    """What the writer of a journal holds locked."""
    return file.with_suffix(".lock")


def replacement_of(file: Path) -> Path:
    """Where the successor of a journal is written. What lies there at a start is half a file."""
    return file.with_suffix(".new")


def has_writer(file: Path) -> bool:
    """Whether somebody holds the lock of this journal; True as well for who may not ask.

    Who asks holds a lock himself for an instant, which `Lock` lets pass.
    """
    try:
        descriptor = os.open(lock_of(file), os.O_RDONLY)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


class Lock:
    """The right to write a journal, held by one process at a time and given back by its death."""

    def __init__(self, file: Path) -> None:
        """Raises JournalLocked with the id of the process that has it, JournalError when the lock
        file cannot be written.
        """
        path = lock_of(file)
        try:
            self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise unwritable(path, error) from error
        try:
            self._take()
        except OSError as error:
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise JournalLocked(
                f"{file}: process {holder or 'unknown'} writes this journal; stop it first, or "
                "choose another --state folder"
            ) from error
        try:
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)
        except OSError as error:
            os.close(self._descriptor)
            raise unwritable(path, error) from error

    def _take(self) -> None:
        """Raises OSError when somebody holds it who does not only ask whether anybody does."""
        for _ in range(LOCK_TRIES - 1):
            with suppress(BlockingIOError):
                return fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(LOCK_PAUSE_S)
        return fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def release(self) -> None:
        """Lets another process write. The lock file stays: removing it could part two holders."""
        os.close(self._descriptor)
