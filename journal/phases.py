"""The projection of phases: from when to when each request waited, was in the engine, or was held.

The phases of a request follow one another without a gap, from its receipt to its end. `Projection`
tells which rows it has touched, and after each event the phases are read from them.
"""

from collections import Counter

from journal import events
from journal.events import Record
from journal.rows import Changes, OpenRows, PhaseRow, RequestRow

IN_ENGINE = ("prefilling", "decoding", "pausing", "resuming")
"""The phases in which a request has a row in the engine."""


class Phases:
    """The phase of each open request, by its number. A journal that was shortened under an older
    schema does not say since when its requests were in theirs: they get a row with the next one.
    """

    def __init__(self) -> None:
        self.phases: dict[int, PhaseRow] = {}
        self._names: dict[int, str] = {}
        self._counts: Counter[str] = Counter()
        self._touched: dict[int, RequestRow] = {}
        self._changed: dict[tuple[int, int], PhaseRow] = {}

    def restore(self, rows: OpenRows) -> None:
        """Starts from the rows that were open when the events so far had been folded."""
        self.phases = {row.number: row for row in rows.phases}
        self._names = {row.number: row.phase for row in rows.requests}
        self._counts = Counter(self._names.values())

    def take_changes(self, changes: Changes) -> None:
        """Moves the rows that changed since the last call to those that are to be written."""
        changes.phases, self._changed = self._changed, {}

    def touch(self, row: RequestRow) -> None:
        """This row may get another phase with the event that is being folded."""
        self._touched[row.number] = row

    def deferred(self, event: events.RequestDeferred) -> None:
        """The request waits for a block that another one computes."""
        phase = self.phases.get(event.number)
        if phase is not None:
            phase.num_deferrals += 1
            phase.computed_by = event.computed_by
            self._changed[phase.seq, phase.number] = phase

    def note(self, record: Record) -> None:
        """Ends the phases that this event has ended, then begins those that follow."""
        if not self._touched:
            return
        touched, self._touched = self._touched, {}
        others = [row for row in touched.values() if row.phase != self._names.get(row.number)]
        for row in others:
            self._end(record, row)
        for row in others:
            if row.outcome is None:
                self._begin(record, row)

    def _end(self, record: Record, row: RequestRow) -> None:
        number = row.number
        before = self._names.pop(number, None)
        if before is not None:
            self._counts[before] -= 1
        if row.outcome is None:
            self._names[number] = row.phase
            self._counts[row.phase] += 1
        phase = self.phases.pop(number, None)
        if phase is not None:
            phase.ended_seq = record.seq
            phase.ended_ns = record.at_ns
            phase.next_phase = row.phase
            had_row, has_row = (name in IN_ENGINE for name in (phase.phase, row.phase))
            phase.gave_row_back = int(had_row and not has_row)
            self._changed[phase.seq, number] = phase

    def _begin(self, record: Record, row: RequestRow) -> None:
        counts = self._counts
        phase = PhaseRow(
            seq=record.seq,
            number=row.number,
            run_id=record.run_id,
            phase=row.phase,
            began_ns=record.at_ns,
            num_waiting=counts["waiting"] - (row.phase == "waiting"),
            num_rows=sum(counts[name] for name in IN_ENGINE) - (row.phase in IN_ENGINE),
            num_held=counts["paused"] - (row.phase == "paused"),
        )
        self.phases[row.number] = phase
        self._changed[phase.seq, phase.number] = phase
