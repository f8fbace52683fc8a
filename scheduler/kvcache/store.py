"""The block store: files on SSD, written so that they are whole or absent, checked when read.

It knows no index: what should be there, what may go and what may be read is the scheduler's
business, and recorded in the journal.
"""

import errno
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from xxhash import xxh3_128

from scheduler.kvcache import fileformat
from scheduler.kvcache.fileformat import Damaged, Header, Tensor
from scheduler.kvcache.files import Files, OsFiles, is_being_written, write_whole
from scheduler.kvcache.naming import KeptFile

READ_AT_ONCE_BYTES = 2**20

_ZEROS = memoryview(bytes(2**20))
_PROBE = "probe"

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
ABSENT = (errno.ENOENT, errno.ENOTDIR)
OBSTRUCTED = (errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EEXIST)
UNUSABLE = (errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.ENXIO, errno.EINVAL)
"""What opening or reading something says that is there but is no file of ours any more."""

SaveFailure = Literal["disk_full", "io_error", "obstructed", "given_up"]
ReadFailure = Literal["missing", "corrupt", "io_error"]


@dataclass(frozen=True, slots=True)
class Saved:
    """The file is on disk and durable. `file_bytes` is its size, header included."""

    file: KeptFile
    file_bytes: int
    duration_ns: int


@dataclass(frozen=True, slots=True)
class SaveFailed:
    """The file is not on disk.

    `disk_full`: no space, or less than the reserve; `obstructed`: a folder stands in its place,
    or a file in that of its folder, which is in the way of nothing else;
    `given_up`: it was not tried, because saving has stopped or the server ends. `num_bytes` is
    what it would have taken.
    """

    file: KeptFile
    kind: SaveFailure
    detail: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """The file cannot be used. `corrupt` covers all that is there and is not what was written."""

    file: KeptFile
    kind: ReadFailure
    detail: str


class Unreadable(Exception):
    """Carries a `ReadFailed` out of nested calls."""

    def __init__(self, failed: ReadFailed) -> None:
        super().__init__(failed.detail)
        self.failed = failed


class BlockStore:
    """Files below `folder`. Safe for several threads, as long as no two write the same file.

    `reserve_bytes` stay free on the file system: a save that would go below is `disk_full`.
    """

    def __init__(self, folder: Path, files: Files | None = None, reserve_bytes: int = 0) -> None:
        self.folder = folder
        self.files = files or OsFiles()
        self._reserve_bytes = reserve_bytes
        self._durable: set[Path] = set()
        self._sweeping = threading.Lock()
        self._written: set[str] | None = None

    def path(self, file: KeptFile) -> Path:
        """Where the file is or would be."""
        return self.folder / file.path

    def save(self, file: KeptFile, tensors: Mapping[str, Tensor]) -> Saved | SaveFailed:
        """Writes the file and makes it durable. Takes the place of an older one of that name."""
        begun_ns = time.monotonic_ns()
        head, data = fileformat.encode(tensors, {"domain": file.domain, "name": file.name})
        file_bytes = len(head) + sum(piece.nbytes for piece in data)
        try:
            self._keep_reserve(file_bytes)
        except OSError as error:  # It is the whole store's trouble, also if something obstructs it.
            kind = "disk_full" if error.errno in FULL else "io_error"
            return SaveFailed(file, kind, str(error), file_bytes)
        try:
            self._write(file.path, [memoryview(head), *data])
        except OSError as error:
            return SaveFailed(file, save_failure(error), str(error), file_bytes)
        return Saved(file, file_bytes, time.monotonic_ns() - begun_ns)

    def probe(self, num_bytes: int) -> OSError | None:
        """Tries to write and remove a file of this size. Returns what stands in the way."""
        try:
            self._keep_reserve(num_bytes)
            whole, rest = divmod(num_bytes, len(_ZEROS))
            self._write(_PROBE, [_ZEROS] * whole + [_ZEROS[:rest]])
            self.files.unlink(self.folder / _PROBE)
        except OSError as error:
            return error
        return None

    def verify(self, file: KeptFile) -> int | ReadFailed:
        """Reads the whole file and checks every bit of it, with little memory. Returns its size."""
        try:
            with OpenFile(self, file) as opened:
                opened.check_data()
                return opened.header.header_bytes + opened.header.data_bytes
        except Unreadable as error:
            return error.failed

    def glance(self, file: KeptFile) -> ReadFailed | None:
        """What is wrong with a file as far as its size and its header say: no data is read."""
        try:
            with OpenFile(self, file):
                return None
        except Unreadable as error:
            return error.failed

    def read_soon(self, file: KeptFile) -> int:
        """Lets the system begin to read a file. Returns its bytes, or 0 when it cannot be opened:
        reading it will say why.
        """
        try:
            descriptor = self.files.open(self.path(file))
        except OSError:
            return 0
        try:
            self.files.read_soon(descriptor)
            return self.files.size(descriptor)
        except OSError:
            return 0
        finally:
            self.files.close(descriptor)

    def remove(self, file: KeptFile) -> OSError | None:
        """Removes the file, or an empty folder in its place; nothing there is fine as well.

        Returns what stood in the way: a folder that is not empty holds what is not ours.
        """
        path = self.path(file)
        try:
            if path.is_dir() and not path.is_symlink():
                self.files.remove_folder(path)
            else:
                self.files.unlink(path)
        except OSError as error:
            return None if error.errno in ABSENT else error
        return None

    def begin_sweep(self) -> None:
        """From here on the store remembers what it writes, so that `sweep` spares it. Called before
        anything is written.
        """
        self._written = set()

    def sweep(self, path: str) -> bool:
        """Removes a file that nobody knows, unless it was written since `begin_sweep`, or is about
        to be: then nothing happens, and this returns False. Raises OSError.
        """
        with self._sweeping:
            assert self._written is not None, "what is written must be remembered"
            if path in self._written or is_being_written(path):
                return False
            self.files.unlink(self.folder / path)
            return True

    def end_sweep(self) -> None:
        """Nothing is swept any more."""
        with self._sweeping:
            self._written = None

    def free_bytes(self) -> int:
        """What may still be written to the file system, the reserve included. Raises OSError."""
        self.files.make_folder(self.folder)
        return self.files.free_bytes(self.folder)

    def _write(self, path: str, buffers: Sequence[memoryview]) -> None:
        """Writes a file. Its name is noted before there is anything under it, while no sweep is
        between looking at the names and removing a file: so whatever a sweep removes is older.
        """
        with self._sweeping:
            if self._written is not None:
                self._written.add(path)
        whole = self.folder / path
        self._keep_folders(whole.parent)
        write_whole(self.files, whole, buffers)

    def _keep_folders(self, folder: Path) -> None:
        """Makes the folders down to this one, and each of their names durable.

        A folder that is there is not enough: the thread that made it may still have to flush the
        one above it, or its process has died before that. So this process does it once itself.
        """
        inside = [above for above in folder.parents if above.is_relative_to(self.folder)]
        for each in (*reversed(inside), folder):
            if each not in self._durable or not each.is_dir():
                self.files.make_folder(each)
                self.files.flush_folder(each.parent)
                self._durable.add(each)

    def _keep_reserve(self, num_bytes: int) -> None:
        free = self.free_bytes()
        if free - num_bytes < self._reserve_bytes:
            text = f"{free} bytes are free, {num_bytes} are needed, {self._reserve_bytes} stay free"
            raise OSError(errno.ENOSPC, text)


