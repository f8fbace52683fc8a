"""Blocks from the memory tier or from SSD, read and checked ahead of the thread that needs them."""

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import mlx.core as mx

from scheduler.kvcache.arrays import Block, block_checksum
from scheduler.kvcache.naming import KeptFile
from scheduler.kvcache.store import BlockStore, OpenFile, ReadFailed, Unreadable
from scheduler.kvcache.tier import MemoryTier


@dataclass(frozen=True)
class Read:
    """A block whose every bit has been checked, and where it came from."""

    file: KeptFile
    block: Block
    tier: Literal["memory", "ssd"]
    duration_ns: int


Loader = Callable[[str], Block]


def load_block(path: str) -> Block:
    """The arrays of a safetensors file, evaluated. Raises RuntimeError when they cannot be read."""
    block = cast("dict[str, mx.array]", mx.load(path))
    mx.eval(block)
    return block


def read(store: BlockStore, file: KeptFile, load: Loader = load_block) -> Read | ReadFailed:
    """Reads a file of the store. May be called in any thread; one that ends afterwards calls
    `mx.clear_streams()` first.
    """
    begun_ns = time.monotonic_ns()
    try:
        with OpenFile(store, file) as opened:
            if not opened.header.names:
                return Read(file, {}, "ssd", time.monotonic_ns() - begun_ns)
            try:
                block = load(str(store.path(file)))
            except RuntimeError as error:
                return ReadFailed(file, "io_error", str(error))
            # The bytes that are checked are those that will be used, not a second reading.
            opened.compare(block_checksum(block, opened.header.names))
    except Unreadable as error:
        return error.failed
    return Read(file, block, "ssd", time.monotonic_ns() - begun_ns)


def fetch(store: BlockStore, tier: MemoryTier, file: KeptFile) -> Read | ReadFailed:
    """The file from the memory tier, or from the store and then into the tier."""
    block = tier.get(file)
    if block is not None:
        return Read(file, block, "memory", 0)
    found = read(store, file)
    if isinstance(found, Read):
        tier.put(file, found.block)
    return found


Fetch = Callable[[KeptFile], Read | ReadFailed]


class ReadAhead:
    """A thread that reads files in order, one ahead: while the row is filled from one block, the
    next is being read. So there are never more than two.

    `ready` is called in that thread whenever there is something to take. After a `ReadFailed`
    nothing follows: the chain is broken there.
    """

    def __init__(self, fetch: Fetch, files: Sequence[KeptFile], ready: Callable[[], None]) -> None:
        self._fetch = fetch
        self._files = files
        self._ready = ready
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
            mx.clear_streams()

    def _hand_over(self, file: KeptFile) -> bool:
        result: Read | ReadFailed = ReadFailed(file, "io_error", "the reader died")
        try:
            result = self._fetch(file)
        finally:
            # Also after an error of ours: whoever waits for the block must not wait for ever.
            self._results.put(result)
            self._ready()
        return isinstance(result, Read)
