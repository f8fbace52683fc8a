"""The projection of requests without a client: how they lose it, and what comes of them.

A row of `orphan` goes from the loss of a client until the request has one again, or ends. What is
in it follows the scheduler's own rules: until when it is waited for somebody, and whether the
request goes on meanwhile. A row of `adoption` is written once. `Projection` tells of each event
that is about a client, with the row of its request.
"""

import msgspec

from journal import events
from journal.events import Orphaning, OrphanLimits, Record
from journal.rows import AdoptionRow, Changes, OpenRows, OrphanRow, RequestRow, RunRow

ClientEvent = (
    events.ClientGone | events.ClientAttached | events.ReleaseRequested | events.RequestAdopted
)
"""What is told by `Clients.apply`."""


class _Limits(msgspec.Struct):
    """Of the limits in a row of `run`, those of requests without a client."""

    orphans: OrphanLimits | None = None


class Clients:
    """The requests that have no client now, by their number. Under a run whose `limits` are null
    nobody looks after clients, and no request is without one.
    """

    def __init__(self) -> None:
        self.orphans: dict[int, OrphanRow] = {}
        self._limits: OrphanLimits | None = None
        self._changed: dict[tuple[int, int], OrphanRow] = {}
        self._adoptions: dict[int, AdoptionRow] = {}

    def restore(self, rows: OpenRows) -> None:
        """Starts from the rows that were open when the events so far had been folded."""
        self.orphans = {row.number: row for row in rows.orphans}
        self._limits = None if rows.run is None else _limits_of(rows.run)

    def take_changes(self, changes: Changes) -> None:
        """Moves the rows that changed since the last call to those that are to be written."""
        changes.orphans, self._changed = self._changed, {}
        changes.adoptions, self._adoptions = self._adoptions, {}

    def apply(self, record: Record, event: ClientEvent, row: RequestRow | None) -> None:
        """Folds one event. `row` is null for a request that has ended: it can be adopted still."""
        if isinstance(event, events.RequestAdopted):
            self._adopted(record, event, row)
        elif row is None:
            pass
        elif isinstance(event, events.ClientGone):
            self._client_gone(record, row)
        elif isinstance(event, events.ClientAttached):
            self.end(row, "attached", record.at_ns)
        else:
            self._released(record, row)

    def _client_gone(self, record: Record, row: RequestRow) -> None:
        """One that has a key runs on; without a time of grace one that has none ends at once."""
        limits = self._limits
        if row.number in self.orphans or limits is None:
            return
        if row.has_key:
            self._lose(record, row, "client_gone")
        elif limits.grace_ns:
            orphan = self._lose(record, row, "client_gone")
            orphan.until_ns = record.at_ns + limits.grace_ns
            orphan.needs_client = 1

    def _lose(self, record: Record, row: RequestRow, orphaned_by: Orphaning) -> OrphanRow:
        row.num_orphaned += 1
        self.orphans[row.number] = OrphanRow(
            lost_seq=record.seq,
            number=row.number,
            request_id=row.request_id,
            run_id=record.run_id,
            orphaned_by=orphaned_by,
            from_phase=row.phase,
            lost_ns=record.at_ns,
        )
        return self._touch(row.number)

    def _adopted(
        self, record: Record, event: events.RequestAdopted, row: RequestRow | None
    ) -> None:
        self._adoptions[record.seq] = AdoptionRow(
            seq=record.seq,
            at_ns=record.at_ns,
            run_id=record.run_id,
            number=event.number,
            request_id=event.request_id,
            adopter_number=event.adopter_number,
            adopter_id=event.adopter_id,
            joined_by=event.by,
            # Of what has ended only that can be adopted.
            phase="finished" if row is None else row.phase,
            orphaned_by=event.orphaned_by,
            orphaned_ns=event.orphaned_ns,
            num_output_tokens=event.num_output_tokens,
        )
        if row is not None:
            self.end(row, "adopted", record.at_ns)

    def _released(self, record: Record, row: RequestRow) -> None:
        """An operator lets it go on, for as long as one that a start has found."""
        orphan = self.orphans.get(row.number)
        if orphan is None or self._limits is None or not orphan.needs_client:
            return
        self._touch(row.number)
        orphan.needs_client = 0
        until_ns = record.at_ns + self._limits.restart_grace_ns
        orphan.until_ns = None if row.has_key else until_ns

    def end(self, row: RequestRow, outcome: str, at_ns: int) -> None:
        """The request has a client again, or has ended, or nobody looks after clients any more."""
        if row.number not in self.orphans:
            return
        orphan = self._touch(row.number)
        del self.orphans[row.number]
        orphan.outcome = outcome
        orphan.ended_ns = at_ns
        row.orphaned_ns += at_ns - orphan.lost_ns

    # Another run

    def run_began(self, limits: OrphanLimits | None) -> None:
        """What holds from here on. Comes before `server_started` of each open request."""
        self._limits = limits

    def server_started(self, record: Record, row: RequestRow) -> None:
        """No connection outlives its server; the settings of this start say what becomes of it. One
        whose connection was lost before stays held, and its time begins anew.
        """
        limits = self._limits
        if limits is None:
            self.end(row, "unwatched", record.at_ns)
            return
        if row.number not in self.orphans:
            self._lose(record, row, "restart")
        orphan = self._touch(row.number)
        if orphan.orphaned_by == "client_gone" and orphan.needs_client and not row.has_key:
            orphan.until_ns = record.at_ns + limits.grace_ns
        elif limits.on_restart == "cancel":
            orphan.needs_client = 1
            orphan.until_ns = record.at_ns
        else:
            orphan.needs_client = int(limits.on_restart == "hold")
            is_waited_for = orphan.needs_client or not row.has_key
            until_ns = record.at_ns + limits.restart_grace_ns
            orphan.until_ns = until_ns if is_waited_for else None

    def _touch(self, number: int) -> OrphanRow:
        orphan = self.orphans[number]
        self._changed[orphan.lost_seq, number] = orphan
        return orphan


def _limits_of(run: RunRow) -> OrphanLimits | None:
    return msgspec.json.decode(run.limits, type=_Limits).orphans
