"""A trace on a server that need not exist: which ceiling does it need, and which budget on disk?"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from journal.events import RequestRejected
from scheduler.settings import ConfigurationError, Settings
from scheduler.simulation.hardware import Hardware
from scheduler.whatif.configuration import plain_settings
from scheduler.whatif.rerun import Coming, Rerun, RerunWorld, Watch
from scheduler.whatif.totals import Totals
from scheduler.whatif.trace import line_of

MAX_CELLS = 64
"""More combinations of ceilings and disk budgets are a mistake."""

CEILING, DISK = "memory.ceiling", "kv.max_bytes"


def cells_of(ceilings: Sequence[str], budgets: Sequence[str]) -> list[dict[str, object]]:
    """The settings of each combination. Raises ConfigurationError for too many."""
    by_ceiling: list[dict[str, object]] = [{CEILING: value} for value in ceilings] or [{}]
    by_budget: list[dict[str, object]] = [{DISK: value} for value in budgets] or [{}]
    cells = [one | other for one, other in product(by_ceiling, by_budget)]
    if len(cells) > MAX_CELLS:
        raise ConfigurationError(
            f"{len(cells)} combinations of --ceiling and --ssd; {MAX_CELLS} are possible"
        )
    return cells


def settings_without_journal(changes: Mapping[str, object]) -> Settings:
    """Those of a server that was set to nothing else, without a ceiling of its own, and with a disk
    of its own.
    """
    return plain_settings({CEILING: "none", "kv.reserve_bytes": 0, **changes})


class Sized(NamedTuple):
    """What a trace came to, and the first of its requests that would not fit if it were alone."""

    totals: Totals
    refusal: RequestRejected | None


def run_trace(
    coming: Iterable[Coming], settings: Settings, hardware: Hardware, watch: Watch | None = None
) -> Sized:
    """What these requests come to. Raises Stuck when they come to no end."""
    rerun = Rerun(coming, RerunWorld(settings, hardware, checks=False))
    rerun.run(watch)
    return Sized(rerun.totals(), rerun.refusal)


def why_refused(refusal: RequestRejected) -> str:
    """Which line never fits, and the numbers that say so."""
    numbers = refusal.numbers
    assert numbers is not None, "what never fits is refused with its numbers"
    return (
        f"line {line_of(refusal.request_id)}: its {numbers.prompt_tokens} + {numbers.max_tokens}"
        f" tokens take {numbers.required_bytes} bytes, and there is room for"
        f" {numbers.capacity_bytes}: it never fits"
    )
