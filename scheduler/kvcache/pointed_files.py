"""The operating system's files, with a named point before and after each operation that matters.

Used only in a process that is there to be ended at one of them (see journal/crashpoints.py).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from journal.crashpoints import is_armed, reach
from scheduler.kvcache.files import TEMPORARY_SUFFIX, Files, OsFiles
from scheduler.kvcache.naming import KEY_FILE

PROBE = "probe"
TAILS = "tails"
FOLDER_OF_BLOCKS_LENGTH = 2
"""Its name is the first two digits of the hashes in it."""


def default_files() -> Files:
    """What a store works with, unless a test brings its own."""
    return PointedFiles() if is_armed() else OsFiles()


def what_of(path: Path) -> str:
    """Whose file this is, as the points say it; also under its temporary name."""
    name = path.name.partition(".")[0]
    if name in (KEY_FILE, PROBE):
        return name
    if path.parent.name == TAILS:
        return "tail"
    return "state" if ".state." in path.name else "block"


def what_is_removed(path: Path) -> str:
    """The same of a file that goes."""
    return "unknown" if path.name.endswith(TEMPORARY_SUFFIX) else what_of(path)


def folder_of(folder: Path) -> str:
    """Which of the store's folders this is."""
    if folder.name == TAILS:
        return "tails"
    return "blocks" if len(folder.name) == FOLDER_OF_BLOCKS_LENGTH else "parent"


@contextmanager
def between(operation: str, what: str) -> Iterator[None]:
    """The points before and after an operation that comes through."""
    reach(f"file.{operation}.before.{what}")
    yield
    reach(f"file.{operation}.after.{what}")


class PointedFiles(OsFiles):
    """See the module's text. A write takes one buffer at a time, so that a file can be left in the
    middle.
    """

    def __init__(self) -> None:
        self._whats: dict[int, str] = {}

    def make_folder(self, folder: Path) -> None:
        if folder.is_dir():
            return
        reach("file.make_folder.before")
        super().make_folder(folder)
        reach("file.make_folder.after")

    def create(self, path: Path) -> int:
        what = what_of(path)
        with between("create", what):
            descriptor = super().create(path)
            self._whats[descriptor] = what
        return descriptor

    def write(self, descriptor: int, buffers: Sequence[memoryview]) -> int:
        with between("write", self._whats[descriptor]):
            return super().write(descriptor, buffers[:1])

    def flush(self, descriptor: int) -> None:
        with between("flush", self._whats[descriptor]):
            super().flush(descriptor)

    def close(self, descriptor: int) -> None:
        # It is forgotten first: the next file may get the same number.
        self._whats.pop(descriptor)
        super().close(descriptor)

    def rename(self, old: Path, new: Path) -> None:
        with between("rename", what_of(new)):
            super().rename(old, new)

    def flush_folder(self, folder: Path) -> None:
        with between("flush_folder", folder_of(folder)):
            super().flush_folder(folder)

    def open(self, path: Path) -> int:
        what = what_of(path)
        with between("open", what):
            descriptor = super().open(path)
            self._whats[descriptor] = what
        return descriptor

    def read(self, descriptor: int, num_bytes: int) -> bytes:
        with between("read", self._whats[descriptor]):
            return super().read(descriptor, num_bytes)

    def unlink(self, path: Path) -> None:
        with between("unlink", what_is_removed(path)):
            super().unlink(path)
