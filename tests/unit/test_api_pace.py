"""When to come again."""

from api.pace import NUM_ENDS, Pace


def test_pace_is_the_mean_time_between_ends_within_its_bounds() -> None:
    now = 100.0
    pace = Pace(lambda: now)
    assert pace.retry_after_s() == 1
    for _ in range(NUM_ENDS * 2):
        now += 40.0
        pace.ended()
    assert pace.retry_after_s() == 40
    now += 10_000.0
    assert pace.retry_after_s() == 60
    for _ in range(NUM_ENDS):
        now += 0.01
        pace.ended()
    assert pace.retry_after_s() == 1
