"""A journal of millions of events in a minute, for benchmarks of what is asked of it.

A simulated server is short of memory for some minutes, so requests wait, share blocks, are held and
lose their clients. Its journal is written to a file, and that stretch of time is then copied behind
itself in SQL, with later times, further numbers and other ids. Bodies stay as they were, so no such
file can be replayed.
"""

import sqlite3
from contextlib import closing
from functools import partial
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from random import Random

from journal import events
from journal.events import Decision, Fact, Record
from journal.files import journal_file
from journal.journal import Journal
from journal.tokens import ID_BYTES, SideRows, StepTokens
from scheduler.simulation.models import small_ceiling, small_machine, small_settings
from scheduler.simulation.world import Asked, World

S = 10**9
NUM_REQUESTS = 200
ARRIVALS_S = 100
LIMIT_NS = 10_000 * S
SIDE_TABLES = ("token_ids", "step_tokens", "request_parameters", "snapshots")

# What moves a column by one stretch; ids differ in six characters behind `req_`.
MOVED = {
    "seq": "seqs",
    "lost_seq": "seqs",
    "pause_seq": "seqs",
    "received_seq": "seqs",
    "ended_seq": "seqs",
    "first_seq": "seqs",
    "through_seq": "seqs",
    "step": "steps",
    "run_id": "runs",
    "ended_run_id": "runs",
    "resumed_run_id": "runs",
    "number": "numbers",
    "computed_by": "numbers",
    "adopter_number": "numbers",
    "minute": "minutes",
}
NAMED = ("request_id", "joined_id", "adopter_id")
LENGTHS = ("waited_ns", "held_ns", "orphaned_ns", "age_ns", "duration_ns")
"""Columns of nanoseconds that are no times."""

COPIED = (
    *("events", "request", "run", "minute", "pause", "orphan", "adoption", "memory_sample"),
    *("phase", "disk_write"),
)


def write_long(folder: Path, num_events: int, seed: int) -> int:
    """Makes a journal of at least so many events in a state folder; how many there are."""
    write_stretch(folder, seed)
    file = journal_file(folder)
    with closing(sqlite3.connect(file, isolation_level=None)) as database:
        return multiply(database, num_events)


def write_stretch(folder: Path, seed: int) -> None:
    """The simulated journal as a file."""
    journal = Journal.open(folder)
    try:
        for _, step in groupby(simulate(seed), key=attrgetter("step")):
            commit(journal, list(step))
    finally:
        journal.close()


def simulate(seed: int) -> list[Record]:
    """What the simulated server has recorded."""
    random = Random(seed)
    settings = small_settings(
        small_ceiling(1_500, num_rows=8),
        memory__reserve="chunk",
        memory__growth_tokens=1,
        scheduler__max_rows=8,
        scheduler__max_waiting=NUM_REQUESTS,
        kv__max_bytes=3_000_000,
        requests__max_deaths=100,
    )
    world = World(settings, small_machine(), seed=seed, checks=False)
    ids = [world.ask(asked(random)) for _ in range(NUM_REQUESTS)]
    for at_s in range(5, ARRIVALS_S, 12):
        world.plan(at_s * S, partial(world.take_memory, 900_000))
        world.plan((at_s + 2) * S, partial(world.take_memory, -900_000))
    for request_id in random.choices(ids, k=NUM_REQUESTS // 20):
        gone = events.ClientGone(request_id=request_id)
        world.plan(random.randrange(ARRIVALS_S * S), partial(world.wish, gone))
    world.run(LIMIT_NS)
    return list(world.journal.read())


def asked(random: Random) -> Asked:
    """A request of any size, at any time."""
    at_ns = random.randrange(ARRIVALS_S * S)
    return Asked(random.randint(1, 200), random.randint(20, 300), at_ns=at_ns, shares=64)


def commit(journal: Journal, step: list[Record]) -> None:
    """One step, with tokens that stand for the real ones."""
    facts: list[Fact] = [r.event for r in step if r.source == "fact"]  # pyright: ignore[reportAssignmentType]
    decisions: list[Decision] = [r.event for r in step if r.source == "decision"]  # pyright: ignore[reportAssignmentType]
    tokens = {
        index: StepTokens(bytes(ID_BYTES * sum(fact.counts)))
        for index, fact in enumerate(facts)
        if isinstance(fact, events.TokensDecoded)
    }
    journal.commit(step[0].step, step[0].at_ns, facts, decisions, SideRows(tokens=tokens))


def multiply(database: sqlite3.Connection, num_events: int) -> int:
    """Copies the stretch behind itself until there are so many events."""
    run = database.execute
    for pragma in ("journal_mode = OFF", "synchronous = OFF", "cache_size = -200000"):
        run(f"PRAGMA {pragma}").close()
    kept = run(
        "SELECT name, type, sql FROM sqlite_master WHERE sql IS NOT NULL"
        " AND (type = 'trigger' OR type = 'index')"
    ).fetchall()
    for name, kind, _ in kept:
        run(f"DROP {kind} {name}")
    for table in SIDE_TABLES:
        run(f"DELETE FROM {table}")
    query = "SELECT max(seq), max(step), max(run_id), max(at_ns) - min(at_ns) FROM events"
    seqs, steps, runs, length_ns = run(query).fetchone()
    (numbers,) = run("SELECT max(number) FROM request").fetchone()
    minutes = length_ns // (60 * S) + 1
    moves = {"seqs": seqs, "steps": steps, "runs": runs, "numbers": numbers, "minutes": minutes}
    copies = -(-num_events // seqs)
    run("BEGIN")
    for table in COPIED:
        run(copy_of(database, table, moves, copies))
    for _, _, statement in kept:
        run(statement)
    run("COMMIT")
    return copies * seqs


def copy_of(database: sqlite3.Connection, table: str, moves: dict[str, int], copies: int) -> str:
    """The statement that copies a table's rows so often, less the one time that they are there."""
    names: list[str] = [name for _, name, *_ in database.execute(f"PRAGMA table_info({table})")]
    values = ", ".join(moved(name, moves) for name in names)
    return (
        f"WITH RECURSIVE copy (n) AS (SELECT 1 UNION ALL SELECT n + 1 FROM copy"
        f" WHERE n < {copies - 1}) INSERT INTO {table} ({', '.join(names)})"
        f" SELECT {values} FROM copy CROSS JOIN {table} t WHERE {copies} > 1"
        " ORDER BY n, t.rowid"
    )


def moved(name: str, moves: dict[str, int]) -> str:
    """A column in the n-th copy."""
    if name in MOVED:
        return f"{name} + n * {moves[MOVED[name]]}"
    if name.endswith("_ns") and not name.endswith(LENGTHS):
        return f"{name} + n * {moves['minutes'] * 60 * S}"
    if name in NAMED:
        return f"substr({name}, 1, 4) || printf('%06d', n) || substr({name}, 11)"
    return name
