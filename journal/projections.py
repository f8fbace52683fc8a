"""The projections: what the views are made of, folded from the events as they are committed.

`Projection` folds records in memory and remembers which rows changed; the journal writes those in
the transaction of the events. Only open requests are kept. Rows change on phase changes, commits
and ends; decode steps are counted in memory and written with the next change, or when their minute
is over. So a decode step costs no row, and after a crash the steps behind the newest
`through_seq` are counted again.
"""

from journal import events
from journal.blocks import Used, changes_of
from journal.clients import ClientEvent, Clients
from journal.events import AnyEvent, Record
from journal.holding import GIVEN_UP, HoldEvent, Holding, count_prefilled, forget_row, is_empty
from journal.making import (
    EndEvent,
    count_end,
    explain,
    request_row,
    run_ready,
    run_row,
    sample_row,
)
from journal.phases import Phases
from journal.quiet import leave
from journal.rows import Changes, MinuteRow, OpenRows, RequestRow, RunRow
from journal.writes import Writes

MINUTE_NS = 60_000_000_000


class Projection:
    """The fold. `apply` for each record in order, then `take_changes` once per transaction."""

    def __init__(self) -> None:
        self.requests: dict[int, RequestRow] = {}
        self.numbers: dict[str, int] = {}
        self.run: RunRow | None = None
        self.minute: MinuteRow | None = None
        self.last_at_ns = 0
        self._last_step = 0
        self._awaiting: set[int] = set()
        self._restoring: set[int] = set()
        self._holding = Holding()
        self._clients = Clients()
        self._phases = Phases()
        self._writes = Writes()
        self._changes = Changes()
        self._changed = False

    def restore(self, rows: OpenRows) -> None:
        """Starts from the rows that were open when the events so far had been folded."""
        self.requests = {row.number: row for row in rows.requests}
        self.numbers = {row.request_id: row.number for row in rows.requests}
        self._awaiting = {
            row.number
            for row in rows.requests
            if row.phase in ("decoding", "pausing") and row.first_token_ns is None
        }
        self._restoring = {
            row.number
            for row in rows.requests
            if row.phase in ("prefilling", "pausing") and is_empty(row) and row.num_cached_tokens
        }
        self._holding.restore(rows)
        self._clients.restore(rows)
        self._phases.restore(rows)
        self._writes.restore(rows)
        self.run = rows.run
        self.minute = rows.minute
        self.last_at_ns = rows.last_at_ns

    def open_rows(self) -> OpenRows:
        """What `restore` starts from."""
        return OpenRows(
            requests=list(self.requests.values()),
            run=self.run,
            minute=self.minute,
            last_at_ns=self.last_at_ns,
            pauses=list(self._holding.pauses.values()),
            pins=list(self._holding.pins.values()),
            orphans=list(self._clients.orphans.values()),
            phases=list(self._phases.phases.values()),
            plans=list(self._writes.plans.values()),
        )

    def flush(self) -> None:
        """Makes the next `take_changes` write what decode steps have counted."""
        self._changed = True

    def apply(self, record: Record) -> None:
        """Folds one record."""
        if record.step != self._last_step and self._holding.undecided:
            self._settle_pauses(record)
        self._last_step = record.step
        minute = self._minute_of(record.at_ns)
        if isinstance(record.event, events.TokensDecoded):
            self._tokens_decoded(record, record.event, minute)
        else:
            self._changed = True
            self._apply_change(record, record.event, minute)
            self._tell_blocks(record)
        self._phases.note(record)
        self.last_at_ns = record.at_ns

    def take_changes(self, through_seq: int) -> Changes | None:
        """The rows that changed since the last call, or None. `through_seq` is the last seq that
        was folded.
        """
        if not self._changed:
            return None
        if self.minute is not None:
            self.minute.through_seq = through_seq
            self._changes.minutes[self.minute.minute] = self.minute
        self._holding.take_changes(self._changes)
        self._clients.take_changes(self._changes)
        self._phases.take_changes(self._changes)
        self._writes.take_changes(self._changes)
        changes, self._changes, self._changed = self._changes, Changes(), False
        return changes

    def _minute_of(self, at_ns: int) -> MinuteRow:
        minute = at_ns // MINUTE_NS
        if self.minute is None or self.minute.minute != minute:
            if self.minute is not None:
                self._changes.minutes[self.minute.minute] = self.minute
                self._changed = True
            self.minute = MinuteRow(minute=minute)
        return self.minute

    def _tokens_decoded(
        self, record: Record, event: events.TokensDecoded, minute: MinuteRow
    ) -> None:
        minute.num_decode_steps += 1
        minute.num_decode_rows += len(event.numbers)
        minute.num_output_tokens += sum(event.counts)
        minute.decode_duration_ns += event.duration_ns
        if self._awaiting:
            for number, count in zip(event.numbers, event.counts, strict=True):
                if count and number in self._awaiting:
                    self._awaiting.discard(number)
                    row = self._touch(number)
                    row.first_token_ns = record.at_ns
                    # The step has fed the prompt's last token.
                    row.num_prefilled_tokens += 1

    def _touch(self, number: int) -> RequestRow:
        row = self.requests[number]
        self._phases.touch(row)
        self._changes.requests[number] = row
        self._changed = True
        return row

    def _find(self, request_id: str) -> RequestRow | None:
        """The row of an open request, marked as changed. Facts may name one that has ended."""
        number = self.numbers.get(request_id)
        return None if number is None else self._touch(number)

    def _tell_blocks(self, record: Record) -> None:
        run = self.run
        domain, block_tokens = (None, None) if run is None else (run.kv_domain, run.kv_block_tokens)
        self._changes.blocks += changes_of(record, domain, block_tokens)
        self._writes.apply(record, self._holding.pauses)

    def _apply_change(  # noqa: C901, PLR0912 - the one dispatch over the closed union
        self, record: Record, event: AnyEvent, minute: MinuteRow
    ) -> None:
        """One arm per kind."""
        match event:
            case events.ServerStarted():
                self._server_started(record, event)
            case events.EngineReady():
                self._engine_ready(record, event)
            case events.ServerStopping():
                self._end_run(record.at_ns, "stopped", event.reason)
            case events.DrainEnded():
                self._run().drained_ns = record.at_ns
            case events.RequestReceived():
                self._received(record, event, minute)
            case events.RequestQueued():
                self._queued(record, event)
            case events.RequestRejected():
                self._rejected(record, event, minute)
            case events.RequestJoined():
                self._joined(record, event, minute)
            case events.RequestAdmitted():
                self._admitted(record, event, minute)
            case events.PrefillChunkPlanned():
                self._chunk_planned(record, event)
            case events.PrefillChunkDone():
                self._chunk_done(event, minute)
            case events.PrefillChunkCommitted():
                self._chunk_committed(event)
            case events.MemorySampled():
                assert self.run is not None
                self._changes.samples[record.seq] = sample_row(record, event, self.run)
            case events.ChainUnpinned():
                self._holding.unpin(event.number)
            case events.RequestDeferred():
                self._phases.deferred(event)
            case events.ChainRestored():
                self._restored(event)
            case events.BatchChanged():
                self._batch_changed(record, event)
            case events.RequestRetried():
                self._retried(record, event, minute)
            case events.RequestFinished() | events.RequestCancelled() | events.RequestAborted():
                self._ended(record, event, minute)
            case _:
                if isinstance(event, HoldEvent):
                    self._hold(record, event, minute)
                elif isinstance(event, ClientEvent):
                    self._clients.apply(record, event, self._find(event.request_id))
                else:
                    leave(event)

    def _server_started(self, record: Record, event: events.ServerStarted) -> None:
        """Applies the recovery table: what the dead run had in the engine waits again, what it held
        is still held, and all of them are without a client.
        """
        killed = self.run is not None and self.run.ended_by is None
        if killed:
            self._end_run(self.last_at_ns, "killed", None)
        self._clients.run_began(event.limits.orphans)
        for number, row in self.requests.items():
            self._touch(number)
            self._clients.server_started(record, row)
            if row.phase not in ("waiting", "paused"):
                row.num_recoveries += 1
                row.num_deaths += int(killed)
            if row.phase in ("pausing", "resuming"):
                self._holding.server_started(row, record.at_ns)
            elif row.phase in ("prefilling", "decoding"):
                row.phase = "waiting"
                forget_row(row)
        self._awaiting.clear()
        self._restoring.clear()
        self._holding.run_id = record.run_id
        self.run = run_row(record, event)
        self._changes.runs[record.run_id] = self.run

    def _engine_ready(self, record: Record, event: events.EngineReady) -> None:
        run_ready(self._run(), record, event)
        self._holding.engine_ready(event.kv_domain)

    def _end_run(self, at_ns: int, ended_by: str, reason: str | None) -> None:
        run = self._run()
        run.ended_ns = at_ns
        run.ended_by = ended_by
        run.end_reason = reason

    def _run(self) -> RunRow:
        """The row of the run that is under way, marked as changed."""
        assert self.run is not None, "a run begins with server_started"
        self._changes.runs[self.run.run_id] = self.run
        return self.run

    def _received(self, record: Record, event: events.RequestReceived, minute: MinuteRow) -> None:
        minute.num_received += 1
        self.requests[event.number] = request_row(record, event)
        self.numbers[event.request_id] = event.number
        self._touch(event.number)

    def _queued(self, record: Record, event: events.RequestQueued) -> None:
        row = self._find(event.request_id)
        if row is not None:
            row.queued_ns = record.at_ns
            row.max_tokens = event.max_tokens
            row.num_waiting = event.num_waiting

    def _rejected(self, record: Record, event: events.RequestRejected, minute: MinuteRow) -> None:
        minute.num_rejected += 1
        row = self._find(event.request_id)
        if row is not None:
            explain(row, event)
        self._end(record, event.request_id, "rejected", event.reason, 0)

    def _joined(self, record: Record, event: events.RequestJoined, minute: MinuteRow) -> None:
        minute.num_joined += 1
        row = self._find(event.request_id)
        if row is not None:
            row.joined_id = event.joined_id
        self._end(record, event.request_id, "joined", event.by, 0)

    def _admitted(self, record: Record, event: events.RequestAdmitted, minute: MinuteRow) -> None:
        minute.num_admitted += 1
        row = self._find(event.request_id)
        if row is not None:
            row.phase = "prefilling"
            row.num_admissions += 1
            row.reserved_bytes = event.reserved_bytes
            row.num_cached_tokens = event.num_cached_tokens
            row.parted_because = event.parted_because
            row.parted_at_tokens = event.parted_at_tokens
            row.waited_ns = event.waited_ns
            if event.num_cached_tokens:
                self._restoring.add(row.number)
            if row.admitted_ns is None:
                row.admitted_ns = record.at_ns

    def _chunk_planned(self, record: Record, event: events.PrefillChunkPlanned) -> None:
        row = self._find(event.request_id)
        if row is not None and row.prefill_started_ns is None:
            row.prefill_started_ns = record.at_ns

    def _chunk_done(self, event: events.PrefillChunkDone, minute: MinuteRow) -> None:
        minute.num_chunks += 1
        minute.num_prefilled_tokens += event.length
        minute.prefill_duration_ns += event.duration_ns
        row = self._find(event.request_id)
        if row is not None:
            row.num_fed_tokens += event.length
            row.prefill_duration_ns += event.duration_ns

    def _restored(self, event: events.ChainRestored) -> None:
        """What an admission or a resume has promised comes, or less of it."""
        row = self._find(event.request_id)
        if row is None:
            return
        if row.phase == "resuming":
            self._holding.restored(event, row)
        elif row.number in self._restoring:
            self._restoring.discard(row.number)
            row.num_memory_tokens, row.num_disk_tokens = event.of_prompt(row.num_prompt_tokens)

    def _chunk_committed(self, event: events.PrefillChunkCommitted) -> None:
        row = self._find(event.request_id)
        if row is not None:
            count_prefilled(row, event.num_cached_tokens)

    def _batch_changed(self, record: Record, event: events.BatchChanged) -> None:
        for number in event.joined:
            row = self._touch(number)
            row.phase = "decoding"
            if row.decode_started_ns is None:
                row.decode_started_ns = record.at_ns
            if row.first_token_ns is None:
                self._awaiting.add(number)

    def _retried(self, record: Record, event: events.RequestRetried, minute: MinuteRow) -> None:
        row = self._find(event.request_id)
        if row is not None:
            self._holding.end(row, GIVEN_UP, record.at_ns, minute)
            row.phase = "waiting"
            forget_row(row)
            row.num_retries = event.retry
            self._leave_engine(row.number)

    def _hold(self, record: Record, event: HoldEvent, minute: MinuteRow) -> None:
        row = self._find(event.request_id)
        if row is None:
            return
        if isinstance(event, events.ResumeStarted) and row.number in self._holding.pins:
            last_hash = self._holding.pins[row.number].last_hash
            self._changes.blocks.append(Used(last_hash, record.at_ns))
        self._holding.apply(record, event, row, minute)
        if row.phase == "paused":
            self._leave_engine(row.number)

    def _settle_pauses(self, record: Record) -> None:
        """The core has completed the pauses of an earlier run that it could complete."""
        if isinstance(record.event, events.StateCarried):
            return  # it stands for the step with which the rows were carried
        assert self.run is not None
        waiting = self._holding.settle(self.requests, self.last_at_ns, self.run.started_ns)
        for row in waiting:
            self._touch(row.number)

    def _leave_engine(self, number: int) -> None:
        """No token and no restored chain of its row counts any more."""
        self._awaiting.discard(number)
        self._restoring.discard(number)

    def _ended(self, record: Record, event: EndEvent, minute: MinuteRow) -> None:
        outcome = count_end(event, self._find(event.request_id), minute)
        self._end(record, event.request_id, outcome, event.reason, event.num_output_tokens)

    def _end(
        self, record: Record, request_id: str, outcome: str, reason: str, num_output_tokens: int
    ) -> None:
        row = self._find(request_id)
        if row is None:
            return
        self._holding.end(row, "ended", record.at_ns, self._minute_of(record.at_ns))
        self._clients.end(row, outcome, record.at_ns)
        row.phase = row.outcome = outcome
        row.reason = reason
        row.ended_ns = record.at_ns
        row.ended_run_id = record.run_id
        row.ended_seq = record.seq
        row.num_output_tokens = num_output_tokens
        self._changes.ended.append(row.number)
        self._leave_engine(row.number)
        del self.requests[row.number]
        del self.numbers[request_id]
