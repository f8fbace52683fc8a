"""Files that should be gone and could not be removed, such as on a disk that is read-only for now:
they are tried again, so that what the journal calls gone does not lie there until the next start.
"""

import threading

import structlog

from scheduler.kvcache.naming import KeptFile
from scheduler.kvcache.store import BlockStore

log = structlog.get_logger(__name__)

MAX_LEFTOVERS = 10_000
"""Files that are tried again at most; the next start removes what is beyond."""


class Leftovers:
    """Removes files of a store. Safe for several threads."""

    def __init__(self, store: BlockStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._files: dict[KeptFile, None] = {}

    def __len__(self) -> int:
        with self._lock:
            return len(self._files)

    def remove(self, file: KeptFile) -> None:
        """Removes the file, now or later."""
        error = self._store.remove(file)
        if error is None:
            return
        log.warning("a block's file stays for now", path=file.path, error=str(error))
        with self._lock:
            if len(self._files) < MAX_LEFTOVERS:
                self._files[file] = None

    def keep(self, file: KeptFile) -> None:
        """The file is about to be written anew. To be called before a writer has it."""
        with self._lock:
            self._files.pop(file, None)

    def try_again(self) -> int:
        """Removes what can be removed by now. Returns how many files that were."""
        with self._lock:
            gone = [file for file in self._files if self._store.remove(file) is None]
            for file in gone:
                del self._files[file]
        if gone:
            log.info("files of blocks that had stayed are gone", count=len(gone))
        return len(gone)
