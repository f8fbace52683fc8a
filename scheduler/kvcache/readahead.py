"""Blocks from the memory tier or from SSD, read and checked ahead of the thread that needs them."""

import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from scheduler.kvcache.naming import KeptFile
from scheduler.kvcache.store import ReadFailed


@dataclass(frozen=True)
class Read:
    """A block whose every bit has been checked, and where it came from. `num_bytes` is what it
    takes in memory, `duration_ns` was spent reading.
    """

    file: KeptFile
    block: Any
    tier: Literal["memory", "ssd"]
    duration_ns: int
    num_bytes: int = 0


Fetch = Callable[[KeptFile], Read | ReadFailed]


class ReadAhead:
    """A thread that reads files in order, one ahead: while the row is filled from one block, the
    next is being read. So there are never more than two.

    `ready` is called in that thread whenever there is something to take. After a `ReadFailed`
    nothing follows: the chain is broken there. `end_thread` is the last that the thread does.
    """

    def __init__(
        self,
        fetch: Fetch,
        files: Sequence[KeptFile],
        ready: Callable[[], None],
        end_thread: Callable[[], None],
    ) -> None:
        self._fetch = fetch
        self._files = files
        self._ready = ready
        self._end_thread = end_thread
        self._may_read = threading.Semaphore(1)
        self._results: queue.SimpleQueue[Read | ReadFailed] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="reader", daemon=True)
        self._thread.start()

    def take(self, *, wait: bool) -> Read | ReadFailed | None:
        """The next block; with `wait` until there is one, else nothing if it is not there yet.

        The caller lets go of the block before it takes another.
        """
        try:
            result = self._results.get(block=wait)
        except queue.Empty:
            return None
        self._may_read.release()
        return result

    def close(self) -> None:
        """Ends the thread after the read in hand, and waits for it."""
        self._closed = True
        self._may_read.release()
        self._thread.join()

    def _run(self) -> None:
        try:
            for file in self._files:
                self._may_read.acquire()
                if self._closed or not self._hand_over(file):
                    return
        finally:
            self._end_thread()

    def _hand_over(self, file: KeptFile) -> bool:
        result: Read | ReadFailed = ReadFailed(file, "io_error", "the reader died")
        try:
            result = self._fetch(file)
        finally:
            # Also after an error of ours: whoever waits for the block must not wait for ever.
            self._results.put(result)
            self._ready()
        return isinstance(result, Read)
