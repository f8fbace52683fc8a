"""The projection of what was written to disk: one row for each file of saved KV, or the attempt.

Of a block only its plan says whose it is, so plans are kept until their files are there. What a run
has under way when it ends is nobody's: the next start removes it.
"""

from collections.abc import Mapping

from journal import events
from journal.events import Record
from journal.rows import Changes, DiskPlanRow, DiskWriteRow, OpenRows, PauseRow

SERVING, SAVED, UNKNOWN = "serving", "saved", "unknown"


class Writes:
    """The plans of the files that are on their way, by block and part."""

    def __init__(self) -> None:
        self.plans: dict[tuple[str, str], DiskPlanRow] = {}
        self._changed: dict[tuple[str, str], DiskPlanRow | None] = {}
        self._written: dict[int, DiskWriteRow] = {}

    def restore(self, rows: OpenRows) -> None:
        """Starts from the plans that were open when the events so far had been folded."""
        self.plans = {(plan.hash, plan.part): plan for plan in rows.plans}

    def take_changes(self, changes: Changes) -> None:
        """Moves what changed since the last call to what is to be written."""
        changes.plans, self._changed = self._changed, {}
        changes.writes, self._written = self._written, {}

    def apply(self, record: Record, pauses: Mapping[int, PauseRow]) -> None:
        """Folds one event. `pauses` are those that are open, by the number of their request."""
        event = record.event
        match event:
            case events.ServerStarted():
                for name, part in list(self.plans):
                    self._take(name, part)
            case events.BlockSavePlanned():
                self._planned(event, reason_of(pauses.get(event.number)))
            case events.BlockSaved():
                plan = self._take(event.hash, event.part)
                row = self._put(record, plan, event.part, SAVED)
                row.saved_bytes, row.duration_ns = event.saved_bytes, event.duration_ns
            case events.BlockSaveFailed():
                plan = self._take(event.hash, event.part)
                self._put(record, plan, event.part, event.reason)
            case events.ChainSaved() if event.tail_bytes:
                row = self._put(record, tail_plan(event.number, pauses), "tail", SAVED)
                row.saved_bytes, row.duration_ns = event.tail_bytes, event.duration_ns
            case events.ChainSaveFailed():
                self._put(record, tail_plan(event.number, pauses), "tail", event.reason)
            case _:
                pass

    def _planned(self, event: events.BlockSavePlanned, reason: str) -> None:
        for block in event.blocks:
            plan = DiskPlanRow(hash=block.hash, part=block.part, number=event.number, reason=reason)
            self.plans[block.hash, block.part] = self._changed[block.hash, block.part] = plan

    def _take(self, name: str, part: str) -> DiskPlanRow | None:
        """The plan of this file, which is carried out, or comes to nothing."""
        plan = self.plans.pop((name, part), None)
        if plan is not None:
            self._changed[name, part] = None
        return plan

    def _put(
        self, record: Record, plan: DiskPlanRow | None, part: str, outcome: str
    ) -> DiskWriteRow:
        row = DiskWriteRow(
            seq=record.seq,
            run_id=record.run_id,
            at_ns=record.at_ns,
            number=0 if plan is None else plan.number,
            part=part,
            reason=UNKNOWN if plan is None else plan.reason,
            outcome=outcome,
        )
        self._written[record.seq] = row
        return row


def reason_of(pause: PauseRow | None) -> str:
    """Why a row is saved: it is about to be held, for the reason of that; else it is being served,
    and others may begin as it did.
    """
    return SERVING if pause is None or pause.paused_ns is not None else pause.reason


def tail_plan(number: int, pauses: Mapping[int, PauseRow]) -> DiskPlanRow:
    """Tails are saved of rows that are about to be held."""
    return DiskPlanRow(hash="", part="tail", number=number, reason=reason_of(pauses.get(number)))
