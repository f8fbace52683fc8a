"""The rows that are there before the first event of a journal with a carried state: what was open,
and what those rows count that was over by then.
"""

import msgspec

from journal import tables
from journal.changes import write_changes
from journal.database import Run
from journal.queries import select_rows
from journal.reader import JournalReader
from journal.rebuild import Base
from journal.rows import Changes, OpenRows, OrphanRow, PauseRow, PhaseRow
from journal.statements import INSERT_BLOCK


def put_rows(run: Run, reader: JournalReader, base: Base, seq: int) -> None:
    """Writes the rows that were open behind this seq of the reader's journal, and what a rebuild
    starts from.
    """
    body = msgspec.json.encode(base).decode()
    run("INSERT INTO carried_rows VALUES (?, ?)", (seq, body))
    rows = base.rows
    changes = Changes(
        requests={row.number: row for row in rows.requests},
        runs={} if rows.run is None else {rows.run.run_id: rows.run},
        minutes={} if rows.minute is None else {rows.minute.minute: rows.minute},
        pauses={row.pause_seq: row for row in rows.pauses},
        pins={row.number: row for row in rows.pins},
        orphans={(row.lost_seq, row.number): row for row in rows.orphans},
        phases={(row.seq, row.number): row for row in rows.phases},
        plans={(row.hash, row.part): row for row in rows.plans},
    )
    write_changes(run, changes)
    for block in base.blocks:
        run(INSERT_BLOCK, msgspec.structs.astuple(block))
    for row in rows.requests:
        with reader.transaction() as source:
            write_changes(run, past_of(source, row.number, seq, rows))


def past_of(source: Run, number: int, seq: int, rows: OpenRows) -> Changes:
    """What was over by then of a request that was open: its row counts it."""
    open_pauses = {row.pause_seq for row in rows.pauses}
    open_orphans = {row.lost_seq for row in rows.orphans if row.number == number}
    open_phases = {row.seq for row in rows.phases if row.number == number}
    key = (number, seq)
    where = "WHERE number = ? AND pause_seq <= ?"
    pauses = select_rows(source, tables.pause, PauseRow, where, key)
    where = "WHERE number = ? AND lost_seq <= ?"
    orphans = select_rows(source, tables.orphan, OrphanRow, where, key)
    where = "WHERE number = ? AND seq <= ?"
    phases = select_rows(source, tables.phase, PhaseRow, where, key)
    return Changes(
        pauses={r.pause_seq: r for r in pauses if r.pause_seq not in open_pauses},
        orphans={(r.lost_seq, number): r for r in orphans if r.lost_seq not in open_orphans},
        phases={(r.seq, number): r for r in phases if r.seq not in open_phases},
    )
