"""Whether a journal is what it promises to be: `fermata journal verify`."""

from collections.abc import Iterator

import msgspec

from journal import queries, tables
from journal.blocks import BlockRow
from journal.bundle import has_tokens, is_bundle, verify_bundle
from journal.database import Run, schema_of
from journal.definitions import changed_definitions
from journal.errors import UnreadableEvent
from journal.events import Record, StateCarried
from journal.place import Position
from journal.points import differs, points_of
from journal.rebuild import Rebuild, load_base
from journal.row_digests import changed_rows
from journal.rows import (
    AdoptionRow,
    Changes,
    DiskPlanRow,
    DiskWriteRow,
    MinuteRow,
    OpenRows,
    OrphanRow,
    PauseRow,
    PhaseRow,
    PinRow,
    RequestRow,
    RunRow,
    SampleRow,
)
from journal.tables import SCHEMA
from journal.tokens import ID_BYTES

# Each counts rows that should not be there.
ORPHANS = {
    "token_ids: rows of requests that were never received": (
        "SELECT count(*) FROM token_ids WHERE request_id NOT IN (SELECT request_id FROM request)"
    ),
    "request_parameters: rows of requests that were never received": (
        "SELECT count(*) FROM request_parameters"
        " WHERE request_id NOT IN (SELECT request_id FROM request)"
    ),
    "step_tokens: rows of no tokens_decoded": (
        "SELECT count(*) FROM step_tokens WHERE seq NOT IN"
        " (SELECT seq FROM events WHERE kind = 'tokens_decoded')"
    ),
    "snapshots: rows of no event": (
        "SELECT count(*) FROM snapshots WHERE seq NOT IN (SELECT seq FROM events)"
    ),
    "carried_rows: rows of no event": (
        "SELECT count(*) FROM carried_rows WHERE seq NOT IN (SELECT seq FROM events)"
    ),
    "memory_sample: rows of no memory_sampled": (
        "SELECT count(*) FROM memory_sample WHERE seq NOT IN"
        " (SELECT seq FROM events WHERE kind = 'memory_sampled')"
    ),
    "pin: rows of requests that are not held": (
        "SELECT count(*) FROM pin WHERE number NOT IN"
        " (SELECT number FROM pause WHERE outcome = 'open')"
    ),
    "request: rows whose pauses are not those in pause": (
        "SELECT count(*) FROM request q LEFT JOIN ("
        " SELECT number, count(paused_ns) AS num_pauses,"
        " sum(iif(outcome = 'open', 0, coalesce(coalesce(resumed_ns, ended_ns) - paused_ns, 0)))"
        " AS held_ns FROM pause GROUP BY number) p USING (number)"
        " WHERE q.num_pauses <> coalesce(p.num_pauses, 0) OR q.held_ns <> coalesce(p.held_ns, 0)"
    ),
    "request: rows that were without a client otherwise than orphan says": (
        "SELECT count(*) FROM request q LEFT JOIN ("
        " SELECT number, count(*) AS num_orphaned,"
        " sum(coalesce(ended_ns - lost_ns, 0)) AS orphaned_ns FROM orphan GROUP BY number"
        ") o USING (number) WHERE q.num_orphaned <> coalesce(o.num_orphaned, 0)"
        " OR q.orphaned_ns <> coalesce(o.orphaned_ns, 0)"
    ),
    "adoption: rows of requests that did not join": (
        "SELECT count(*) FROM adoption a LEFT JOIN request q ON q.number = a.adopter_number"
        " WHERE q.joined_id IS NOT a.request_id OR q.request_id IS NOT a.adopter_id"
    ),
    "phase: rows after which nothing follows": (
        "SELECT count(*) FROM phase p JOIN request q USING (number) LEFT JOIN phase n"
        " ON n.seq = p.ended_seq AND n.number = p.number AND n.began_ns = p.ended_ns"
        " WHERE p.ended_seq IS NOT NULL AND n.seq IS NULL AND p.ended_seq IS NOT q.ended_seq"
    ),
    "phase: rows of requests that were never received": (
        "SELECT count(*) FROM phase WHERE number NOT IN (SELECT number FROM request)"
    ),
    "disk_write: rows of no event": (
        "SELECT count(*) FROM disk_write WHERE seq NOT IN (SELECT seq FROM events)"
    ),
    "request: rows that joined another without an adoption": (
        "SELECT count(*) FROM request WHERE outcome = 'joined'"
        " AND number NOT IN (SELECT adopter_number FROM adoption)"
    ),
}


def verify(run: Run) -> Iterator[str]:
    """What is wrong, one line each. Runs in the caller's transaction, and reads everything."""
    yield from _file(run)
    if is_bundle(run):
        yield from verify_bundle(run)
        yield from changed_rows(run)
    missing = list(_events(run))
    if missing:
        # Folding what is left would find differences that say nothing more.
        yield from missing
        return
    try:
        yield from _projections(run)
    except UnreadableEvent as error:
        yield str(error)


