"""mlx's allocator, whose one peak two want to know: the chunk at hand, and whoever reads memory."""

import threading

import mlx.core as mx

from scheduler.engine.base import MemoryReading


class Allocator:
    """Its counters, in bytes. Safe for several threads; nobody else resets the peak."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._chunk_peak_bytes = 0
        self._peak_bytes = 0

    def begin_chunk(self) -> None:
        """The peak of a chunk is counted from here on."""
        with self._lock:
            self._take_peak()
            self._chunk_peak_bytes = 0

    def chunk_peak_bytes(self) -> int:
        """The most that was in use since the chunk began."""
        with self._lock:
            self._take_peak()
            return max(self._chunk_peak_bytes, mx.get_active_memory())

    def read(self) -> MemoryReading:
        """See `MemoryReading`."""
        with self._lock:
            self._take_peak()
            active_bytes = mx.get_active_memory()
            peak_bytes, self._peak_bytes = max(self._peak_bytes, active_bytes), 0
            return MemoryReading(active_bytes, mx.get_cache_memory(), peak_bytes)

    def _take_peak(self) -> None:
        """Adds the peak since the last look to both; mlx counts from 0 again after a reset."""
        peak_bytes = mx.get_peak_memory()
        mx.reset_peak_memory()
        self._chunk_peak_bytes = max(self._chunk_peak_bytes, peak_bytes)
        self._peak_bytes = max(self._peak_bytes, peak_bytes)
