"""A bundle: part of a journal as a file of its own, to be sent to whoever looks into an incident.

It is a journal like any other, which begins with the state before its first step (`state_carried`)
and holds the events of a window, with the rows of the projections that they are about. It can be
read, replayed and asked with SQL; nobody writes to it. Tokens, texts and parameters are left out
unless they are wanted.

Each step has a digest over the one before it and over its own events as they are stored. The last
one stands apart with the number of steps, so an event that was changed, and a tail that is missing,
are noticed. That is for accidents and not for forgers: who changes an event can make the digests
anew.
"""

import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from hashlib import sha256
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import msgspec

from journal import tables
from journal.changes import write_changes
from journal.database import Run, make_engine, translated
from journal.errors import JournalBroken, JournalError
from journal.events import Record, StateCarried
from journal.files import flush
from journal.moments import bounds
from journal.queries import BATCH_EVENTS, event_columns, select_rows
from journal.reader import JournalReader
from journal.rebuild import Base, Rebuild, load_base
from journal.rows import Changes, OrphanRow, PauseRow, PhaseRow
from journal.statements import INSERT_BLOCK, INSERT_EVENT, INSERT_PARAMETERS, INSERT_TOKEN_IDS
from journal.tables import SCHEMA
from journal.tokens import pack_ids, pack_logprobs

FORMAT = 1
"""Counts the meanings that the tables of a bundle have had."""

BUNDLE_TABLE = (
    "CREATE TABLE bundle (format INTEGER NOT NULL, made_at_ns INTEGER NOT NULL,"
    " what TEXT NOT NULL, first_step INTEGER NOT NULL, last_step INTEGER NOT NULL,"
    " num_steps INTEGER NOT NULL, with_tokens INTEGER NOT NULL, digest BLOB NOT NULL) STRICT"
)
DIGEST_TABLE = "CREATE TABLE step_digest (step INTEGER PRIMARY KEY, digest BLOB NOT NULL) STRICT"

NO_DIGEST = bytes(32)


class Window(msgspec.Struct, frozen=True, kw_only=True):
    """What goes into a bundle: the records after `through_seq` (0: from the journal's beginning) up
    to and with `until_seq`, both ends of steps. `what` says in words what was asked for.
    """

    through_seq: int
    until_seq: int
    what: str


