"""Typed readers over the SQL views. journal/views.md explains each column."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from journal.figures import (
    Adoption,
    BlockFigures,
    CacheMiss,
    DiskWrite,
    MinuteFigures,
    Orphan,
    Pause,
    Phase,
    Pin,
    PinnedBlock,
    Reading,
    Rejection,
    RequestFigures,
    RunFigures,
    Wait,
)
from journal.moments import seqs_within
from journal.overlap import (
    ORPHAN_BOUNDS,
    ORPHANS,
    PAUSE_BOUNDS,
    PAUSES,
    PHASE_BOUNDS,
    PHASES,
    WAIT_BOUNDS,
    WAITS,
    Lasting,
    OrphanPart,
    PausePart,
    PhasePart,
    WaitPart,
    earlier_keys,
    parts,
)
from journal.reader import JournalReader
from journal.span import ALWAYS, Span, Unit

BATCH_ROWS = 1_000
NS_PER_MS = 1_000_000

Figures = TypeVar(
    "Figures",
    RequestFigures,
    RunFigures,
    MinuteFigures,
    Rejection,
    CacheMiss,
    BlockFigures,
    Pause,
    Pin,
    Orphan,
    Adoption,
    Reading,
    Phase,
    Wait,
    DiskWrite,
)


@dataclass(frozen=True, slots=True)
class _View(Generic[Figures]):
    """`key` names the columns that order the rows, and `after` has values of these before all that
    occur. Of a span, rows are shown whose time `at` is within it, and of rows that are `lasting`
    also those which began before it and were not over; where the first column is that of an event,
    or of a request, it bounds the search.
    """

    cls: type[Figures]
    name: str
    key: str
    after: tuple[int | str, ...]
    at: str = ""
    unit: Unit = "ms"
    lasting: Lasting | None = None


def requests(reader: JournalReader) -> Iterator[RequestFigures]:
    """All requests, in the order of arrival."""
    return _rows(reader, _View(RequestFigures, "requests", "number", (0,)))


def runs(reader: JournalReader) -> Iterator[RunFigures]:
    """All runs, the oldest first."""
    return _rows(reader, _View(RunFigures, "runs", "run_id", (0,)))


def throughput(reader: JournalReader, span: Span = ALWAYS) -> Iterator[MinuteFigures]:
    """All minutes in which something happened, the oldest first."""
    key = "minute_at"
    return _rows(reader, _View(MinuteFigures, "throughput", key, ("",), key, "minute"), span)


def rejections(reader: JournalReader) -> Iterator[Rejection]:
    """All rejected requests, in the order of arrival."""
    return _rows(reader, _View(Rejection, "rejections", "number", (0,)))


def cache_misses(reader: JournalReader, span: Span = ALWAYS) -> Iterator[CacheMiss]:
    """All requests that were admitted, in the order of arrival."""
    return _rows(reader, _View(CacheMiss, "cache_misses", "number", (0,), "received_at"), span)


def blocks(reader: JournalReader) -> Iterator[BlockFigures]:
    """All blocks, in the order of their hashes."""
    return _rows(reader, _View(BlockFigures, "blocks", "hash", ("",)))


def block(reader: JournalReader, name: str) -> BlockFigures | None:
    """One block by its hash, or None when it is not there."""
    names = ", ".join(BlockFigures.__struct_fields__)
    with reader.transaction() as run:
        row = run(f"SELECT {names} FROM blocks WHERE hash = ?", (name,)).fetchone()
    return None if row is None else BlockFigures(*row)


def pauses(reader: JournalReader, span: Span = ALWAYS) -> Iterator[PausePart]:
    """All pauses of which some lies in the span, in the order in which they began."""
    view = _View(Pause, "pauses", "pause_seq", (0,), "started_at", lasting=PAUSES)
    return parts(reader, _rows(reader, view, span), PAUSE_BOUNDS, PausePart, span)


def pins(reader: JournalReader) -> Iterator[Pin]:
    """What is pinned now, by the number of the request."""
    return _rows(reader, _View(Pin, "pins", "number", (0,)))


def pinned_blocks(reader: JournalReader) -> list[PinnedBlock]:
    """The blocks that are pinned now, by their hash: one read, since each walks the chains."""
    names = ", ".join(PinnedBlock.__struct_fields__)
    with reader.transaction() as run:
        rows = run(f"SELECT {names} FROM pinned_blocks ORDER BY hash").fetchall()
    return [PinnedBlock(*row) for row in rows]


def orphans(reader: JournalReader, span: Span = ALWAYS) -> Iterator[OrphanPart]:
    """Each time that a request had no client, of which some lies in the span, in their order."""
    key, after = "lost_seq, number", (0, 0)
    view = _View(Orphan, "orphans", key, after, "orphaned_at", lasting=ORPHANS)
    return parts(reader, _rows(reader, view, span), ORPHAN_BOUNDS, OrphanPart, span)


def adoptions(reader: JournalReader) -> Iterator[Adoption]:
    """Each adoption, the oldest first."""
    return _rows(reader, _View(Adoption, "adoptions", "seq", (0,)))


def memory(reader: JournalReader, span: Span = ALWAYS) -> Iterator[Reading]:
    """All readings whose events are still there, the oldest first."""
    return _rows(reader, _View(Reading, "memory", "seq", (0,), "sampled_at"), span)


def phases(reader: JournalReader, span: Span = ALWAYS) -> Iterator[PhasePart]:
    """All phases of all requests of which some lies in the span, in the order of their begin."""
    view = _View(Phase, "phases", "seq, number", (0, 0), "began_at", lasting=PHASES)
    return parts(reader, _rows(reader, view, span), PHASE_BOUNDS, PhasePart, span)


def waits(reader: JournalReader, span: Span = ALWAYS) -> Iterator[WaitPart]:
    """Each time that a request waited or was held, of which some lies in the span, in the order in
    which they began.
    """
    view = _View(Wait, "waits", "seq, number", (0, 0), "began_at", lasting=WAITS)
    return parts(reader, _rows(reader, view, span), WAIT_BOUNDS, WaitPart, span)


def disk_writes(reader: JournalReader, span: Span = ALWAYS) -> Iterator[DiskWrite]:
    """All files that were written and whose events are still there, the oldest first."""
    return _rows(reader, _View(DiskWrite, "disk_writes", "seq", (0,), "written_at"), span)


def _rows(reader: JournalReader, view: _View[Figures], span: Span = ALWAYS) -> Iterator[Figures]:
    """The rows of a view in batches, each in a transaction of its own."""
    names = ", ".join(view.cls.__struct_fields__)
    marks = ", ".join("?" for _ in view.after)
    keys = view.key.split(", ")
    within, ends = "", ()
    earlier: list[tuple[int, ...]] = []
    if span != ALWAYS:
        within, ends = _within(reader, view, span)
        earlier = _earlier(reader, view, span)
        yield from _rows_of(reader, view, earlier)
    query = (
        f"SELECT {names} FROM {view.name} WHERE ({view.key}) > ({marks}) {within}"
        f" ORDER BY {view.key} LIMIT ?"
    )
    after, shown = view.after, frozenset(earlier)
    while True:
        with reader.transaction() as run:
            rows = run(query, (*after, *ends, BATCH_ROWS)).fetchall()
        if not rows:
            return
        for row in (view.cls(*values) for values in rows):
            after = tuple(getattr(row, name) for name in keys)
            if after not in shown:
                yield row


def _earlier(reader: JournalReader, view: _View[Figures], span: Span) -> list[tuple[int, ...]]:
    """The keys of rows that began before the span and reach into it."""
    if view.lasting is None:
        return []
    with reader.transaction() as run:
        return earlier_keys(run, view.lasting, span)


def _rows_of(
    reader: JournalReader, view: _View[Figures], keys: list[tuple[int, ...]]
) -> Iterator[Figures]:
    """The rows with these keys, in this order."""
    names = ", ".join(view.cls.__struct_fields__)
    marks = ", ".join("?" for _ in view.after)
    query = f"SELECT {names} FROM {view.name} WHERE ({view.key}) = ({marks})"
    for first in range(0, len(keys), BATCH_ROWS):
        with reader.transaction() as run:
            found = [run(query, key).fetchall() for key in keys[first : first + BATCH_ROWS]]
        yield from (view.cls(*row) for rows in found for row in rows)


def _within(
    reader: JournalReader, view: _View[Figures], span: Span
) -> tuple[str, tuple[int | str, ...]]:
    """The condition of a span, and its values. Writing the time of each row as text takes long, so
    it is left to the rows that may be meant.
    """
    condition, texts = f"AND {view.at} BETWEEN ? AND ?", span.texts(view.unit)
    key = view.key.split(", ")[0]
    if key == view.at:
        return condition, texts
    # The views round to milliseconds. Among events the seqs are exact; the texts only bound what
    # was before the first of them.
    texts = Span(span.first_ns, span.last_ns + NS_PER_MS).texts(view.unit)
    with reader.transaction() as run:
        if key == "number":
            query = (
                "SELECT coalesce(min(number), 0) - 1, coalesce(max(number), 0) FROM request"
                " WHERE received_ns BETWEEN ? AND ?"
            )
            first, last = run(query, (span.first_ns, span.last_ns)).one()
        else:
            first, last = seqs_within(run, span)
    return f"AND {key} > ? AND {key} <= ? {condition}", (first, last, *texts)