def _file(run: Run) -> Iterator[str]:
    for (line,) in run("PRAGMA integrity_check").fetchall():
        if line != "ok":
            yield f"file: {line}"
    if schema_of(run) != SCHEMA:
        yield f"schema: {schema_of(run)}, expected {SCHEMA}"
    yield from changed_definitions(run)
    for what, query in ORPHANS.items():
        count = run(query).scalar()
        if count:
            yield f"{what}: {count}"


def _events(run: Run) -> Iterator[str]:
    query = "SELECT count(*), coalesce(min(seq), 1), coalesce(max(seq), 0) FROM events"
    count, first, last = run(query).one()
    if count != last - first + 1:
        yield f"events: {last - first + 1 - count} are missing between seq {first} and {last}"
    if first != 1 and not isinstance(_first_record(run).event, StateCarried):
        yield f"events: begin with seq {first}, and not with state_carried"


def _first_record(run: Run) -> Record:
    return queries.read_batch(run, 0, None)[0]


def _order(last: Position, record: Record) -> Iterator[str]:
    """A record against the one before it."""
    if record.step < last.step or record.run_id < last.run_id or record.at_ns < last.at_ns:
        yield f"events: seq {record.seq} goes back in step, run or time"


def _projections(run: Run) -> Iterator[str]:
    """Folds all events again, and compares each row once it is final with the stored one."""
    rebuild, points = Rebuild(load_base(run)), points_of(run)
    last = Position()
    for record in queries.read_records(run, 0, None):
        yield from _order(last, record)
        last = Position(record.seq, record.step, record.at_ns, record.run_id)
        changes = rebuild.apply(record)
        if changes is not None:
            yield from _final_rows(run, rebuild, changes)
        if record.seq in points and differs(run, record.seq, rebuild.base()):
            yield f"carried_rows: seq {record.seq} is not what all events come to"
    stored = queries.load_projection(run, last.at_ns).open_rows()
    rebuilt = rebuild.projection.open_rows()
    yield from _open_pauses(rebuilt, stored)
    yield from _open_orphans(rebuilt, stored)
    yield from _open_phases(rebuilt, stored)
    yield from _plans(rebuilt, stored)
    yield from _compare("run", rebuilt.run, stored.run)
    yield from _compare("minute", rebuilt.minute, stored.minute)
    yield from _blocks(run, rebuild.blocks)
    for row in rebuilt.requests:
        other = next((other for other in stored.requests if other.number == row.number), None)
        yield from _compare("request", row, other)
        yield from _balance(row)
        yield from _tokens(run, row, rebuild.counts.get(row.number, 0))
    if len(stored.requests) != len(rebuilt.requests):
        yield f"request: {len(stored.requests)} are open, rebuilt {len(rebuilt.requests)}"


def _final_rows(run: Run, rebuild: Rebuild, changes: Changes) -> Iterator[str]:
    for number in changes.ended:
        row = changes.requests[number]
        stored = queries.select_rows(run, tables.request, RequestRow, "WHERE number = ?", (number,))
        yield from _compare("request", row, stored[0] if stored else None)
        yield from _balance(row)
        yield from _tokens(run, row, rebuild.counts.pop(number, 0))
    for row in changes.runs.values():
        if row is not rebuild.projection.run:
            stored = queries.select_rows(run, tables.run, RunRow, "WHERE run_id = ?", (row.run_id,))
            yield from _compare("run", row, stored[0] if stored else None)
    for row in changes.minutes.values():
        if row is not rebuild.projection.minute:
            stored = queries.select_rows(
                run, tables.minute, MinuteRow, "WHERE minute = ?", (row.minute,)
            )
            yield from _compare("minute", row, stored[0] if stored else None)
    yield from _held_rows(run, changes)
    yield from _client_rows(run, changes)
    yield from _past_rows(run, changes)


def _held_rows(run: Run, changes: Changes) -> Iterator[str]:
    """Pauses that are over, and readings."""
    for pause in changes.pauses.values():
        if pause.outcome != "open":
            where, key = "WHERE pause_seq = ?", (pause.pause_seq,)
            pauses = queries.select_rows(run, tables.pause, PauseRow, where, key)
            yield from _compare("pause", pause, pauses[0] if pauses else None)
    for sample in changes.samples.values():
        where, key = "WHERE seq = ?", (sample.seq,)
        samples = queries.select_rows(run, tables.memory_sample, SampleRow, where, key)
        yield from _compare("memory_sample", sample, samples[0] if samples else None)


def _client_rows(run: Run, changes: Changes) -> Iterator[str]:
    """Times without a client that are over, and adoptions."""
    for (lost_seq, number), orphan in changes.orphans.items():
        if orphan.outcome != "open":
            where, key = "WHERE lost_seq = ? AND number = ?", (lost_seq, number)
            orphans = queries.select_rows(run, tables.orphan, OrphanRow, where, key)
            yield from _compare("orphan", orphan, orphans[0] if orphans else None)
    for adoption in changes.adoptions.values():
        where, key = "WHERE seq = ?", (adoption.seq,)
        adoptions = queries.select_rows(run, tables.adoption, AdoptionRow, where, key)
        yield from _compare("adoption", adoption, adoptions[0] if adoptions else None)