class Bundle(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle that was written."""

    file: Path
    num_events: int
    first_step: int
    last_step: int
    num_bytes: int


def export(
    reader: JournalReader,
    file: Path,
    window: Window,
    carried: tuple[int, Mapping[str, object]] | None,
    *,
    with_tokens: bool = False,
) -> Bundle:
    """Writes a bundle beside its name and then gives it that. `carried` is the state through
    `window.through_seq`, as builtins, with its version; null when the window begins with the
    journal. The reader's journal may be written to meanwhile.

    Raises JournalError for a name that is taken or cannot be written, and when there is no space.
    """
    if os.path.lexists(file):
        raise JournalError(f"{file}: exists; choose another name")
    if not file.parent.is_dir():
        raise JournalError(f"{file}: there is no folder {file.parent}; make it first")
    copy = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        os.close(os.open(copy, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        with writing(copy) as run:
            counts = Writer(reader, run, window, with_tokens=with_tokens).write(carried)
        flush(copy)
        copy.rename(file)
        flush(file.parent)
    except OSError as error:
        raise JournalError(f"{file}: cannot be written ({error.strerror})") from error
    finally:
        with suppress(OSError):
            copy.unlink()
    first, last, num_events = counts
    return Bundle(
        file=file,
        num_events=num_events,
        first_step=first,
        last_step=last,
        num_bytes=file.stat().st_size,
    )


@contextmanager
def writing(file: Path) -> Generator[Run, None, None]:
    """A connection to a new file that nobody else sees before it is whole."""
    engine = make_engine(file, "rw")
    try:
        with translated(file), engine.connect() as connection:
            run = connection.exec_driver_sql
            run("PRAGMA journal_mode = OFF").close()
            run("PRAGMA synchronous = OFF").close()
            run("BEGIN")
            yield run
            run("COMMIT")
    except JournalBroken as error:
        raise JournalError(str(error)) from error
    finally:
        engine.dispose()


class Writer:
    """Writes one bundle."""

    def __init__(
        self, reader: JournalReader, run: Run, window: Window, *, with_tokens: bool
    ) -> None:
        self.reader = reader
        self.run = run
        self.window = window
        self.with_tokens = with_tokens
        self.digest = NO_DIGEST
        self.num_events = 0
        self.num_steps = 0
        self.first_step = 0
        self.last_step = 0

    def write(self, carried: tuple[int, Mapping[str, object]] | None) -> tuple[int, int, int]:
        """The first and the last step, and how many events there are."""
        with self.reader.transaction() as source:
            base = load_base(source)
            first_seq = (bounds(source) or (0, 0))[0]
            schema = source(
                "SELECT type, sql FROM sqlite_master WHERE sql IS NOT NULL"
                " AND name NOT IN ('bundle', 'step_digest')"
                " ORDER BY CASE type WHEN 'table' THEN 0 WHEN 'view' THEN 1 ELSE 2 END, rowid"
            ).fetchall()
        later = [sql for kind, sql in schema if kind != "table"]
        for sql in (*(sql for kind, sql in schema if kind == "table"), BUNDLE_TABLE, DIGEST_TABLE):
            self.run(sql)
        self.run("INSERT INTO alembic_version VALUES (?)", (SCHEMA,))
        rebuild = Rebuild(base)
        last: Record | None = None
        for record in self.reader.read(0, self.window.through_seq):
            rebuild.fold(record)
            last = record
            if record.seq % BATCH_EVENTS == 0:
                rebuild.take_changes(record.seq)  # Only what they come to is written.
        rebuild.take_changes(self.window.through_seq)
        if carried is not None and last is not None:
            self.put_base(rebuild.base(), last, carried)
        elif base.rows.run is not None:
            self.put_rows(base, first_seq)  # the journal itself begins with a carried state
        self.put_window(rebuild)
        if self.with_tokens:
            self.put_tokens(rebuild)
        made_at_ns = time.time_ns()
        self.run(
            "INSERT INTO bundle VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
            (
                FORMAT,
                made_at_ns,
                self.window.what,
                self.first_step,
                self.last_step,
                self.num_steps,
                int(self.with_tokens),
                self.digest,
            ),
        )
        for sql in later:
            self.run(sql)
        return self.first_step, self.last_step, self.num_events

    def put_base(self, base: Base, last: Record, carried: tuple[int, Mapping[str, object]]) -> None:
        """The state before the window, in place of the last event before it."""
        version, state = carried
        event = StateCarried(state_version=version, through_seq=last.seq, state=dict(state))
        first = msgspec.structs.replace(last, source="fact", event=event)
        self.put_rows(base, last.seq)
        self.put_steps([first], None)  # nothing is made of it: its rows are there

    def put_rows(self, base: Base, seq: int) -> None:
        """The rows that were open behind this seq, and what a rebuild starts from."""
        body = msgspec.json.encode(base).decode()
        self.run("INSERT INTO carried_rows VALUES (?, ?)", (seq, body))
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
        write_changes(self.run, changes)
        for block in base.blocks:
            self.run(INSERT_BLOCK, msgspec.structs.astuple(block))
        self.put_past(base, seq)

    def put_past(self, base: Base, last_seq: int) -> None:
        """What was over by then of the requests that were open: their rows count it."""
        numbers = sorted(row.number for row in base.rows.requests)
        open_pauses = {row.pause_seq for row in base.rows.pauses}
        open_orphans = {(row.lost_seq, row.number) for row in base.rows.orphans}
        open_phases = {(row.seq, row.number) for row in base.rows.phases}
        with self.reader.transaction() as source:
            for number in numbers:
                key = (number, last_seq)
                where = "WHERE number = ? AND pause_seq <= ?"
                pauses = select_rows(source, tables.pause, PauseRow, where, key)
                where = "WHERE number = ? AND lost_seq <= ?"
                orphans = select_rows(source, tables.orphan, OrphanRow, where, key)
                where = "WHERE number = ? AND seq <= ?"
                phases = select_rows(source, tables.phase, PhaseRow, where, key)
                past = Changes(
                    pauses={r.pause_seq: r for r in pauses if r.pause_seq not in open_pauses},
                    orphans={
                        (r.lost_seq, r.number): r
                        for r in orphans
                        if (r.lost_seq, r.number) not in open_orphans
                    },
                    phases={
                        (r.seq, r.number): r for r in phases if (r.seq, r.number) not in open_phases
                    },
                )
                write_changes(self.run, past)

    def put_window(self, rebuild: Rebuild) -> None:
        """The events of the window, and what they make of the rows."""
        records = self.reader.read(self.window.through_seq, self.window.until_seq)
        self.put_steps(records, rebuild)
        rebuild.projection.flush()
        self.put_changes(rebuild, self.window.until_seq)

    def put_changes(self, rebuild: Rebuild, through_seq: int) -> None:
        """Writes the rows that events have changed since the last call."""
        changes = rebuild.take_changes(through_seq)
        if changes is not None:
            write_changes(self.run, changes)

    def put_steps(self, records: Iterable[Record], rebuild: Rebuild | None) -> None:
        """Writes records step by step with their digests, some steps at a time, and what they make
        of the rows.
        """
        batch: list[Record] = []
        for _, group in groupby(records, key=attrgetter("step")):
            batch += group
            if len(batch) >= BATCH_EVENTS:
                self.put_batch(batch, rebuild)
                batch.clear()
        if batch:
            self.put_batch(batch, rebuild)

    def put_batch(self, batch: list[Record], rebuild: Rebuild | None) -> None:
        """Writes some whole steps."""
        rows: list[tuple[object, ...]] = []
        digests: list[tuple[int, bytes]] = []
        for step, group in groupby(batch, key=attrgetter("step")):
            columns = [event_columns(record) for record in group]
            self.digest = digest_of(self.digest, columns)
            rows += columns
            digests.append((step, self.digest))
        self.run(INSERT_EVENT, rows)
        self.run("INSERT OR REPLACE INTO step_digest VALUES (?, ?)", digests)
        self.num_steps += len(digests)
        self.num_events += len(rows)
        self.first_step = self.first_step or batch[0].step
        self.last_step = batch[-1].step
        if rebuild is not None:
            for record in batch:
                rebuild.fold(record)
            self.put_changes(rebuild, batch[-1].seq)

    def put_tokens(self, rebuild: Rebuild) -> None:
        """Prompts, parameters and output, as much of it as the window knows."""
        names = self.run("SELECT request_id, number, num_output_tokens FROM request").fetchall()
        for request_id, number, num_ended in names:
            prompt = self.reader.prompt_tokens(request_id)
            body = self.reader.parameters(request_id)
            if prompt is None or body is None:
                continue  # it was refused, or its tokens were purged
            self.run(INSERT_TOKEN_IDS, (request_id, "prompt", 0, pack_ids(prompt), None))
            self.run(INSERT_PARAMETERS, (request_id, body))
            count = rebuild.counts.get(number, 0) if num_ended is None else num_ended
            ids, logprobs = self.reader.output_tokens(request_id)
            if count:
                kept = None if logprobs is None else pack_logprobs(logprobs[:count])
                row = (request_id, "output", 0, pack_ids(ids[:count]), kept)
                self.run(INSERT_TOKEN_IDS, row)


def digest_of(before: bytes, rows: Iterable[tuple[object, ...]]) -> bytes:
    """SHA-256 over the digest before and the rows of `events`, each as a JSON list."""
    digest = sha256(before)
    for row in rows:
        digest.update(msgspec.json.encode(row) + b"\n")
    return digest.digest()


def is_bundle(run: Run) -> bool:
    """Whether this file is a bundle."""
    query = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name = 'bundle'"
    return bool(run(query).scalar())


def has_tokens(run: Run) -> bool:
    """Whether tokens are kept here: always, but for a bundle that left them out."""
    return not is_bundle(run) or bool(run("SELECT max(with_tokens) FROM bundle").scalar())


def refuse_changed(reader: JournalReader) -> None:
    """Raises JournalError for a bundle that somebody has changed; any other journal is let pass."""
    with reader.transaction() as run:
        for fault in verify_bundle(run) if is_bundle(run) else ():
            raise JournalError(f"{reader.file}: {fault}; have it exported again")


def verify_bundle(run: Run) -> Iterator[str]:
    """What is wrong with the chain of digests, one line each."""
    described = run("SELECT last_step, num_steps, digest FROM bundle").fetchall()
    if len(described) != 1:
        yield f"bundle: {len(described)} descriptions, expected one"
        return
    last_step, num_steps, last_digest = described[0]
    stored: dict[int, bytes] = dict(run("SELECT step, digest FROM step_digest").fetchall())
    digest, steps = NO_DIGEST, 0
    columns = "seq, run_id, step, source, kind, request_id, at_ns, version, body"
    rows = run(f"SELECT {columns} FROM events ORDER BY seq")
    for step, group in groupby(rows, key=lambda row: row[2]):
        digest = digest_of(digest, [tuple(row) for row in group])
        steps += 1
        if stored.get(step) != digest:
            yield f"bundle: step {step} is not what was exported"
            return
    if (steps, digest) != (num_steps, last_digest):
        yield f"bundle: {steps} steps of {num_steps} are here, the last of which was {last_step}"
