"""`fermata bench scheduler`: what scheduler and journal cost, without a model.

Every number is the median of rounds that are taken in turn (A B C, A B C, ...), so that a busy
machine slows all of them alike; comparisons are ratios within a round. A step is fold, decide,
commit, fold and effects, on a journal in a file, with its checkpoints and snapshots.
"""

import os
import shutil
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tools.bench_common import Measurement, measure, show
from tools.bench_decide import DECIDING_ROWS, PAUSED, WAITING, Full
from tools.bench_history import write_history
from tools.bench_replay import measure_replay
from tools.bench_rig import SETTINGS, Rig, StepTime, Stopwatch, rig_settings
from tools.server_process import ServerProcess

ROWS = 32
MANY, FEW = 1_000, 100
NUM_OPEN = 100
SEED = 1


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured. `events` is the length of the long journal."""

    rounds: int = 7
    steps: int = 2_000
    events: int = 1_000_000
    replay_steps: int = 20_000
    long_replay_steps: int = 1_000_000
    starts: int = 5
    decisions: int = 500


QUICK = Size(
    rounds=2,
    steps=200,
    events=20_000,
    replay_steps=2_000,
    long_replay_steps=20_000,
    starts=1,
    decisions=50,
)


def run(size: Size, folder: Path | None, *, as_json: bool) -> int:
    """Measures, prints, and returns 0 when every target is met, else 1. Files go to `folder`,
    whose disk is the one that is measured; they are removed again.
    """
    with tempfile.TemporaryDirectory(prefix="fermata-bench-", dir=folder) as name:
        work = Path(name)
        print(f"writes a journal of {size.events:,} events", flush=True)
        history = work / "history"
        write_history(history, size.events, NUM_OPEN, SEED)
        measurements, details = measure_steps(size, work, history)
        measurements += measure_decisions(size)
        measurements += measure_starts(size, work, history)
        replay_steps = size.replay_steps, size.long_replay_steps
        measurements += measure_replay(*replay_steps, size.rounds, work)
    show("scheduler", measurements, seed=SEED, as_json=as_json, details=details)
    return int(any(measurement.met is False for measurement in measurements))


def measure_steps(
    size: Size, work: Path, history: Path
) -> tuple[list[Measurement], dict[str, float]]:
    """Rounds of steps with many waiting, with few, and on the long journal with many."""
    print(f"takes steps with {ROWS} rows", flush=True)
    shutil.copytree(history, work / "long")
    with ExitStack() as stack:
        rigs: dict[str, Rig] = {}
        for name, num_waiting in (("many", MANY), ("few", FEW), ("long", MANY)):
            rigs[name] = Rig(rig_settings(work / name, ROWS), SEED + len(rigs))
            stack.callback(rigs[name].close)
            rigs[name].fill(ROWS, num_waiting)
        taken: dict[str, list[list[StepTime]]] = {name: [] for name in rigs}
        for _ in range(size.rounds):
            for name, rig in rigs.items():
                taken[name].append(rig.steps_ns(size.steps))
        details = parts(rigs["many"], size.steps)
    p50 = {name: percentiles(rounds, 50) for name, rounds in taken.items()}
    p99 = {name: percentiles(rounds, 99) for name, rounds in taken.items()}
    processor = [[step.processor for step in steps] for steps in taken["many"]]
    found = [
        measure("step p50", "ms", p50["many"], at_most=0.3),
        measure("step p99", "ms", p99["many"], at_most=1.5),
        measure("step p99, processor time", "ms", [percentile(r, 99) for r in processor]),
        measure(f"step p50, {FEW} waiting", "ms", p50["few"]),
        measure(f"step p99, {FEW} waiting", "ms", p99["few"]),
        measure("step p50, long journal", "ms", p50["long"]),
        measure("step p99, long journal", "ms", p99["long"]),
        measure("step p50, many / few waiting", "", ratios(p50["many"], p50["few"]), at_most=1.2),
        measure("step p50, long / new journal", "", ratios(p50["long"], p50["many"]), at_most=1.2),
    ]
    return found, details


def measure_decisions(size: Size) -> list[Measurement]:
    """Rounds of `decide` alone, on a full server whose memory is short."""
    print(f"decides with {DECIDING_ROWS} rows, {PAUSED} held and {WAITING} waiting", flush=True)
    full = Full(DECIDING_ROWS, PAUSED, WAITING)
    rounds = [full.decisions_ns(size.decisions) for _ in range(size.rounds)]
    of = f"decide, {DECIDING_ROWS} rows, {PAUSED} held"
    return [
        measure(f"{of}, p50", "ms", [percentile(taken, 50) for taken in rounds]),
        measure(f"{of}, p99", "ms", [percentile(taken, 99) for taken in rounds], at_most=1),
    ]


def percentiles(rounds: Sequence[Sequence[StepTime]], percent: int) -> list[float]:
    """A percentile of each round, on the clock, in milliseconds."""
    return [percentile([step.clock for step in steps], percent) for steps in rounds]


def percentile(taken_ns: Sequence[int], percent: int) -> float:
    """A percentile in milliseconds."""
    return sorted(taken_ns)[len(taken_ns) * percent // 100] / 1e6


def ratios(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Round by round."""
    return [left / right for left, right in zip(one, other, strict=True)]


