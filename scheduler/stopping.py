"""A clean stop in time: rows go on until the drain is over, what is left of them is then held, and
after that limit, or a second wish to stop, the process ends as it is.
"""

import threading

from scheduler.clock import Clock
from scheduler.settings import NS_PER_MS, NS_PER_S, ServerSettings


class Stopping:
    """The limits of one stop. `begin` and `at_once` are any thread's."""

    def __init__(self, settings: ServerSettings, clock: Clock) -> None:
        self.at_once = threading.Event()
        self._settings = settings
        self._clock = clock
        self._began_ns: int | None = None

    @property
    def begun(self) -> bool:
        """Whether somebody wants a stop."""
        return self._began_ns is not None

    def begin(self) -> None:
        """From here on the limits run."""
        self._began_ns = self._clock.monotonic_ns()

    def drain_is_over(self) -> bool:
        """Whether rows have gone on for as long as they may."""
        return self.begun and self._left_ns(self._settings.drain_limit_ms) <= 0

    def is_over(self) -> bool:
        """Whether nothing more is waited for."""
        limit_ms = self._settings.drain_limit_ms + self._settings.hold_limit_ms
        return self.at_once.is_set() or (self.begun and self._left_ns(limit_ms) <= 0)

    def wait_s(self) -> float:
        """Until the next of the two limits."""
        drain_ns = self._left_ns(self._settings.drain_limit_ms)
        if drain_ns > 0:
            return drain_ns / NS_PER_S
        limit_ms = self._settings.drain_limit_ms + self._settings.hold_limit_ms
        return self._left_ns(limit_ms) / NS_PER_S

    def _left_ns(self, limit_ms: int) -> int:
        assert self._began_ns is not None
        return self._began_ns + limit_ms * NS_PER_MS - self._clock.monotonic_ns()