class OpenFile:
    """A file of the store that is being read, its header checked.

    Everything that goes wrong, in `with` and in the methods, is raised as Unreadable.
    """

    def __init__(self, store: BlockStore, file: KeptFile) -> None:
        self._files = store.files
        self._path = store.path(file)
        self._file = file
        self._descriptor = -1
        self.header: Header

    def __enter__(self) -> Self:
        try:
            self._descriptor = self._files.open(self._path)
        except OSError as error:
            raise self._unreadable(error) from error
        try:
            self.header = self._read_header()
        except (OSError, Damaged) as error:
            self._files.close(self._descriptor)
            raise self._unreadable(error) from error
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close(self._descriptor)

    def check_data(self) -> None:
        """Reads the data and compares its checksum."""
        digest = xxh3_128()
        try:
            for piece in self._pieces(self.header.data_bytes):
                digest.update(piece)
        except (OSError, Damaged) as error:
            raise self._unreadable(error) from error
        self.compare(digest.hexdigest())

    def compare(self, checksum: str) -> None:
        """Raises Unreadable unless the data has the checksum that was written."""
        if checksum != self.header.data_checksum:
            raise self._unreadable(Damaged("the data does not have its checksum"))

    def _read_header(self) -> Header:
        size = self._files.size(self._descriptor)
        first = b"".join(self._pieces(min(size, fileformat.FIRST_BYTES)))
        rest = fileformat.header_length(first, size) - len(first)
        header = fileformat.decode(first + b"".join(self._pieces(rest)), size)
        named = (header.metadata["domain"], header.metadata["name"])
        if named != (self._file.domain, self._file.name):
            raise Damaged(f"the file says that it is {named[1]} of domain {named[0]}")
        return header

    def _pieces(self, num_bytes: int) -> Iterator[bytes]:
        while num_bytes > 0:
            piece = self._files.read(self._descriptor, min(num_bytes, READ_AT_ONCE_BYTES))
            if not piece:
                raise Damaged(f"the file ends {num_bytes} bytes early")
            num_bytes -= len(piece)
            yield piece

    def _unreadable(self, error: OSError | Damaged) -> Unreadable:
        return Unreadable(ReadFailed(self._file, read_failure(error), str(error)))


def save_failure(error: OSError) -> SaveFailure:
    """What a failed write means for saving."""
    if error.errno in FULL:
        return "disk_full"
    return "obstructed" if error.errno in OBSTRUCTED else "io_error"


def read_failure(error: OSError | Damaged) -> ReadFailure:
    """What a failed read means for the file: whether it may be good another time."""
    if isinstance(error, Damaged) or error.errno in UNUSABLE:
        return "corrupt"
    return "missing" if error.errno in ABSENT else "io_error"
