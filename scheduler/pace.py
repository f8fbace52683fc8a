"""When a client that is turned away should come again: from how fast requests have ended lately, by
the times of their events in the journal.
"""

WINDOW_NS = 600 * 10**9
"""Ends older than this say nothing about the present."""

MAX_ENDS = 64
"""Ends that the pace is taken from, the newest."""

RETRY_AFTER_MIN_S = 1
RETRY_AFTER_MAX_S = 120
"""The longest wait that the SDKs follow: beyond two minutes they give the request up."""

RETRY_AFTER_UNKNOWN_S = 5
"""While too few requests have ended to tell."""


class Pace:
    """Written by the loop's thread, read by any: `ends` is replaced and never changed."""

    def __init__(self) -> None:
        self.ends: tuple[int, ...] = ()

    def ended(self, at_ns: int) -> None:
        """A request ended: it gave its row, or its place in the queue, to another."""
        self.ends = (*self.ends[1 - MAX_ENDS :], at_ns)

    def retry_after_s(self, now_ns: int, num_before: int) -> int:
        """The mean time between two ends, once for each request in the queue: whole seconds within
        the bounds.
        """
        ends = [at_ns for at_ns in self.ends if at_ns >= now_ns - WINDOW_NS]
        if len(ends) < 2:
            return RETRY_AFTER_UNKNOWN_S
        mean_ns = max(0, now_ns - ends[0]) // (len(ends) - 1)
        seconds = -(-mean_ns * max(1, num_before) // 10**9)
        return min(max(seconds, RETRY_AFTER_MIN_S), RETRY_AFTER_MAX_S)
