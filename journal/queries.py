"""What the writer and readers ask of the file in the same words."""

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

import msgspec
from sqlalchemy import Table

from journal import tables
from journal.blocks import BlockRow
from journal.codec import decode_event, encode_event
from journal.database import Run
from journal.events import AnyEvent, Record, TokensDecoded
from journal.place import Position
from journal.projections import Projection
from journal.rows import (
    AdoptionRow,
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
from journal.statements import column_names
from journal.tokens import ID_BYTES, Logprobs, StepTokens, unpack_ids, unpack_logprobs, unpack_rows

BATCH_EVENTS = 1_000
"""Events read in one go: bounds the memory and how long a reader holds the log back."""

_COLUMNS = "seq, run_id, step, source, kind, request_id, at_ns, version, body"
_RECORDS = f"SELECT {_COLUMNS} FROM events WHERE seq > ? AND seq <= ? ORDER BY seq LIMIT ?"
_EVENTS_OF = f"SELECT {_COLUMNS} FROM events WHERE request_id = ? AND seq > ? ORDER BY seq LIMIT ?"
_MAX_SEQ = 2**63 - 1

# Side rows of requests that were never received, and of steps that were never committed.
REMOVE_ORPHANS = (
    "DELETE FROM token_ids WHERE request_id NOT IN (SELECT request_id FROM request)",
    "DELETE FROM request_parameters WHERE request_id NOT IN (SELECT request_id FROM request)",
    "DELETE FROM step_tokens WHERE seq NOT IN (SELECT seq FROM events)",
)

Row = TypeVar(
    "Row",
    RequestRow,
    RunRow,
    MinuteRow,
    BlockRow,
    PauseRow,
    PinRow,
    SampleRow,
    OrphanRow,
    AdoptionRow,
    PhaseRow,
    DiskWriteRow,
    DiskPlanRow,
)


def record_of(row: Sequence[Any]) -> Record:
    """A record from a row of `events`. Raises UnreadableEvent."""
    seq, run_id, step, source, kind, request_id, at_ns, version, body = row
    event = decode_event(kind, request_id, version, body)
    return Record(seq, run_id, step, source, at_ns, event)


def event_columns(record: Record) -> tuple[object, ...]:
    """A record as a row of `events`."""
    kind, request_id, version, body = encode_event(record.event)
    seq, run_id, step, source, at_ns, _ = msgspec.structs.astuple(record)
    return (seq, run_id, step, source, kind, request_id, at_ns, version, body)


def read_batch(run: Run, after_seq: int, until_seq: int | None) -> list[Record]:
    """The next records, at most `BATCH_EVENTS`; empty at the end."""
    last = _MAX_SEQ if until_seq is None else until_seq
    rows = run(_RECORDS, (after_seq, last, BATCH_EVENTS)).fetchall()
    return [record_of(row) for row in rows]


def read_records(run: Run, after_seq: int, until_seq: int | None) -> Iterator[Record]:
    """Records after `after_seq`, in batches; no transaction stays open between two of them."""
    while batch := read_batch(run, after_seq, until_seq):
        yield from batch
        after_seq = batch[-1].seq


def events_of(run: Run, request_id: str, after_seq: int, limit: int) -> list[Record]:
    """The events that name a request, from the index over them."""
    return [record_of(row) for row in run(_EVENTS_OF, (request_id, after_seq, limit)).fetchall()]


def select_rows(
    run: Run, table: Table, cls: type[Row], rest: str, values: tuple[object, ...] = ()
) -> list[Row]:
    """Rows of a projection as records. `rest` follows the table's name in the statement."""
    names = [column.name for column in table.columns]
    result = run(f"SELECT {column_names(table)} FROM {table.name} {rest}", values)
    return [cls(**dict(zip(names, row, strict=True))) for row in result.fetchall()]


def open_rows(run: Run, last_at_ns: int) -> OpenRows:
    """The stored rows that later events may change."""
    still_open = "WHERE outcome IS NULL ORDER BY number"
    runs = select_rows(run, tables.run, RunRow, "ORDER BY run_id DESC LIMIT 1")
    minutes = select_rows(run, tables.minute, MinuteRow, "ORDER BY minute DESC LIMIT 1")
    return OpenRows(
        requests=select_rows(run, tables.request, RequestRow, still_open),
        run=runs[0] if runs else None,
        minute=minutes[0] if minutes else None,
        last_at_ns=last_at_ns,
        pauses=select_rows(run, tables.pause, PauseRow, "WHERE outcome = 'open' ORDER BY number"),
        pins=select_rows(run, tables.pin, PinRow, "ORDER BY number"),
        orphans=select_rows(
            run, tables.orphan, OrphanRow, "WHERE outcome = 'open' ORDER BY number"
        ),
        phases=select_rows(run, tables.phase, PhaseRow, "WHERE ended_seq IS NULL ORDER BY number"),
        plans=select_rows(run, tables.disk_plan, DiskPlanRow, "ORDER BY hash, part"),
    )


def load_projection(run: Run, last_at_ns: int) -> Projection:
    """The fold of all events, from the stored rows and the few events behind them."""
    rows = open_rows(run, last_at_ns)
    projection = Projection()
    projection.restore(rows)
    through_seq = rows.minute.through_seq if rows.minute else 0
    for record in read_records(run, through_seq, None):
        projection.apply(record)
    return projection


def last_position(run: Run) -> Position:
    """That of the newest event."""
    query = "SELECT seq, step, at_ns, run_id FROM events ORDER BY seq DESC LIMIT 1"
    newest = run(query).fetchone()
    return Position() if newest is None else Position(*newest)


def find_request(run: Run, request_id: str) -> RequestRow | None:
    """The row of a request, or None."""
    rows = select_rows(run, tables.request, RequestRow, "WHERE request_id = ?", (request_id,))
    return rows[0] if rows else None


def prompt_tokens(run: Run, request_id: str) -> "array[int] | None":
    """The prompt, or None when it was purged or never stored."""
    query = "SELECT ids FROM token_ids WHERE request_id = ? AND part = 'prompt'"
    row = run(query, (request_id,)).fetchone()
    return None if row is None else unpack_ids(row[0])


def parameters(run: Run, request_id: str) -> bytes | None:
    """The JSON of the parameters, or None when they were purged or never stored."""
    query = "SELECT body FROM request_parameters WHERE request_id = ?"
    row = run(query, (request_id,)).fetchone()
    return None if row is None else row[0]


def purgeable(run: Run, ended_ns: int, limit: int) -> list[tuple[str]]:
    """Requests that ended by then and are still stored. Each has a row of parameters: there are as
    many of those as requests within their retention, however long the history is.
    """
    query = (
        "SELECT request_id FROM request_parameters JOIN request USING (request_id)"
        " WHERE ended_ns <= ? LIMIT ?"
    )
    return [(name,) for (name,) in run(query, (ended_ns, limit)).fetchall()]


class Output:
    """The output of a request while it is put together from its parts."""

    def __init__(self) -> None:
        self.ids = bytearray()
        self.logprobs: bytearray | None = None

    def add(self, ids: bytes, logprobs: bytes | None) -> None:
        """Appends tokens; packed log-probabilities come with all of them or with none."""
        self.ids += ids
        if logprobs is not None:
            self.logprobs = (self.logprobs or bytearray()) + logprobs

    @property
    def num_tokens(self) -> int:
        return len(self.ids) // ID_BYTES

    def unpacked(self) -> "tuple[array[int], list[Logprobs] | None]":
        """Token ids and, when the request asked for them, log-probabilities."""
        logprobs = None if self.logprobs is None else unpack_logprobs(bytes(self.logprobs))
        return unpack_ids(bytes(self.ids)), logprobs


def gathered_output(run: Run, request_id: str) -> Output:
    """What is gathered of a request's output so far."""
    output = Output()
    query = (
        "SELECT ids, logprobs FROM token_ids"
        " WHERE request_id = ? AND part = 'output' ORDER BY first_index"
    )
    for ids, logprobs in run(query, (request_id,)).fetchall():
        output.add(ids, logprobs)
    return output


def step_tokens(run: Run) -> Iterator[tuple[TokensDecoded, StepTokens]]:
    """The step rows with their events, oldest first. Their number is bounded by the
    writer, which gathers them.
    """
    query = (
        "SELECT s.ids, s.logprobs, e.kind, e.version, e.body"
        " FROM step_tokens s JOIN events e USING (seq) ORDER BY s.seq"
    )
    for ids, logprobs, kind, version, body in run(query).fetchall():
        event: AnyEvent = decode_event(kind, None, version, body)
        assert isinstance(event, TokensDecoded)
        yield event, StepTokens(ids, unpack_rows(logprobs))


def output_tokens(run: Run, request_id: str) -> Output:
    """The output of a request, also what is not gathered yet."""
    output = gathered_output(run, request_id)
    row = find_request(run, request_id)
    if row is None or row.outcome is not None:
        return output
    for event, tokens in step_tokens(run):
        if row.number in event.numbers:
            index = event.numbers.index(row.number)
            ids, logprobs = list(tokens.rows(event.counts))[index]
            if ids:
                output.add(ids, logprobs)
    return output
