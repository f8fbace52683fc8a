"""The projections folded anew from the events: to compare with the stored ones, and to know what
they were at an earlier event.

A journal that was compacted begins with state_carried. What the rows were there is kept in
`carried_rows`, and a rebuild starts from it. The same table holds the rows of points, which
points.py explains.
"""

from collections.abc import Iterable
from operator import attrgetter

import msgspec

from journal.blocks import BlockRow, apply
from journal.database import Run
from journal.events import Record, TokensDecoded
from journal.projections import Projection
from journal.rows import Changes, OpenRows


class Base(msgspec.Struct, kw_only=True):
    """Where a rebuild starts: the open rows, how many tokens each open request had, by its number,
    and the blocks. `code_digest` is set in points alone.
    """

    rows: OpenRows
    counts: dict[int, int]
    blocks: list[BlockRow] = []
    code_digest: str = ""


EMPTY = Base(rows=OpenRows(requests=[], run=None, minute=None, last_at_ns=0), counts={})


def load_base(run: Run) -> Base:
    """The base of this file: empty unless it was compacted."""
    query = "SELECT body FROM carried_rows WHERE seq = (SELECT min(seq) FROM events)"
    body = run(query).scalar()
    return EMPTY if body is None else msgspec.json.decode(body, type=Base)


def base_of(rows: OpenRows, counts: dict[int, int], blocks: Iterable[BlockRow]) -> Base:
    """A base in an order of its own: the writer's rows may have come from the file, in another one
    than that in which a fold has made them.
    """
    ordered = OpenRows(
        requests=sorted(rows.requests, key=attrgetter("number")),
        run=rows.run,
        minute=rows.minute,
        last_at_ns=rows.last_at_ns,
        pauses=sorted(rows.pauses, key=attrgetter("number")),
        pins=sorted(rows.pins, key=attrgetter("number")),
        orphans=sorted(rows.orphans, key=attrgetter("number")),
        phases=sorted(rows.phases, key=attrgetter("number")),
        plans=sorted(rows.plans, key=attrgetter("hash", "part")),
    )
    return Base(
        rows=ordered,
        counts={row.number: counts.get(row.number, 0) for row in ordered.requests},
        blocks=sorted(blocks, key=attrgetter("hash")),
    )


class Rebuild:
    """A fold that also counts the tokens of each open request."""

    def __init__(self, base: Base) -> None:
        self.projection = Projection()
        self.projection.restore(base.rows)
        self.counts = dict(base.counts)
        self.blocks = {row.hash: row for row in base.blocks}

    def apply(self, record: Record) -> Changes | None:
        """Folds one record and returns the rows that it changed."""
        self.fold(record)
        return self.take_changes(record.seq)

    def fold(self, record: Record) -> None:
        """Folds one record. What it changed is taken with what others do, before it is much."""
        if isinstance(record.event, TokensDecoded):
            for number, count in zip(record.event.numbers, record.event.counts, strict=True):
                if count:
                    self.counts[number] = self.counts.get(number, 0) + count
        self.projection.apply(record)

    def take_changes(self, through_seq: int) -> Changes | None:
        """The rows that changed since the last call. `through_seq` is the last seq that was
        folded.
        """
        changes = self.projection.take_changes(through_seq)
        for change in changes.blocks if changes is not None else ():
            apply(self.blocks, change)
        return changes

    def base(self) -> Base:
        """What a rebuild from here on starts from."""
        return base_of(self.projection.open_rows(), self.counts, self.blocks.values())
