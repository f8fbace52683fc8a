"""`fermata bench audit`: how long each audit takes on ten million events.

bench_long_journal.py makes the file. Each audit is a process of its own, as users run it, and
writes its table: over all of the journal, over its second half and over an hour in its middle. The
machine has just written the file, so much of it is read from memory. The processor's time tells
how much of the time was waiting, on a machine that does other things.

An export of the first hour is the work for an hour alone. Before a later one comes the fold from
the newest point, of 100,000 events or a few more, which this file does not allow.
"""

import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import NamedTuple

from journal.files import journal_file
from journal.moments import bounds
from journal.reader import JournalReader
from tools.bench_common import Measurement, measure, show
from tools.bench_long_journal import write_long
from tools.cli_audit import audit_app

SEED = 1
AT_MOST_S = 2
HELP_AT_MOST_S = 0.7
EXPORT_AT_MOST_S = 10
S = 10**9
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
    """Each audit over each span, the slowest first; then what else is asked of the file."""
    commands = dict(audits(state))
    taken = {name: [seconds(*each) for _ in range(rounds)] for name, each in commands.items()}
    clock = [
        measure(name, "s", [each.clock for each in times], at_most=AT_MOST_S)
        for name, times in taken.items()
    ]
    yield from sorted(clock, key=lambda measurement: -measurement.value)
    most = [max(times[index].processor for times in taken.values()) for index in range(rounds)]
    yield measure("the most processor time of an audit", "s", most)
    helps = [seconds("audit", "--help").clock for _ in range(rounds)]
    yield measure("audit --help", "s", helps, at_most=HELP_AT_MOST_S)
    exports = [export_s(state) for _ in range(rounds)]
    yield measure("journal export, the first hour", "s", exports, at_most=EXPORT_AT_MOST_S)


def audits(state: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """The commands, by what is measured. Spans are counted back from the last event."""
    with JournalReader.open(state) as reader, reader.transaction() as run:
        first, last = bounds(run) or (0, 0)
        times = run("SELECT at_ns FROM events WHERE seq IN (?, ?)", (first, last)).fetchall()
    half_s = (times[-1][0] - times[0][0]) // 2 // S
    half, hour = f"{half_s}s", f"{max(0, half_s - 3_600)}s"
    for name in AUDITS:
        command = ("audit", name, str(state))
        yield name, command
        if name == "at":
            yield f"{name}, in the middle", (*command, "--time", half)
        else:
            yield f"{name}, second half", (*command, "--since", half)
            yield f"{name}, one hour", (*command, "--since", half, "--until", hour)


def export_s(state: Path) -> float:
    """How long the export of the first hour takes. The bundle is removed again."""
    file = state / "hour.db"
    with JournalReader.open(state) as reader:
        first = next(reader.read())
    until = datetime.fromtimestamp(first.at_ns // S + 3_600, UTC)
    try:
        command = ("journal", "export", str(state), str(file), "--until", f"{until:%Y-%m-%dT%H:%M}")
        return seconds(*command).clock
    finally:
        file.unlink()


class Seconds(NamedTuple):
    """From the start of a command to its end: on the clock, and of the processor."""

    clock: float
    processor: float


def seconds(*arguments: str) -> Seconds:
    """How long a command takes. Raises CalledProcessError."""
    command = (sys.executable, "-m", "tools.cli", *arguments)
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True, timeout=LIMIT_S)
    clock, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Seconds(clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
