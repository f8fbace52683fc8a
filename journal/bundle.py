"""A bundle: part of a journal as a file of its own, to be sent to whoever looks into an incident.

It is a journal like any other, which begins with the state before its first step (`state_carried`)
and holds the events of a window, with the rows of the projections that they are about. It can be
read, replayed and asked with SQL; nobody writes to it. Tokens, texts and parameters are left out
unless they are wanted.

Each step has a digest over the one before it and over its own events as they are stored. The last
one stands apart with the number of steps, so an event that was changed, and a tail that is missing,
are noticed. The rows of all other tables have digests too: see row_digests.py. That is for
accidents and not for forgers: who changes an event can make the digests anew.
"""

import os
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha256
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from typing import Protocol

import msgspec

from journal.carrying import put_rows
from journal.changes import write_changes
from journal.database import Run, is_bundle, make_engine, translated
from journal.definitions import changed_definitions
from journal.errors import JournalBroken, JournalError, JournalFull
from journal.events import Record, StateCarried
from journal.files import flush, make_part, unfit_name
from journal.moments import bounds
from journal.points import Point
from journal.queries import BATCH_EVENTS, event_columns
from journal.reader import JournalReader
from journal.rebuild import Base, Rebuild, load_base
from journal.row_digests import COLUMN, changed_rows, row_digests
from journal.statements import INSERT_EVENT, INSERT_PARAMETERS, INSERT_TOKEN_IDS
from journal.tables import SCHEMA
from journal.tokens import pack_ids, pack_logprobs

FORMAT = 1
"""Counts the meanings that the tables of a bundle have had."""

