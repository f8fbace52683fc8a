"""Files that fail when they are told to."""

import errno
import os
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from scheduler.kvcache.files import OsFiles


class Crashed(BaseException):
    """The process is dead from here on. Not an OSError: nothing may tidy up after it."""


class FaultyFiles(OsFiles):
    """The operating system's files, with faults.

    `calls` are the operations so far, in order. With `quota_bytes` the files written through here
    fill a file system of that size; `most_at_once` makes writes short; clearing `may_write` holds
    writers back; with `crash_after` that many operations happen and then none any more.
    """

    def __init__(
        self,
        *,
        quota_bytes: int | None = None,
        most_at_once: int | None = None,
        crash_after: int | None = None,
    ) -> None:
        self.calls: list[str] = []
        self.may_write = threading.Event()
        self.may_write.set()
        self.quota_bytes = quota_bytes
        self._most_at_once = most_at_once
        self._crash_after = crash_after
        self._faults: dict[str, tuple[int, int]] = {}
        self._numbers: Counter[str] = Counter()
        self._used_bytes = 0
        self._lock = threading.Lock()

    def fail(self, operation: str, number: int, error: int) -> None:
        """Lets the call of this operation with this number fail, counted from now; 0: every one."""
        self._numbers[operation] = 0
        self._faults[operation] = (number, error)

    def heal(self) -> None:
        """No more faults."""
        self._faults.clear()
        self.quota_bytes = None

    def create(self, path: Path) -> int:
        self._enter("create")
        return super().create(path)

    def write(self, descriptor: int, buffers: Sequence[memoryview]) -> int:
        self.may_write.wait()
        self._enter("write")
        data = b"".join(buffers)[: self._most_at_once]
        with self._lock:
            room = len(data) if self.quota_bytes is None else self.quota_bytes - self._used_bytes
            data = data[: max(0, room)]
            self._used_bytes += len(data)
        if not data:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(descriptor, [memoryview(data)])

    def flush(self, descriptor: int) -> None:
        self._enter("flush")
        super().flush(descriptor)

    def close(self, descriptor: int) -> None:
        super().close(descriptor)
        self._enter("close")

    def rename(self, old: Path, new: Path) -> None:
        self._enter("rename")
        super().rename(old, new)

    def flush_folder(self, folder: Path) -> None:
        self._enter("flush_folder")
        super().flush_folder(folder)

    def open(self, path: Path) -> int:
        self._enter("open")
        return super().open(path)

    def read(self, descriptor: int, num_bytes: int) -> bytes:
        self._enter("read")
        return super().read(descriptor, num_bytes)

    def unlink(self, path: Path) -> None:
        self._enter("unlink")
        num_bytes = path.lstat().st_size
        super().unlink(path)
        with self._lock:
            self._used_bytes -= num_bytes

    def list_folder(self, folder: Path) -> Iterable[os.DirEntry[str]]:
        self._enter("list_folder")
        return super().list_folder(folder)

    def free_bytes(self, folder: Path) -> int:
        self._enter("free_bytes")
        if self.quota_bytes is None:
            return super().free_bytes(folder)
        return max(0, self.quota_bytes - self._used_bytes)

    def _enter(self, operation: str) -> None:
        with self._lock:
            if self._crash_after is not None and len(self.calls) >= self._crash_after:
                raise Crashed
            self.calls.append(operation)
            self._numbers[operation] += 1
            number, error = self._faults.get(operation, (-1, 0))
            if number in (0, self._numbers[operation]):
                raise OSError(error, os.strerror(error))
