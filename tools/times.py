"""Times as people give them to commands."""

import re
from datetime import UTC, datetime

UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
NS_PER_S = 10**9
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class NoTime(Exception):
    """What was given names no time. One line, with what to write."""


def moment(text: str, last_ns: int) -> int:
    """Nanoseconds since 1970 of a time in ISO 8601 (UTC unless it says otherwise), or of so long
    before the journal's last event, as in 90m. Raises NoTime.
    """
    if found := re.fullmatch(r"(\d{1,9})([smhd])", text, re.ASCII):
        return last_ns - int(found[1]) * UNITS_S[found[2]] * NS_PER_S
    try:
        at = datetime.fromisoformat(text)
        since_1970 = (at if at.tzinfo else at.replace(tzinfo=UTC)) - EPOCH
    except (ValueError, OverflowError):
        raise NoTime(
            f"{text} is no time: write 2026-01-31T12:00, or 90m for as long before the last event"
        ) from None
    whole_s = since_1970.days * 86_400 + since_1970.seconds
    return whole_s * NS_PER_S + since_1970.microseconds * 1_000
