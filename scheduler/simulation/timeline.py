"""Virtual time: a clock that is set, and what happens at its moments, in order."""

import heapq
from collections.abc import Callable

START_NS = 1_700_000_000_000_000_000
"""The wall clock's time when a simulation begins, so that no time in it is 0 or negative."""


class Timeline:
    """A clock (see `scheduler.clock.Clock`) with the events to come. What is planned for the same
    moment happens in the order in which it was planned. `jump_ns` is how far the wall clock was
    set from where it would be.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self.jump_ns = 0
        self._planned: list[tuple[int, int, Callable[[], None], bool]] = []
        self._count = 0

    def wall_ns(self) -> int:
        return START_NS + self.now_ns + self.jump_ns

    def monotonic_ns(self) -> int:
        return self.now_ns

    def at(self, due_ns: int, happen: Callable[[], None], *, outside: bool = False) -> None:
        """Plans something, now at the earliest. What comes from outside the server comes also when
        its process has died by then.
        """
        self._count += 1
        heapq.heappush(self._planned, (max(due_ns, self.now_ns), self._count, happen, outside))

    def next_ns(self) -> int | None:
        """When the next planned thing happens."""
        return self._planned[0][0] if self._planned else None

    def go_to(self, moment_ns: int) -> None:
        """Sets the clock to this moment, and lets happen what is due until then: which may itself
        wait for a later one.
        """
        while self._planned and self._planned[0][0] <= moment_ns:
            due_ns, _, happen, _ = heapq.heappop(self._planned)
            self.now_ns = max(due_ns, self.now_ns)
            happen()
        self.now_ns = max(moment_ns, self.now_ns)

    def forget(self) -> None:
        """Nothing of what was planned happens any more, but for what comes from outside."""
        self._planned = [planned for planned in self._planned if planned[3]]
        heapq.heapify(self._planned)