BUNDLE_TABLE = (
    "CREATE TABLE bundle (format INTEGER NOT NULL, made_at_ns INTEGER NOT NULL,"
    " what TEXT NOT NULL, first_step INTEGER NOT NULL, last_step INTEGER NOT NULL,"
    " num_steps INTEGER NOT NULL, with_tokens INTEGER NOT NULL, digest BLOB NOT NULL,"
    f" {COLUMN} TEXT NOT NULL) STRICT"
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
    """A bundle that was written. With tokens it has those of `num_prompts` of `num_requests`
    requests; without, both are 0.
    """

    file: Path
    num_events: int
    first_step: int
    last_step: int
    num_bytes: int
    num_requests: int
    num_prompts: int


class Before(Protocol):
    """The scheduler's state before the window, of which this package knows no more."""

    def fold(self, record: Record) -> None:
        """Called for each record before the window, in order."""
        ...

    def carried(self) -> tuple[int, Mapping[str, object]]:
        """The version of the state and the state, as builtins."""
        ...


def export(
    reader: JournalReader,
    file: Path,
    window: Window,
    before: Before,
    point: Point | None = None,
    *,
    with_tokens: bool = False,
) -> Bundle:
    """Writes a bundle beside its name and then gives it that. What lies between `point` and the
    window is folded into `before`, which is the state at the point, or is empty without one. The
    reader's journal may be written to meanwhile.

    Raises JournalError for a name that is taken or cannot be written, for tokens that are not
    there, and when there is no space.
    """
    refuse(reader, file, with_tokens=with_tokens)
    try:
        with unfinished(file) as copy:
            with writing(copy, file) as run:
                writer = Writer(reader, run, window, with_tokens=with_tokens)
                writer.write(before, point)
            flush(copy)
            copy.rename(file)
            flush(file.parent)
    except OSError as error:
        raise JournalError(f"{file}: cannot be written ({error.strerror})") from error
    return Bundle(
        file=file,
        num_events=writer.num_events,
        first_step=writer.first_step,
        last_step=writer.last_step,
        num_bytes=file.stat().st_size,
        num_requests=writer.num_requests,
        num_prompts=writer.num_prompts,
    )


def refuse(reader: JournalReader, file: Path, *, with_tokens: bool) -> None:
    """Raises JournalError for a name that cannot be that of a bundle, and for tokens that are not
    there.
    """
    unfit = unfit_name(file)
    if unfit is not None:
        raise JournalError(unfit)
    if os.path.lexists(file):
        raise JournalError(f"{file}: exists; choose another name")
    with reader.transaction() as run:
        if with_tokens and not has_tokens(run):
            raise JournalError(
                f"{reader.file}: was exported without prompts and answers, so none can be exported "
                "from it; leave --with-tokens out"
            )


@contextmanager
def unfinished(file: Path) -> Generator[Path, None, None]:
    """An empty file beside `file`, which is gone afterwards if it has no other name by then."""
    copy, descriptor = make_part(file)
    try:
        os.close(descriptor)
        yield copy
    finally:
        copy.unlink(missing_ok=True)


@contextmanager
def writing(copy: Path, file: Path) -> Generator[Run, None, None]:
    """A connection to a new file that nobody else sees before it is whole; errors name the one that
    it is to be.
    """
    engine = make_engine(copy, "rw")
    try:
        with translated(file), engine.connect() as connection:
            run = connection.exec_driver_sql
            run("PRAGMA journal_mode = OFF").close()
            run("PRAGMA synchronous = OFF").close()
            run("BEGIN")
            yield run
            run("COMMIT")
    except JournalFull as error:
        raise JournalError(
            f"{file.parent}: no space left for {file.name}; make some, or choose another disk"
        ) from error
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
        self.num_requests = 0
        self.num_prompts = 0

    def write(self, before: Before, point: Point | None) -> None:
        """All of it; what came of it is in the counts afterwards."""
        with self.reader.transaction() as source:
            base = load_base(source) if point is None else point.base
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
        if self.window.through_seq:
            last = self.fold_before(rebuild, before, 0 if point is None else point.seq)
            self.put_base(rebuild.base(), last, before.carried())
        elif base.rows.run is not None:
            put_rows(
                self.run, self.reader, base, first_seq
            )  # the journal itself begins with a carried state
        self.put_window(rebuild)
        if self.with_tokens:
            self.put_tokens(rebuild)
        made_at_ns = time.time_ns()
        self.run(
            "INSERT INTO bundle VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
            (
                FORMAT,
                made_at_ns,
                self.window.what,
                self.first_step,
                self.last_step,
                self.num_steps,
                int(self.with_tokens),
                self.digest,
                row_digests(self.run),
            ),
        )
        for sql in later:
            self.run(sql)

    def fold_before(self, rebuild: Rebuild, before: Before, after_seq: int) -> Record:
        """What lies before the window, in one pass for rows and state; the last record of it."""
        through_seq = self.window.through_seq
        for record in self.reader.read(after_seq, through_seq):
            before.fold(record)
            rebuild.fold(record)
            if record.seq % BATCH_EVENTS == 0:
                rebuild.take_changes(record.seq)  # Only what they come to is written.
        rebuild.projection.flush()
        rebuild.take_changes(through_seq)
        return next(self.reader.read(through_seq - 1, through_seq))

    def put_base(self, base: Base, last: Record, carried: tuple[int, Mapping[str, object]]) -> None:
        """The state before the window, in place of the last event before it."""
        version, state = carried
        event = StateCarried(state_version=version, through_seq=last.seq, state=dict(state))
        first = msgspec.structs.replace(last, source="fact", event=event)
        put_rows(self.run, self.reader, base, last.seq)
        self.put_steps([first], None)  # nothing is made of it: its rows are there

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
        self.num_requests = len(names)
        for request_id, number, num_ended in names:
            prompt = self.reader.prompt_tokens(request_id)
            body = self.reader.parameters(request_id)
            if prompt is None or body is None:
                continue  # it was refused, or its tokens were purged
            self.num_prompts += 1
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


def has_tokens(run: Run) -> bool:
    """Whether tokens are kept here: always, but for a bundle that left them out."""
    return not is_bundle(run) or bool(run("SELECT max(with_tokens) FROM bundle").scalar())


def refuse_changed(reader: JournalReader) -> None:
    """Raises JournalError for a bundle that somebody has changed; any other journal is let pass."""
    with reader.transaction() as run:
        if not is_bundle(run):
            return
        for fault in chain(verify_bundle(run), changed_definitions(run), changed_rows(run)):
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
