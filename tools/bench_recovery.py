"""`fermata bench recovery`: how long a server that died is away, by the length of its journal.

In each round three servers start one after the other: on an empty state folder, on a long journal
with unfinished requests (bench_history.py writes it), and on the same journal without a snapshot
that this code can use, as after an upgrade: then every event is folded. Each is a process of its
own with the model that computes nothing, and is killed at the end. The differences are taken within
a round.

`listening` is what clients need to come back. It is said before the journal is opened, so its
difference should be none; how long it takes until the journal is read is what comes after it. At
that moment three clients are there: one sends a new request, one asks whether the server is ready,
and one takes up the stream of a request that was in the middle of its answer.
"""

import os
import shutil
import signal
import sqlite3
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import httpx2

from journal.files import journal_file
from journal.reader import JournalReader
from tools.bench_common import Details, Measurement, measure, show
from tools.bench_history import write_history
from tools.bench_rig import SETTINGS
from tools.server_process import ServerFailed, ServerProcess

SEED = 1
NUM_OPEN = 100
LATER_S = 1
"""At most, until a server on the long journal listens, after one on an empty folder does."""

LIMIT_S = 120
LOOK_S = 0.005
BODY = {"model": "default", "prompt": "a new request", "max_tokens": 8, "stream": True}
SERVER = {
    "FERMATA_FAKE__STEP_MS": "20",
    "FERMATA_FAKE__CONTEXT_TOKENS": str(SETTINGS["fake.context_tokens"]),
}
PARTS = ("listening", "accepted", "ready", "next_token")


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured. `events` is the length of the long journal."""

    rounds: int = 5
    events: int = 1_000_000


QUICK = Size(rounds=1, events=60_000)

Start = dict[str, float]
"""Seconds from the start of the process to each part of `PARTS`; on an empty folder no request goes
on, and has no next token.
"""


def run(size: Size, folder: Path | None, *, as_json: bool) -> int:
    """Measures, shows, and returns the exit status: 1 when a target is missed. Files go to `folder`
    and are removed again.
    """
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its servers end with it
    with tempfile.TemporaryDirectory(prefix="fermata-bench-", dir=folder) as name:
        print(f"writes a journal of {size.events:,} events", flush=True)
        work = Path(name)
        write_history(work / "snapshot", size.events, NUM_OPEN, SEED)
        shutil.copytree(work / "snapshot", work / "no_snapshot")
        details = describe(work / "snapshot")
        forget_snapshots(work / "no_snapshot")
        try:
            starts = measure_starts(size, work)
        except (httpx2.HTTPError, ServerFailed) as error:
            print(f"the bench failed: {error}")
            return 1
    measurements = list(compare(starts))
    show("recovery", measurements, seed=SEED, as_json=as_json, details=details)
    return int(any(measurement.met is False for measurement in measurements))


def describe(state: Path) -> Details:
    """What there is to recover."""
    with JournalReader.open(state) as reader, reader.transaction() as read:
        last, after = read(
            "SELECT max(seq), max(seq) - (SELECT max(seq) FROM snapshots) FROM events"
        ).one()
        num_open = read("SELECT count(*) FROM request WHERE outcome IS NULL").scalar_one()
    return {
        "events": last,
        "events after the newest snapshot": after,
        "unfinished requests": num_open,
        "journal bytes": journal_file(state).stat().st_size,
        "listening is said before the journal is read": True,
    }


def forget_snapshots(state: Path) -> None:
    """The journal is as a release with other code finds it."""
    with closing(sqlite3.connect(journal_file(state), isolation_level=None)) as database:
        database.execute("DELETE FROM snapshots")


def measure_starts(size: Size, work: Path) -> dict[str, list[Start]]:
    """Starts of servers on each kind of state folder, in turn."""
    print("starts servers", flush=True)
    found: dict[str, list[Start]] = {"empty": [], "snapshot": [], "no_snapshot": []}
    state = work / "state"
    start(state, None)  # whoever comes first reads the programs from the disk
    shutil.rmtree(state)
    for _ in range(size.rounds):
        for kind, starts in found.items():
            if kind != "empty":
                shutil.copytree(work / kind, state)
            os.sync()  # what was copied is not to be written while a start is timed
            starts.append(start(state, None if kind == "empty" else work / kind))
            shutil.rmtree(state)
    return found


def start(state: Path, history: Path | None) -> Start:
    """One life, and how long it took to each of its parts. Raises ServerFailed and HTTPError."""
    begun = time.monotonic()
    server = ServerProcess("fake", state, SERVER)
    try:
        address = server.address()
        taken = {"listening": time.monotonic() - begun}
        with ThreadPoolExecutor() as pool:
            clients = {
                "accepted": pool.submit(accepted, address),
                "ready": pool.submit(ready, address),
            }
            if history is not None:
                clients["next_token"] = pool.submit(next_token, address, history)
            return taken | {part: each.result() - begun for part, each in clients.items()}
    finally:
        server.close()


def accepted(address: str) -> float:
    """When a new request has its status, which says that it is in the journal."""
    with httpx2.stream("POST", f"{address}/v1/completions", json=BODY, timeout=LIMIT_S) as answer:
        answer.raise_for_status()
        return time.monotonic()


def ready(address: str) -> float:
    """When the server takes requests."""
    end = time.monotonic() + LIMIT_S
    with httpx2.Client(timeout=LIMIT_S) as client:
        while client.get(f"{address}/ready").status_code != 200:
            if time.monotonic() > end:
                raise ServerFailed(f"the server is not ready after {LIMIT_S} s")
            time.sleep(LOOK_S)
    return time.monotonic()


def next_token(address: str, history: Path) -> float:
    """When the oldest unfinished request has put out more than before the kill."""
    with JournalReader.open(history) as reader, reader.transaction() as read:
        query = "SELECT request_id FROM request WHERE outcome IS NULL ORDER BY number LIMIT 1"
        name: str = read(query).scalar_one()
    with JournalReader.open(history) as reader:
        known = len(reader.output_tokens(name)[0])
    url = f"{address}/v1/requests/{name}/stream?after={known}"
    with httpx2.stream("GET", url, timeout=LIMIT_S) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("id: ") and int(line.removeprefix("id: ")) > known:
                return time.monotonic()
    raise ServerFailed("the stream of an unfinished request ended")


def compare(starts: dict[str, list[Start]]) -> Iterator[Measurement]:
    """The differences that have targets first, then all others, and what they are made of."""
    for kind in ("snapshot", "no_snapshot"):
        yield measure(
            f"listening, {kind} - empty", "s", later(starts, kind, "listening"), at_most=LATER_S
        )
    for part in ("accepted", "ready"):
        for kind in ("snapshot", "no_snapshot"):
            yield measure(f"{part}, {kind} - empty", "s", later(starts, kind, part))
    for part in PARTS:
        for kind, each in starts.items():
            taken = [start[part] for start in each if part in start]
            if taken:
                yield measure(f"{part}, {kind}", "s", taken)


def later(starts: dict[str, list[Start]], kind: str, part: str) -> list[float]:
    """How much later than on an empty folder, round by round."""
    pairs = zip(starts[kind], starts["empty"], strict=True)
    return [one[part] - other[part] for one, other in pairs]
