"""The journal in memory, as a machine has it that may run out of space, or lose its power."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import msgspec

from journal.database import Durability
from journal.errors import JournalFull
from journal.events import Decision, Fact, Record
from journal.memory import MemoryJournal
from journal.projections import Projection
from journal.rows import OpenRows
from journal.tokens import NO_ROWS, SideRows


@dataclass(frozen=True, slots=True)
class Commit:
    """One step as it was committed."""

    step: int
    at_ns: int
    facts: Sequence[Fact]
    decisions: Sequence[Decision]
    side: SideRows
    durability: Durability


class SimulatedJournal(MemoryJournal):
    """See the module's text. `note` sees each record as it is committed. While it `is_full`
    nothing can be committed.
    """

    def __init__(self, note: Callable[[Record], None]) -> None:
        super().__init__()
        self.note = note
        self.is_full = False
        self.kept: list[Commit] = []

    def commit(
        self,
        step: int,
        at_ns: int,
        facts: Sequence[Fact],
        decisions: Sequence[Decision],
        side: SideRows = NO_ROWS,
        *,
        durability: Durability = "process",
    ) -> list[Record]:
        """As `Journal.commit`."""
        if self.is_full:
            raise JournalFull("there is no space in the simulation's journal")
        records = super().commit(step, at_ns, facts, decisions, side, durability=durability)
        self.kept.append(Commit(step, at_ns, facts, decisions, side, durability))
        for record in records:
            self.note(record)
        return records

    def lose_power(self, random: Random) -> int:
        """Some of the steps behind the last one that was flushed are gone. Returns how many."""
        flushed = [n for n, commit in enumerate(self.kept, 1) if commit.durability == "power"]
        num_kept = random.randint(flushed[-1] if flushed else 0, len(self.kept))
        kept, num_lost = self.kept[:num_kept], len(self.kept) - num_kept
        snapshots = self._snapshots
        super().__init__()
        for commit in kept:
            super().commit(
                commit.step,
                commit.at_ns,
                commit.facts,
                commit.decisions,
                commit.side,
                durability=commit.durability,
            )
        self.kept = kept
        self._snapshots = [snapshot for snapshot in snapshots if snapshot[0] <= self.last.seq]
        return num_lost

    def forget(self, open_ids: frozenset[str]) -> None:
        """Lets go of what no start reads any more: records before the oldest snapshot, and prompts
        and output of requests that are not open. There is to be no loss of power.
        """
        if self._snapshots:
            self._records = list(self.read(self._snapshots[0][0]))
            del self.kept[:-1]
        for kept in (self._prompts, self._parameters, self._outputs):
            for request_id in kept.keys() - open_ids:
                del kept[request_id]

    def close(self) -> None:
        """As `Journal.close`. Who opens it has the rows, and no more."""
        super().close()
        self.write_rows(self._projection, self)
        rows = msgspec.json.decode(msgspec.json.encode(self._projection.open_rows()), type=OpenRows)
        self._projection = Projection()
        self._projection.restore(rows)

    def write_rows(self, projection: Projection, journal: MemoryJournal) -> None:
        """Writes what a projection has counted."""
        projection.flush()
        changes = projection.take_changes(self.last.seq)
        assert changes is not None, "a flush makes changes"
        journal._keep_changes(changes)

    def differences(self) -> list[str]:
        """The projections whose rows are not those of a rebuild from the events."""
        self.write_rows(self._projection, self)
        built, projection = MemoryJournal(), Projection()
        for record in self._records:
            projection.apply(record)
        self.write_rows(projection, built)
        return [name for name in ROWS if rows_of(self, name) != rows_of(built, name)]


ROWS = ("requests", "runs", "minutes", "blocks", "pauses", "pins", "samples")


def rows_of(journal: MemoryJournal, name: str) -> dict[object, object]:
    """The rows of one projection. Up to where a minute was written differs with each restart."""
    rows: dict[object, object] = getattr(journal, name)
    if name != "minutes":
        return rows
    minutes = journal.minutes.items()
    return {key: msgspec.structs.replace(row, through_seq=0) for key, row in minutes}
