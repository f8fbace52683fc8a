"""The fake engine's allocator: no memory, but the bytes that a real one would count."""

import threading

from scheduler.engine.base import MemoryReading


class FakeAllocator:
    """What is given back is kept for reuse, and taken from there first, as mlx does it. Safe for
    several threads.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._used_bytes = 0
        self._cached_bytes = 0
        self._ballast_bytes = 0
        self._peak_bytes = 0

    @property
    def active_bytes(self) -> int:
        """What is in use, with the ballast."""
        with self._lock:
            return self._used_bytes + self._ballast_bytes

    @property
    def usage_bytes(self) -> int:
        """What is in use, with the ballast, and what is kept for reuse."""
        with self._lock:
            return self._used_bytes + self._ballast_bytes + self._cached_bytes

    def take(self, num_bytes: int) -> None:
        """These bytes are in use; a negative number gives them back."""
        with self._lock:
            self._used_bytes += num_bytes
            self._cached_bytes = max(0, self._cached_bytes - num_bytes)
            self._note_peak()

    def set_ballast(self, num_bytes: int) -> None:
        """So many bytes more are in use than anybody has taken: what a test scripts."""
        with self._lock:
            self._ballast_bytes = num_bytes
            self._note_peak()

    def reclaim(self) -> int:
        """Gives back what is kept for reuse. Returns its bytes."""
        with self._lock:
            num_bytes, self._cached_bytes = self._cached_bytes, 0
            return num_bytes

    def read(self) -> MemoryReading:
        """The counters. The peak is that since the reading before."""
        with self._lock:
            active_bytes = self._used_bytes + self._ballast_bytes
            peak_bytes, self._peak_bytes = self._peak_bytes, active_bytes
            return MemoryReading(active_bytes, self._cached_bytes, peak_bytes)

    def _note_peak(self) -> None:
        self._peak_bytes = max(self._peak_bytes, self._used_bytes + self._ballast_bytes)
