"""Blocks from the memory tier or from SSD, read and checked ahead of the thread that needs them."""

import queue
import threading
from collections import deque
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
Announce = Callable[[KeptFile], int]
Examine = Callable[[KeptFile], ReadFailed | None]

ANNOUNCED_BYTES = 2**30
"""How much of a chain the system may read into its own file cache beforehand: about what a disk
gives while the memory of a row is made ready.
"""


def announce_nothing(_: KeptFile) -> int:
    """For blocks that no system reads."""
    return 0


def examine_nothing(_: KeptFile) -> None:
    """For chains of which nobody asks what else is bad."""


class ReadAhead:
    """A thread that reads files in order, one ahead: while the row is filled from one block, the
    next is being read. So there are never more than two.

    `ready` is called in that thread whenever there is something to take. After a `ReadFailed`
    nothing follows: the chain is broken there. `end_thread` is the last that the thread does.
    `announce` is told of files some time before they are fetched, and returns the bytes that the
    system begins to read (see `BlockStore.read_soon`).

    Where one file is bad, others are likely to be. So what follows it and the `others`, which are
    not read, are then examined: what that says of them is in `also_bad` before the `ReadFailed` can
    be taken. A disk that fails is asked no further.
    """

    def __init__(
        self,
        fetch: Fetch,
        files: Sequence[KeptFile],
        ready: Callable[[], None],
        end_thread: Callable[[], None],
        *,
        announce: Announce = announce_nothing,
        examine: Examine = examine_nothing,
        others: Sequence[KeptFile] = (),
    ) -> None:
        self.also_bad: list[ReadFailed] = []
        self._fetch = fetch
        self._files = files
        self._ready = ready
        self._end_thread = end_thread
        self._announce = announce
        self._examine = examine
        self._others = others
        self._announced: deque[int] = deque()
        self._announced_bytes = 0
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
            for number, file in enumerate(self._files):
                self._announce_from(number)
                self._may_read.acquire()
                if self._closed or not self._hand_over(number, file):
                    return
        finally:
            self._end_thread()

    def _announce_from(self, number: int) -> None:
        """Announces this file and those after it, up to the bound, unless they were before."""
        if self._announced:
            self._announced_bytes -= self._announced.popleft()
        following = number + len(self._announced)
        while following < len(self._files) and self._announced_bytes < ANNOUNCED_BYTES:
            num_bytes = self._announce(self._files[following])
            self._announced.append(num_bytes)
            self._announced_bytes += num_bytes
            following += 1

    def _hand_over(self, number: int, file: KeptFile) -> bool:
        result: Read | ReadFailed = ReadFailed(file, "io_error", "the reader died")
        try:
            result = self._fetch(file)
            if isinstance(result, ReadFailed):
                self._look_on([*self._files[number + 1 :], *self._others])
        finally:
            # Also after an error of ours: whoever waits for the block must not wait for ever.
            self._results.put(result)
            self._ready()
        return isinstance(result, Read)

    def _look_on(self, files: Sequence[KeptFile]) -> None:
        """Notes which of these are bad as well. There are no more than the chain has."""
        for file in files:
            if self._closed:
                return
            found = self._examine(file)
            if found is None:
                continue
            if found.kind == "io_error":
                return  # each further file might take as long, and may be good another time
            self.also_bad.append(found)