def _past_rows(run: Run, changes: Changes) -> Iterator[str]:
    """Phases that are over, and what was written."""
    for (seq, number), phase in changes.phases.items():
        if phase.ended_seq is not None:
            where, key = "WHERE seq = ? AND number = ?", (seq, number)
            phases = queries.select_rows(run, tables.phase, PhaseRow, where, key)
            yield from _compare("phase", phase, phases[0] if phases else None)
    for write in changes.writes.values():
        where, key = "WHERE seq = ?", (write.seq,)
        writes = queries.select_rows(run, tables.disk_write, DiskWriteRow, where, key)
        yield from _compare("disk_write", write, writes[0] if writes else None)


def _open_phases(rebuilt: OpenRows, stored: OpenRows) -> Iterator[str]:
    """Since when each open request is in its phase."""
    new, old = ({row.number: row for row in rows.phases} for rows in (rebuilt, stored))
    for key in sorted(new.keys() | old.keys()):
        yield from _compare("phase", new.get(key), old.get(key))


def _plans(rebuilt: OpenRows, stored: OpenRows) -> Iterator[str]:
    """What is on its way to disk."""
    new, old = ({(row.hash, row.part): row for row in rows.plans} for rows in (rebuilt, stored))
    for key in sorted(new.keys() | old.keys()):
        yield from _compare("disk_plan", new.get(key), old.get(key))


def _open_orphans(rebuilt: OpenRows, stored: OpenRows) -> Iterator[str]:
    """Who is without a client."""
    new, old = ({row.number: row for row in rows.orphans} for rows in (rebuilt, stored))
    for key in sorted(new.keys() | old.keys()):
        yield from _compare("orphan", new.get(key), old.get(key))


def _open_pauses(rebuilt: OpenRows, stored: OpenRows) -> Iterator[str]:
    """Who is held, and what is pinned for them."""
    new, old = ({row.pause_seq: row for row in rows.pauses} for rows in (rebuilt, stored))
    for key in sorted(new.keys() | old.keys()):
        yield from _compare("pause", new.get(key), old.get(key))
    pins, kept = ({row.number: row for row in rows.pins} for rows in (rebuilt, stored))
    for key in sorted(pins.keys() | kept.keys()):
        yield from _compare("pin", pins.get(key), kept.get(key))


def _blocks(run: Run, rebuilt: dict[str, BlockRow]) -> Iterator[str]:
    """All blocks: they have no final rows, since each may be used or go at any time."""
    stored = {row.hash: row for row in queries.select_rows(run, tables.block, BlockRow, "")}
    for name in sorted(rebuilt.keys() | stored.keys()):
        yield from _compare("block", rebuilt.get(name), stored.get(name))


def _balance(row: RequestRow) -> Iterator[str]:
    """A prompt is what came from memory, from disk and by prefill, once its request is whole."""
    parts = (row.num_memory_tokens, row.num_disk_tokens, row.num_prefilled_tokens)
    total, most = sum(parts), row.num_prompt_tokens
    if min(parts) < 0 or total > most or (row.outcome == "finished" and total != most):
        words = "{} from memory, {} from disk and {} prefilled".format(*parts)
        yield f"request {row.number}: {words} are not its prompt of {most} tokens"


AnyRow = (
    RequestRow
    | RunRow
    | MinuteRow
    | BlockRow
    | PauseRow
    | PinRow
    | SampleRow
    | OrphanRow
    | AdoptionRow
    | PhaseRow
    | DiskWriteRow
    | DiskPlanRow
)


def _compare(table: str, rebuilt: AnyRow | None, stored: AnyRow | None) -> Iterator[str]:
    """Every column but `through_seq`, which says when a row was written and not what happened."""
    if rebuilt is None or stored is None:
        if rebuilt is not stored:
            yield f"{table}: a row is {'missing' if stored is None else 'too many'}"
        return
    for name in rebuilt.__struct_fields__:
        new, old = getattr(rebuilt, name), getattr(stored, name)
        if new != old and name != "through_seq":
            key = msgspec.structs.astuple(rebuilt)[0]
            yield f"{table} {key}: {name} is {old!r}, rebuilt {new!r}"


def _tokens(run: Run, row: RequestRow, count: int) -> Iterator[str]:
    """The stored output of a request against the counts of its decode steps."""
    if row.outcome is not None and row.num_output_tokens != count:
        yield f"request {row.number}: ended with {row.num_output_tokens} tokens, decoded {count}"
    stored = len(queries.output_tokens(run, row.request_id).ids) // ID_BYTES
    if stored == count:
        return
    purged = stored == 0 and (row.outcome is not None or not has_tokens(run))
    if not purged:
        yield f"token_ids: {stored} of request {row.number}, decoded {count}"
