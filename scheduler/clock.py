"""The time as the loop and its sensors read it: one object, so that a simulation can bring its own.

The pure core reads no clock. What it knows of time are the events' own times.
"""

import time
from typing import Protocol


class Clock(Protocol):
    """Read by the loop's thread and by those that hand it something; must be safe in any thread."""

    def wall_ns(self) -> int:
        """Nanoseconds since 1970, as people set it: it may jump, also back."""
        ...

    def monotonic_ns(self) -> int:
        """Nanoseconds since some moment, which never go back: for durations."""
        ...


class SystemClock:
    """The machine's own."""

    def wall_ns(self) -> int:
        return time.time_ns()

    def monotonic_ns(self) -> int:
        return time.monotonic_ns()
