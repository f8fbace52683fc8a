"""When to come again."""

from scheduler.pace import MAX_ENDS, WINDOW_NS, Pace

SECOND = 10**9


def ending_every(seconds: float, num_ends: int) -> tuple[Pace, int]:
    """A pace after so many ends, and the time of the last."""
    pace, now_ns = Pace(), 1_000 * SECOND
    for _ in range(num_ends):
        now_ns += int(seconds * SECOND)
        pace.ended(now_ns)
    return pace, now_ns


def test_without_ends_nothing_is_known() -> None:
    pace, now_ns = ending_every(3, 1)
    assert pace.retry_after_s(now_ns, 0) == 5
    assert Pace().retry_after_s(now_ns, 1_000) == 5


def test_it_is_the_mean_time_between_ends_for_each_that_waits() -> None:
    pace, now_ns = ending_every(4, 10)
    assert pace.retry_after_s(now_ns, 0) == 4
    assert pace.retry_after_s(now_ns, 1) == 4
    assert pace.retry_after_s(now_ns, 7) == 28
    assert pace.retry_after_s(now_ns + 18 * SECOND, 1) == 6, "nothing has ended since"


def test_it_stays_within_its_bounds() -> None:
    pace, now_ns = ending_every(40, 10)
    assert pace.retry_after_s(now_ns, 1_000) == 120
    pace, now_ns = ending_every(0.01, MAX_ENDS * 2)
    assert pace.retry_after_s(now_ns, 3) == 1
    assert len(pace.ends) == MAX_ENDS


def test_what_ended_long_ago_counts_no_more() -> None:
    pace, now_ns = ending_every(1, 10)
    assert pace.retry_after_s(now_ns + WINDOW_NS, 50) == 5
    pace.ended(now_ns + WINDOW_NS)
    pace.ended(now_ns + WINDOW_NS + 2 * SECOND)
    assert pace.retry_after_s(now_ns + WINDOW_NS + 2 * SECOND, 5) == 10