def parts(rig: Rig, num_steps: int) -> dict[str, float]:
    """Where the time goes: the mean of each part of a step in microseconds, in a round of its own,
    since measuring costs time too.
    """
    watch = Stopwatch(rig.loop)
    total_ns = sum(step.clock for step in rig.steps_ns(num_steps))
    spent_ns = watch.spent_ns
    spent_ns["side rows"] = spent_ns.pop("commit and its side rows") - spent_ns["journal.commit"]
    spent_ns["fold, decide, check, effects_of"] = total_ns - sum(spent_ns.values())
    found = {
        f"part of a step, us: {part}": round(ns / num_steps / 1e3, 1)
        for part, ns in sorted(spent_ns.items(), key=lambda item: -item[1])
    }
    return found | {"load average of the machine": round(os.getloadavg()[0], 1)}


def measure_starts(size: Size, work: Path, history: Path) -> list[Measurement]:
    """Starts of the real server on an empty folder and on the long journal with its unfinished
    requests. The journal is copied for each, as it was when its server died.
    """
    print("starts servers", flush=True)
    taken: dict[str, list[tuple[float, float]]] = {"empty": [], "long": []}
    for _ in range(size.starts):
        for name, starts in taken.items():
            state = work / "start"
            if name == "long":
                shutil.copytree(history, state)
            starts.append(start_s(state))
            shutil.rmtree(state)
    more = {
        index: [
            after[index] - before[index]
            for before, after in zip(taken["empty"], taken["long"], strict=True)
        ]
        for index in (0, 1)
    }
    return [
        measure("start to listening, empty", "s", [listening for listening, _ in taken["empty"]]),
        measure("start to ready, empty", "s", [ready for _, ready in taken["empty"]]),
        measure("start to listening, long - empty", "s", more[0], at_most=2),
        measure("start to ready, long - empty", "s", more[1], at_most=2),
    ]


def start_s(state: Path) -> tuple[float, float]:
    """Seconds until a server listens, and until it is ready to take requests."""
    settings = {
        "FERMATA_FAKE__STEP_MS": "60000",  # the unfinished requests stay unfinished
        "FERMATA_FAKE__CONTEXT_TOKENS": str(SETTINGS["fake.context_tokens"]),
    }
    begun = time.monotonic()
    server = ServerProcess("fake", state, settings)
    try:
        address = server.address()
        listening_s = time.monotonic() - begun
        while not is_ready(f"{address}/ready"):
            time.sleep(0.005)
        return listening_s, time.monotonic() - begun
    finally:
        server.close()


def is_ready(url: str) -> bool:
    """Whether the server takes requests."""
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return answer.status == 200
    except urllib.error.HTTPError:
        return False
