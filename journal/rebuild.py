"""The projections folded anew from the events: to compare with the stored ones, and to know what
they were at an earlier event.

A journal that was compacted begins with state_carried. What the rows were there is kept in
`carried_rows`, and a rebuild starts from it.
"""

import msgspec

from journal.blocks import BlockRow, apply
from journal.database import Run
from journal.events import Record, TokensDecoded
from journal.projections import Projection
from journal.rows import Changes, OpenRows


class Base(msgspec.Struct, kw_only=True):
    """Where a rebuild starts: the open rows, how many tokens each open request had, by its number,
    and the blocks.
    """

    rows: OpenRows
    counts: dict[int, int]
    blocks: list[BlockRow] = []


EMPTY = Base(rows=OpenRows(requests=[], run=None, minute=None, last_at_ns=0), counts={})


def load_base(run: Run) -> Base:
    """The base of this file: empty unless it was compacted."""
    body = run("SELECT body FROM carried_rows ORDER BY seq DESC LIMIT 1").scalar()
    return EMPTY if body is None else msgspec.json.decode(body, type=Base)


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
        counts = {number: self.counts.get(number, 0) for number in self.projection.requests}
        blocks = list(self.blocks.values())
        return Base(rows=self.projection.open_rows(), counts=counts, blocks=blocks)
