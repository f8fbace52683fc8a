"""`fermata journal compact`: shortens a journal by hand, as its server does by itself.

All that can be wrong with the journal is looked for by reading, which writes nothing: it is opened
for writing only once it is known to be sound, and how much of it is to go.
"""

import stat
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from journal.bundle import is_bundle
from journal.compaction import PORTION_EVENTS, compaction_point
from journal.database import Run
from journal.errors import JournalError, JournalLocked
from journal.files import has_writer
from journal.journal import Journal
from journal.place import Position
from journal.queries import last_position
from journal.reader import JournalReader
from journal.tables import SCHEMA
from scheduler.evolve import fold
from scheduler.state import STATE_VERSION, SchedulerState

DONE, UNUSABLE = 0, 2
NS_PER_DAY = 86_400 * 10**9
WAIT_S = 0.05
WAITS = 200
"""How often it looks whether readers have gone: ten seconds in all."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What stays: events of so many days before the last one, and a file of so many bytes."""

    days: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to go, as it was read: the events through `through_seq`, which come to `carried`.
    `last` is the newest event, and `schema` what the file had.
    """

    through_seq: int
    carried: dict[str, object]
    last: Position
    schema: str


def run(path: Path, kept: Kept) -> int:
    """Shortens the journal and says by how much. Returns 0, also when nothing is to go, or 2 when
    it cannot be: no journal, a bundle, a damaged or a write-protected file, a server has it,
    somebody reads it, or there is no space.
    """
    try:
        with JournalReader.open(path) as reader:
            file, plan = reader.file, plan_of(reader, kept)
        if plan is None:
            line = f"{file}: nothing is to go, or too little to be worth it"
        else:
            line = carry_out(file, plan)
    except JournalError as error:
        print(f"fermata journal compact: {error}", file=sys.stderr)
        return UNUSABLE
    print(line)
    return DONE


def plan_of(reader: JournalReader, kept: Kept) -> Plan | None:
    """What is to go; None when that is little or nothing. Raises JournalError for a journal that
    cannot be shortened.
    """
    file = reader.file
    if has_writer(file):
        raise JournalLocked(f"{file}: a server has it, and shortens it by itself; stop that first")
    with reader.transaction() as run:
        refuse_unfit(file, run)
        last = last_position(run)
        # Counted as all times are that are asked of a journal: today may be long after it.
        through_seq = compaction_point(run, last.at_ns, kept.days * NS_PER_DAY, kept.num_bytes)
    if through_seq is None:
        return None
    state = SchedulerState()
    fold(state, reader.read(until_seq=through_seq))
    carried = msgspec.to_builtins(state, str_keys=True)
    return Plan(through_seq, carried, last, reader.schema)


def refuse_unfit(file: Path, run: Run) -> None:
    """Raises JournalError for a bundle, and for a file that may not be written or is damaged."""
    if is_bundle(run):
        raise JournalError(f"{file}: a bundle, which stays as it was exported; export less instead")
    if not file.stat().st_mode & stat.S_IWUSR:
        raise JournalError(f"{file}: is write-protected; let its owner write it first")
    found: str = run("PRAGMA quick_check(1)").scalar_one()
    if found != "ok":
        words = " ".join(found.split())
        raise JournalError(f"{file}: is damaged, and stays as it is ({words}); use a backup")


def carry_out(file: Path, plan: Plan) -> str:
    """What was done, in a line. Raises JournalError."""
    before = file.stat().st_size
    journal = Journal.open(file)
    try:
        if journal.last != plan.last:
            raise JournalError(f"{file}: was written to while it was read; try again")
        shorten(journal, plan)
    finally:
        journal.close()
    upgraded = "" if plan.schema == SCHEMA else f", upgraded from schema {plan.schema} to {SCHEMA}"
    return (
        f"{file}: events through seq {plan.through_seq} are now one, "
        f"{before / 1e6:.1f} MB became {file.stat().st_size / 1e6:.1f} MB{upgraded}"
    )


def shorten(journal: Journal, plan: Plan) -> None:
    """Writes the successor, and waits for readers to let it take its place. Raises JournalError."""
    journal.begin_compaction(plan.through_seq, STATE_VERSION, plan.carried)
    portions = 2 * (journal.last_seq // PORTION_EVENTS + 1)
    for number in range(portions + WAITS):
        if journal.advance_compaction():
            return
        if number >= portions:
            time.sleep(WAIT_S)
    raise JournalError(f"{journal.file}: somebody reads it; close other programs first")
