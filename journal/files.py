"""Where a journal lies, who may read its files, and who may write it."""

import fcntl
import os
from pathlib import Path

from journal.errors import JournalError, JournalLocked

NAME = "journal.db"


def journal_file(path: Path) -> Path:
    """The database of a state folder, or the path itself when it names a file (`.db`)."""
    return path if path.suffix == ".db" and not path.is_dir() else path / NAME


def make_private(file: Path) -> None:
    """Makes the folder (0700) and an empty file (0600) where they are missing. SQLite gives the
    files beside it the permissions of this one. Raises JournalError when it cannot.
    """
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        os.close(os.open(file, os.O_CREAT | os.O_RDWR, 0o600))
        file.chmod(0o600)
    except OSError as error:
        raise JournalError(
            f"{file}: cannot be written ({error.strerror}); choose another --state folder"
        ) from error


class Lock:
    """The right to write a journal, held by one process at a time and given back by its death."""

    def __init__(self, file: Path) -> None:
        """Raises JournalLocked with the id of the process that has it, JournalError when the lock
        file cannot be written.
        """
        path = file.with_suffix(".lock")
        try:
            self._descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
        except OSError as error:
            raise JournalError(f"{path}: cannot be written ({error.strerror})") from error
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._descriptor, 32, 0).decode(errors="replace").strip()
            os.close(self._descriptor)
            raise JournalLocked(
                f"{file}: process {holder or 'unknown'} writes this journal; stop it first, or "
                "choose another --state folder"
            ) from error
        os.ftruncate(self._descriptor, 0)
        os.pwrite(self._descriptor, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Lets another process write. The lock file stays: removing it could part two holders."""
        os.close(self._descriptor)
