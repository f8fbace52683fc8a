"""`fermata journal compact`: shortens a journal by hand, as its server does by itself."""

import sys
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec

from journal.compaction import PORTION_EVENTS
from journal.errors import JournalError
from journal.files import journal_file
from journal.journal import Journal
from scheduler.evolve import fold
from scheduler.state import STATE_VERSION, SchedulerState

DONE, UNUSABLE = 0, 2
NS_PER_DAY = 86_400 * 10**9
WAIT_S = 0.05
WAITS = 200
"""How often it looks whether readers have gone: ten seconds in all."""


@dataclass(frozen=True, slots=True)
class Kept:
    """What stays: events of so many days, and a file of so many bytes."""

    days: int
    num_bytes: int


def run(path: Path, kept: Kept) -> int:
    """Shortens the journal and says by how much. Returns 0, also when nothing is to go, or 2 when
    it cannot be written: no such journal, a server has it, somebody reads it, or there is no space.
    """
    try:
        file = journal_file(path)
        if not file.is_file():
            raise JournalError(f"{file}: no such journal; give a state folder or a .db file")
        journal = Journal.open(path)
        try:
            line = compact(journal, kept)
        finally:
            journal.close()
    except JournalError as error:
        print(f"fermata journal compact: {error}", file=sys.stderr)
        return UNUSABLE
    print(line)
    return DONE


def compact(journal: Journal, kept: Kept) -> str:
    """What was done, in a line. Raises JournalError."""
    before = journal.file.stat().st_size
    keep_ns = kept.days * NS_PER_DAY
    through_seq = journal.compaction_point(time.time_ns(), keep_ns, kept.num_bytes)
    if through_seq is None:
        return f"{journal.file}: nothing is to go, or too little to be worth it"
    state = SchedulerState()
    fold(state, journal.read(until_seq=through_seq))
    carried = msgspec.to_builtins(state, str_keys=True)
    journal.begin_compaction(through_seq, STATE_VERSION, carried)
    portions = 2 * (journal.last_seq // PORTION_EVENTS + 1)
    for number in range(portions + WAITS):
        if journal.advance_compaction():
            break
        if number >= portions:
            time.sleep(WAIT_S)
    else:
        raise JournalError(f"{journal.file}: somebody reads it; close other programs first")
    after = journal.file.stat().st_size
    return (
        f"{journal.file}: events through seq {through_seq} are now one, "
        f"{before / 1e6:.1f} MB became {after / 1e6:.1f} MB"
    )
