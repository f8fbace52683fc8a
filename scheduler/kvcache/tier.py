"""The memory tier: blocks that were used last, bounded in bytes."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from scheduler.kvcache.naming import KeptFile


class MemoryTier:
    """Blocks by the name of their file; the least recently used go first. Safe for several
    threads.

    A block that is handed out stays whole for the one who has it, also when it leaves the tier.
    """

    def __init__(self, capacity_bytes: int, size_of: Callable[[Any], int]) -> None:
        self._size_of = size_of
        self._capacity_bytes = capacity_bytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[KeptFile, Any] = OrderedDict()
        self._held_bytes = 0

    @property
    def held_bytes(self) -> int:
        """What `shrink(0)` would give back, unless somebody else holds on to it."""
        with self._lock:
            return self._held_bytes

    def __len__(self) -> int:
        with self._lock:
            return len(self._blocks)

    def __contains__(self, file: KeptFile) -> bool:
        with self._lock:
            return file in self._blocks

    def put(self, file: KeptFile, block: Any) -> list[KeptFile]:
        """Takes a block as the most recently used one. Returns what left the tier for it: the
        block itself, when it is larger than the tier.
        """
        with self._lock:
            self._take_out(file)
            self._blocks[file] = block
            self._held_bytes += self._size_of(block)
            return self._shrink(self._capacity_bytes)

    def get(self, file: KeptFile) -> Any | None:
        """The block, which is now the most recently used one, or nothing."""
        with self._lock:
            block = self._blocks.get(file)
            if block is not None:
                self._blocks.move_to_end(file)
            return block

    def discard(self, file: KeptFile) -> None:
        """Lets go of a block if it is there."""
        with self._lock:
            self._take_out(file)

    def shrink(self, to_bytes: int) -> list[KeptFile]:
        """Lets the least recently used go until at most `to_bytes` are held. Returns which."""
        with self._lock:
            return self._shrink(to_bytes)

    def _shrink(self, to_bytes: int) -> list[KeptFile]:
        gone: list[KeptFile] = []
        while self._held_bytes > to_bytes:
            oldest = next(iter(self._blocks))
            self._take_out(oldest)
            gone.append(oldest)
        return gone

    def _take_out(self, file: KeptFile) -> None:
        block = self._blocks.pop(file, None)
        if block is not None:
            self._held_bytes -= self._size_of(block)
