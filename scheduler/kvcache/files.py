"""The file operations that the block store is made of, so that a test can let each of them fail.

All of them raise OSError. Folders are made with mode 0700 and files with 0600.
"""

import errno
import fcntl
import itertools
import os
import secrets
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Protocol

TEMPORARY_SUFFIX = ".tmp"

ANNOUNCED_AT_ONCE_BYTES = 128 * 2**10
"""The smallest window that Linux has for a disk, unless somebody changed it."""


@cache
def _run_name() -> str:
    """In the temporary names of this process. Not its id, which another one may have had before;
    and drawn when it is needed, so that processes forked before that have each their own.
    """
    return secrets.token_hex(8)


_numbers = itertools.count(1)


class Files(Protocol):
    """See `OsFiles`, the one that touches the disk. Called from several threads at a time."""

    def make_folder(self, folder: Path) -> None: ...

    def create(self, path: Path) -> int: ...

    def write(self, descriptor: int, buffers: Sequence[memoryview]) -> int: ...

    def flush(self, descriptor: int) -> None: ...

    def close(self, descriptor: int) -> None: ...

    def rename(self, old: Path, new: Path) -> None: ...

    def flush_folder(self, folder: Path) -> None: ...

    def open(self, path: Path) -> int: ...

    def size(self, descriptor: int) -> int: ...

    def read(self, descriptor: int, num_bytes: int) -> bytes: ...

    def read_soon(self, descriptor: int) -> None: ...

    def unlink(self, path: Path) -> None: ...

    def remove_folder(self, folder: Path) -> None: ...

    def list_folder(self, folder: Path) -> Iterable[os.DirEntry[str]]: ...

    def free_bytes(self, folder: Path) -> int: ...


class OsFiles:
    """The operating system's files."""

    def make_folder(self, folder: Path) -> None:
        """Makes the folder and those above it; each is durable in the one above it."""
        if folder.is_dir():
            return
        self.make_folder(folder.parent)
        with suppress(FileExistsError):
            self.make_one_folder(folder)
        self.flush_folder(folder.parent)

    def make_one_folder(self, folder: Path) -> None:
        """Makes a folder in one that is there."""
        folder.mkdir(mode=0o700)

    def create(self, path: Path) -> int:
        """A new file to write to. Never opens one that is there."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def write(self, descriptor: int, buffers: Sequence[memoryview]) -> int:
        """Writes some of the bytes, in order, and returns how many."""
        return os.writev(descriptor, buffers)

    def flush(self, descriptor: int) -> None:
        """Returns when the bytes survive the death of the machine, as far as it can be told.

        On macOS fsync leaves them in the drive's own cache; F_FULLFSYNC does not.
        """
        if sys.platform == "darwin":
            fcntl.fcntl(descriptor, fcntl.F_FULLFSYNC)
        else:
            os.fsync(descriptor)

    def close(self, descriptor: int) -> None:
        """Closes what `create` or `open` returned."""
        os.close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        """Atomic; takes the place of a file that is there."""
        old.rename(new)

    def flush_folder(self, folder: Path) -> None:
        """Makes the names in a folder durable.

        On macOS the drive may still hold them in its cache: a lost name of a block costs time
        only, and a commit that survives the death of the machine empties that cache.
        """
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def open(self, path: Path) -> int:
        """A file to read from. Follows no link, and does not wait for the other end of a pipe."""
        return os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)

    def size(self, descriptor: int) -> int:
        """The bytes of an open file."""
        return os.fstat(descriptor).st_size

    def read(self, descriptor: int, num_bytes: int) -> bytes:
        """The next bytes; fewer only at the end of the file."""
        return os.read(descriptor, num_bytes)

    def read_soon(self, descriptor: int) -> None:
        """Tells the system that the whole file will be read, so that it may begin; nothing waits.

        Only where there is the call. The bytes go to the system's file cache. In pieces, because
        Linux begins to read no more than one window of its own read-ahead for each call.
        """
        if not hasattr(os, "posix_fadvise"):
            return
        for start in range(0, self.size(descriptor), ANNOUNCED_AT_ONCE_BYTES):
            os.posix_fadvise(descriptor, start, ANNOUNCED_AT_ONCE_BYTES, os.POSIX_FADV_WILLNEED)

    def unlink(self, path: Path) -> None:
        """Removes a file or a link."""
        path.unlink()

    def remove_folder(self, folder: Path) -> None:
        """Removes an empty folder."""
        folder.rmdir()

    def list_folder(self, folder: Path) -> Iterable[os.DirEntry[str]]:
        """The entries of a folder, in no order, read as they are asked for."""
        return os.scandir(folder)

    def free_bytes(self, folder: Path) -> int:
        """What this user may still write to the file system of a folder, which is no file."""
        status = os.statvfs(f"{folder}/")
        return status.f_bavail * status.f_frsize


def write_whole(files: Files, path: Path, buffers: Sequence[memoryview]) -> None:
    """Writes a file so that at every instant it is there whole or not at all, and durably so when
    this returns: temporary name, bytes, flush, rename, flush of the folder.

    Raises OSError; then nothing of it is left, unless removing it failed as well (a start removes
    temporary files).
    """
    temporary = path.with_name(f"{path.name}.{_run_name()}-{next(_numbers)}{TEMPORARY_SUFFIX}")
    files.make_folder(path.parent)
    try:
        descriptor = files.create(temporary)
        try:
            _write_all(files, descriptor, buffers)
            files.flush(descriptor)
        finally:
            files.close(descriptor)
        files.rename(temporary, path)
        temporary = path
        files.flush_folder(path.parent)
    except OSError:
        with suppress(OSError):
            files.unlink(temporary)
        raise


def is_being_written(path: str) -> bool:
    """Whether this is the temporary name of a file that this process writes, or has left behind."""
    return path.endswith(TEMPORARY_SUFFIX) and f".{_run_name()}-" in path


_BUFFERS_AT_ONCE = 512
"""Half of what POSIX systems take in one call (IOV_MAX is 1024 on Linux and macOS)."""


def _write_all(files: Files, descriptor: int, buffers: Sequence[memoryview]) -> None:
    rest = [buffer.cast("B") for buffer in buffers if buffer.nbytes]
    while rest:
        written = files.write(descriptor, rest[:_BUFFERS_AT_ONCE])
        if written == 0:
            raise OSError(errno.EIO, "a write took no bytes")
        while rest and written >= rest[0].nbytes:
            written -= rest.pop(0).nbytes
        if written:
            rest[0] = rest[0][written:]
