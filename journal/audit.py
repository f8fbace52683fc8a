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
from journal.reader import JournalReader
from journal.span import ALWAYS, Span, Unit

BATCH_ROWS = 1_000

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
    occur. Of a span, rows are shown whose time `at` is within it; where the first column is that
    of an event, or of a request, it bounds the search.
    """

    cls: type[Figures]
    name: str
    key: str
    after: tuple[int | str, ...]
    at: str = ""
    unit: Unit = "ms"


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


def pauses(reader: JournalReader, span: Span = ALWAYS) -> Iterator[Pause]:
    """All pauses, in the order in which they began."""
    return _rows(reader, _View(Pause, "pauses", "pause_seq", (0,), "started_at"), span)


def pins(reader: JournalReader) -> Iterator[Pin]:
    """What is pinned now, by the number of the request."""
    return _rows(reader, _View(Pin, "pins", "number", (0,)))


def pinned_blocks(reader: JournalReader) -> list[PinnedBlock]:
    """The blocks that are pinned now, by their hash: one read, since each walks the chains."""
    names = ", ".join(PinnedBlock.__struct_fields__)
    with reader.transaction() as run:
        rows = run(f"SELECT {names} FROM pinned_blocks ORDER BY hash").fetchall()
    return [PinnedBlock(*row) for row in rows]


def orphans(reader: JournalReader, span: Span = ALWAYS) -> Iterator[Orphan]:
    """Each time that a request lost its client, in the order of these times."""
    return _rows(reader, _View(Orphan, "orphans", "lost_seq, number", (0, 0), "orphaned_at"), span)


def adoptions(reader: JournalReader) -> Iterator[Adoption]:
    """Each adoption, the oldest first."""
    return _rows(reader, _View(Adoption, "adoptions", "seq", (0,)))


def memory(reader: JournalReader, span: Span = ALWAYS) -> Iterator[Reading]:
    """All readings whose events are still there, the oldest first."""
    return _rows(reader, _View(Reading, "memory", "seq", (0,), "sampled_at"), span)


def phases(reader: JournalReader, span: Span = ALWAYS) -> Iterator[Phase]:
    """All phases of all requests that began in the span, in this order."""
    return _rows(reader, _View(Phase, "phases", "seq, number", (0, 0), "began_at"), span)


def waits(reader: JournalReader, span: Span = ALWAYS) -> Iterator[Wait]:
    """Each time that a request waited or was held, in the order in which they began."""
    return _rows(reader, _View(Wait, "waits", "seq, number", (0, 0), "began_at"), span)


def disk_writes(reader: JournalReader, span: Span = ALWAYS) -> Iterator[DiskWrite]:
    """All files that were written and whose events are still there, the oldest first."""
    return _rows(reader, _View(DiskWrite, "disk_writes", "seq", (0,), "written_at"), span)


def _rows(reader: JournalReader, view: _View[Figures], span: Span = ALWAYS) -> Iterator[Figures]:
    """The rows of a view in batches, each in a transaction of its own."""
    names = ", ".join(view.cls.__struct_fields__)
    marks = ", ".join("?" for _ in view.after)
    within, ends = "", ()
    if span != ALWAYS:
        within, ends = _within(reader, view, span)
    query = (
        f"SELECT {names} FROM {view.name} WHERE ({view.key}) > ({marks}) {within}"
        f" ORDER BY {view.key} LIMIT ?"
    )
    after = view.after
    while True:
        with reader.transaction() as run:
            rows = run(query, (*after, *ends, BATCH_ROWS)).fetchall()
        if not rows:
            return
        batch = [view.cls(*row) for row in rows]
        yield from batch
        after = tuple(getattr(batch[-1], name) for name in view.key.split(", "))


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
