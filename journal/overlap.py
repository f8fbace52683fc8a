"""What of a row that lasts lies in a span of time, and which rows reach into it from before."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Generic, TypeVar

import msgspec

from journal.database import Run
from journal.figures import Orphan, Pause, Phase, Wait
from journal.queries import last_position
from journal.reader import JournalReader
from journal.span import EVER_NS, Span

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
MS = timedelta(milliseconds=1)
NS_PER_MS = 1_000_000


class PausePart(Pause, frozen=True):
    """A row of `pauses`. `within_ms`: how long the request was held in the span; `is_over`: whether
    the pause was over at the span's end.
    """

    within_ms: int
    is_over: int


class PhasePart(Phase, frozen=True):
    """A row of `phases`. `within_ms`: how much of it lies in the span; `is_over` as of a pause."""

    within_ms: int
    is_over: int


class WaitPart(Wait, frozen=True):
    """A row of `waits`, with the same as a phase."""

    within_ms: int
    is_over: int


class OrphanPart(Orphan, frozen=True):
    """A row of `orphans`, with the same as a phase."""

    within_ms: int
    is_over: int


Row = TypeVar("Row", Pause, Phase, Wait, Orphan)
Part = TypeVar("Part", PausePart, PhasePart, WaitPart, OrphanPart)


@dataclass(frozen=True, slots=True)
class Lasting:
    """Where rows that last are kept: the table, its key, and the columns of their begin and end."""

    table: str
    key: str
    began: str
    ended: str
    condition: str = "1"


PAUSES = Lasting("pause", "pause_seq", "started_ns", "coalesce(resumed_ns, ended_ns)")
PHASES = Lasting("phase", "seq, number", "began_ns", "ended_ns")
WAITS = Lasting("phase", "seq, number", "began_ns", "ended_ns", "phase IN ('waiting', 'paused')")
ORPHANS = Lasting("orphan", "lost_seq, number", "lost_ns", "ended_ns")


@dataclass(frozen=True, slots=True)
class Edges:
    """How many rows began before a span, and of how many the end lies behind it, or nowhere."""

    num_before: int
    num_not_over: int


def earlier_keys(run: Run, kind: Lasting, span: Span) -> list[tuple[int, ...]]:
    """The keys of rows that began before the span and were not over, in their order: no more than
    there were requests at that time.
    """
    query = (
        f"SELECT {kind.key} FROM {kind.table} WHERE {kind.began} < ?"
        f" AND coalesce({kind.ended}, {EVER_NS}) > ? AND {kind.condition} ORDER BY {kind.key}"
    )
    return [tuple(row) for row in run(query, (span.first_ns, span.first_ns)).fetchall()]


def edges(reader: JournalReader, kind: Lasting, span: Span) -> Edges:
    """How many rows reach over the span's begin, and over its end or the journal's."""
    query = (
        f"SELECT count(*) FROM {kind.table} WHERE {kind.began} <= ?"
        f" AND coalesce({kind.ended}, {EVER_NS}) > ? AND {kind.condition}"
    )
    with reader.transaction() as run:
        end_ns = end_of(run, span)
        num_not_over: int = run(query, (end_ns, end_ns)).scalar_one()
        return Edges(len(earlier_keys(run, kind, span)), num_not_over)


def end_of(run: Run, span: Span) -> int:
    """Where a span ends of which the journal knows: no later than with its last event."""
    return min(span.last_ns, last_position(run).at_ns)


@dataclass(frozen=True, slots=True)
class Bounds(Generic[Row]):
    """What of a row lasts: from one of its times to the first of others that is there."""

    begin: str
    ends: tuple[str, ...]
    length: str


PAUSE_BOUNDS: Bounds[Pause] = Bounds("paused_at", ("resumed_at", "ended_at"), "held_ms")
PHASE_BOUNDS: Bounds[Phase] = Bounds("began_at", ("ended_at",), "phase_ms")
WAIT_BOUNDS: Bounds[Wait] = Bounds("began_at", ("ended_at",), "wait_ms")
ORPHAN_BOUNDS: Bounds[Orphan] = Bounds("orphaned_at", ("ended_at",), "orphaned_ms")


def parts(
    reader: JournalReader, rows: Iterable[Row], bounds: Bounds[Row], cls: type[Part], span: Span
) -> Iterator[Part]:
    """The rows with what of them lies in the span. One that is not over lasts to the journal's end
    as it was when the first row was asked for.
    """
    with reader.transaction() as run:
        last_ms = end_of(run, span) // NS_PER_MS
    first_ms = span.first_ns // NS_PER_MS
    for row in rows:
        begin_ms = ms_of(getattr(row, bounds.begin))
        found: list[str | None] = [getattr(row, name) for name in bounds.ends]
        end_ms = ms_of(next((text for text in found if text is not None), None))
        is_over = end_ms is not None and end_ms <= last_ms
        if begin_ms is None:
            within_ms = 0
        elif begin_ms >= first_ms and is_over:
            within_ms = getattr(row, bounds.length)
        else:
            end_ms = last_ms if end_ms is None else min(end_ms, last_ms)
            within_ms = max(0, end_ms - max(begin_ms, first_ms))
        yield cls(**msgspec.structs.asdict(row), within_ms=within_ms, is_over=int(is_over))


def ms_of(text: str | None) -> int | None:
    """Milliseconds since 1970 of a time as the views write it."""
    return None if text is None else (datetime.fromisoformat(text) - EPOCH) // MS
