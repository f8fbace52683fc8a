"""When a client that found the queue full should come again."""

import math
import time
from collections import deque
from collections.abc import Callable

from api.settings import RETRY_AFTER_MAX_S, RETRY_AFTER_MIN_S

NUM_ENDS = 32
"""Ends that the pace is taken from."""


class Pace:
    """How fast requests end: each end frees a place in the queue."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends: deque[float] = deque(maxlen=NUM_ENDS)

    def ended(self) -> None:
        """A request ended just now."""
        self._ends.append(self._clock())

    def retry_after_s(self) -> int:
        """The mean time between two ends, in whole seconds within the bounds; the lower bound
        while too few have ended to tell.
        """
        if len(self._ends) < 2:
            return RETRY_AFTER_MIN_S
        mean_s = (self._clock() - self._ends[0]) / (len(self._ends) - 1)
        return min(max(math.ceil(mean_s), RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)
