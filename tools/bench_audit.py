"""`fermata bench audit`: how long each audit takes on ten million events.

bench_long_journal.py makes the file. Each audit is a process of its own, as users run it, and
writes its table. The machine has just written the file, so much of it is read from memory. The
processor's time tells how much of the time was waiting, on a machine that does other things.
"""

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from journal.files import journal_file
from tools.bench_common import Measurement, measure, show
from tools.bench_long_journal import write_long
from tools.cli_audit import audit_app

SEED = 1
AT_MOST_S = 2
LIMIT_S = 120
AUDITS = tuple(command.name for command in audit_app.registered_commands if command.name)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    rounds: int = 3
    events: int = 10_000_000


QUICK = Size(rounds=1, events=100_000)


def run(size: Size, folder: Path | None, *, as_json: bool) -> int:
    """Measures, shows, and returns the exit status: 1 when a target is missed. The journal is
    written to `folder`, takes some 230 bytes an event, and is removed again.
    """
    with tempfile.TemporaryDirectory(prefix="fermata-bench-", dir=folder) as name:
        print(f"makes a journal of {size.events:,} events", flush=True)
        state = Path(name)
        begun = time.monotonic()
        num_events = write_long(state, size.events, SEED)
        made_s = time.monotonic() - begun
        details = {
            "events": num_events,
            "journal bytes": journal_file(state).stat().st_size,
            "seconds to make it": round(made_s, 1),
        }
        measurements = list(measured(state, size.rounds))
    show("audit", measurements, seed=SEED, as_json=as_json, details=details)
    return int(any(measurement.met is False for measurement in measurements))


def measured(state: Path, rounds: int) -> Iterator[Measurement]:
    """Each audit over all of the journal, the slowest first."""
    taken = {name: [seconds(state, name) for _ in range(rounds)] for name in AUDITS}
    clock = [
        measure(name, "s", [each.clock for each in times], at_most=AT_MOST_S)
        for name, times in taken.items()
    ]
    yield from sorted(clock, key=lambda measurement: -measurement.value)
    for name, times in taken.items():
        yield measure(f"{name}, processor", "s", [each.processor for each in times])


class Seconds(NamedTuple):
    """From the start of a command to its end: on the clock, and of the processor."""

    clock: float
    processor: float


def seconds(state: Path, name: str) -> Seconds:
    """How long an audit takes. Raises CalledProcessError."""
    command = (sys.executable, "-m", "tools.cli", "audit", name, str(state))
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=LIMIT_S)
    clock, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Seconds(clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
