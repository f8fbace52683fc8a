"""A disk that stays full must not fill the log."""

from structlog.testing import capture_logs

from scheduler.run import FullLog

SECOND_NS = 1_000_000_000


def test_a_full_disk_is_logged_at_its_beginning_each_minute_and_at_its_end() -> None:
    at_ns = 0
    full_log = FullLog(lambda: at_ns)
    with capture_logs() as logged:
        full_log.commit()
        for second in range(130):
            at_ns = second * SECOND_NS
            full_log.wait()
        full_log.commit()
        full_log.commit()
        full_log.wait()
    assert [(entry["event"].partition(":")[0], entry["waited_s"]) for entry in logged] == [
        ("the journal has no space", 0),
        ("the journal has no space", 60),
        ("the journal has no space", 120),
        ("the journal has space again", 129),
        ("the journal has no space", 0),
    ]
