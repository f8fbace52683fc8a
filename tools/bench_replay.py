"""How fast a journal is decided again: for `fermata bench scheduler`.

The rate is that of a journal whose requests come and go. A long one takes a server hours: its
last steps, in which all rows decode, are copied behind themselves with later seqs, steps and times,
which comes out the same again. It is replayed by the command, in a process of its own, whose peak
of memory is held against that of a tenth of the journal.
"""

import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from journal.files import journal_file
from journal.reader import JournalReader
from scheduler.replay import Replay
from tools.bench_common import Measurement, measure
from tools.bench_rig import Rig, rig_settings

ROWS = 8
OUTPUT_TOKENS = 200
AT_LEAST = 20_000
AT_MOST_S = 60
"""For a million steps."""
MILLION = 1_000_000
LONG_ROUNDS = 3
STRETCH = 1_000
"""Steps that are copied."""

COPY = """
    WITH RECURSIVE copy (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM copy WHERE n < :copies)
    INSERT INTO events
    SELECT
        seq + :length * n, run_id, step + :length * n, source, kind, request_id,
        at_ns + :length_ns * n, version, body
    FROM copy, events WHERE seq > :after ORDER BY n, seq
"""


def measure_replay(num_steps: int, num_long: int, rounds: int, work: Path) -> list[Measurement]:
    """The rate over so many steps; and time and memory for a long journal."""
    print("replays", flush=True)
    state = work / "replay"
    write_mixed(state, num_steps)
    rates = [replay_rate(state) for _ in range(rounds)]
    long, tenth = work / "replay_long", work / "replay_tenth"
    write_long(long, num_long)
    write_long(tenth, num_long // 10)
    taken = [(replayed(long), replayed(tenth)) for _ in range(min(rounds, LONG_ROUNDS))]
    name = f"replay of {num_long:,} steps"
    seconds = [one.clock_s for one, _ in taken]
    ratios = [one.peak_bytes / other.peak_bytes for one, other in taken]
    return [
        measure("replay", "steps/s", rates, at_least=AT_LEAST),
        measure(name, "s", seconds, at_most=AT_MOST_S * num_long / MILLION),
        measure(f"{name}, peak memory", "MB", [one.peak_bytes / 1e6 for one, _ in taken]),
        measure("replay, peak memory, all / a tenth", "", ratios, at_most=1.2),
    ]


def write_mixed(state: Path, num_steps: int) -> None:
    """Eight rows, whose requests come and go."""
    rig = Rig(rig_settings(state, ROWS), seed=1)
    while rig.state.step < num_steps:
        while len(rig.state.requests) < 2 * ROWS:
            rig.submit(OUTPUT_TOKENS)
            rig.step_ns()
        rig.step_ns()
    rig.close()


def write_long(state: Path, num_steps: int) -> None:
    """Eight rows that decode, for at least so many steps."""
    rig = Rig(rig_settings(state, ROWS), seed=1)
    rig.fill(ROWS, 0)
    rig.steps_ns(STRETCH)
    rig.close()
    with closing(sqlite3.connect(journal_file(state), isolation_level=None)) as database:
        query = "SELECT max(seq) - :length, max(at_ns) FROM events"
        after, last_ns = database.execute(query, {"length": STRETCH}).fetchone()
        query = "SELECT count(DISTINCT step), count(DISTINCT kind), min(at_ns) FROM events"
        found = database.execute(f"{query} WHERE seq > ?", (after,)).fetchone()
        assert found[:2] == (STRETCH, 1), "each step is one event"
        copies = -(-num_steps // STRETCH)
        length_ns = last_ns - found[2] + 1
        values = {"copies": copies, "length": STRETCH, "length_ns": length_ns, "after": after}
        database.execute(COPY, values)


def replay_rate(state: Path) -> float:
    """Steps a second of one replay, reading included."""
    begun = time.perf_counter()
    with JournalReader.open(state) as reader:
        replay = Replay(reader.read())
        divergences = list(replay.divergences())
    assert not divergences, f"the replay differs: {divergences[0]}"
    return replay.num_steps / (time.perf_counter() - begun)


class Replayed(NamedTuple):
    """What a process took."""

    clock_s: float
    peak_bytes: int


def replayed(state: Path) -> Replayed:
    """Runs `fermata replay`. It finds no divergence."""
    command: Sequence[str] = (sys.executable, "-m", "tools.cli", "replay", str(state))
    begun = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    assert process.returncode == 0, f"fermata replay ended with {process.returncode}"
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    return Replayed(time.monotonic() - begun, usage.ru_maxrss * unit_bytes)
