"""A span of time, as audits are asked for it."""

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Literal

NS_PER_S = 10**9
EVER_NS = 2**63 - 1
"""In the year 2262: no later time can be stored."""

Unit = Literal["ms", "minute", "hour"]


@dataclass(frozen=True, slots=True)
class Span:
    """From `first_ns` to `last_ns`, both within it."""

    first_ns: int = 0
    last_ns: int = EVER_NS

    def texts(self, unit: Unit = "ms") -> tuple[str, str]:
        """Both ends as the views write times of this unit. A minute or an hour is within it when
        some of it is.
        """
        return time_text(self.first_ns, unit), time_text(self.last_ns, unit)


ALWAYS = Span()


def time_text(at_ns: int, unit: Unit = "ms") -> str:
    """A time as the views write it."""
    at = datetime.fromtimestamp(min(max(at_ns, 0), EVER_NS) // NS_PER_S, UTC)
    if unit == "hour":
        return f"{at:%Y-%m-%dT%H}:00Z"
    if unit == "minute":
        return f"{at:%Y-%m-%dT%H:%M}Z"
    return f"{at:%Y-%m-%dT%H:%M:%S}.{at_ns // 1_000_000 % 1_000:03}Z"
