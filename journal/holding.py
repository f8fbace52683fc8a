"""The projection of held requests: the pauses that are open, and what they keep on disk.

A pause is a row of `pause` from the decision to hold a request until it goes on, ends, or waits
without its KV. `Projection` tells of each event that is about one, with the row of its request,
whose phase follows here.

A run that dies while a request is pausing leaves a question that only the core can answer: if all
of its chain was on disk, its next steps complete the pause, else the request waits. The blocks are
not known here, so such a pause is undecided until the core has had its say: it completes some in
each step, and the first step of the new run that completes none says that the others wait.
"""

from typing import assert_never

from journal import events
from journal.events import Record
from journal.rows import Changes, MinuteRow, OpenRows, PauseRow, PinRow, RequestRow

HoldEvent = (
    events.KvFreed
    | events.ChainSaved
    | events.PauseStarted
    | events.ChainPinned
    | events.KvDropped
    | events.RequestPaused
    | events.ResumeStarted
    | events.RequestResumed
)
"""What is told by `Holding.apply`."""

GIVEN_UP = "given_up"


class Holding:
    """The open pauses and the pins, by the number of their request. `run_id` is the run that is
    under way, and `domain` that of the blocks which it saves.
    """

    def __init__(self) -> None:
        self.pauses: dict[int, PauseRow] = {}
        self.pins: dict[int, PinRow] = {}
        self.undecided: set[int] = set()
        self.run_id = 0
        self.domain: str | None = None
        self._changed_pauses: dict[int, PauseRow] = {}
        self._changed_pins: dict[int, PinRow | None] = {}

    def restore(self, rows: OpenRows) -> None:
        """Starts from the rows that were open when the events so far had been folded."""
        self.pauses = {row.number: row for row in rows.pauses}
        self.pins = {row.number: row for row in rows.pins}
        self.run_id = 0 if rows.run is None else rows.run.run_id
        self.domain = None if rows.run is None else rows.run.kv_domain
        self.undecided = {
            row.number
            for row in self.pauses.values()
            if row.paused_ns is None and row.run_id != self.run_id
        }

    def take_changes(self, changes: Changes) -> None:
        """Moves the rows that changed since the last call to those that are to be written."""
        changes.pauses, self._changed_pauses = self._changed_pauses, {}
        changes.pins, self._changed_pins = self._changed_pins, {}

    def apply(self, record: Record, event: HoldEvent, row: RequestRow, minute: MinuteRow) -> None:
        """Folds one event of an open request."""
        if isinstance(event, events.PauseStarted):
            self._pause_started(record, event, row)
        elif isinstance(event, events.RequestPaused):
            self._request_paused(record, event, row, minute)
        elif row.number in self.pauses:
            self._goes_on(record, event, row, minute)

    def _goes_on(
        self,
        record: Record,
        event: events.KvFreed
        | events.ChainSaved
        | events.ChainPinned
        | events.KvDropped
        | events.ResumeStarted
        | events.RequestResumed,
        row: RequestRow,
        minute: MinuteRow,
    ) -> None:
        """An event of a pause that is open. Facts may come late, about a row that is gone."""
        pause = self._touch(row.number)
        match event:
            case events.ChainSaved() if row.phase == "pausing":
                pause.saved_ns = record.at_ns
                pause.tail_bytes = event.tail_bytes
                pause.domain = self.domain
            case events.KvFreed() if pause.freed_ns is None and pause.paused_ns is not None:
                pause.freed_ns = record.at_ns
                pause.freed_bytes = event.freed_bytes
            case events.ChainPinned():
                self._chain_pinned(record, event, pause)
            case events.KvDropped():
                pause.dropped = event.reason
            case events.ResumeStarted():
                self._resume_started(record, event, row)
            case events.RequestResumed():
                self._request_resumed(record, event, row, minute)
            case events.ChainSaved() | events.KvFreed():
                pass
            case _:
                assert_never(event)

    # Pausing

    def _pause_started(self, record: Record, event: events.PauseStarted, row: RequestRow) -> None:
        self.pauses[row.number] = PauseRow(
            pause_seq=record.seq,
            number=row.number,
            request_id=row.request_id,
            run_id=record.run_id,
            reason=event.reason,
            from_phase=row.phase,
            started_ns=record.at_ns,
            rank=event.rank,
            num_candidates=event.num_candidates,
            frees_bytes=event.frees_bytes,
            unsaved_bytes=event.unsaved_bytes,
            usage_bytes=event.usage_bytes,
            ceiling_bytes=event.ceiling_bytes,
            num_cached_tokens=event.num_cached_tokens,
            num_output_tokens=event.num_output_tokens,
        )
        self._touch(row.number)
        row.phase = "pausing"

    def _chain_pinned(self, record: Record, event: events.ChainPinned, pause: PauseRow) -> None:
        assert pause.domain is not None, "what is pinned was saved"
        pause.num_blocks = event.num_blocks
        pin = PinRow(
            number=event.number,
            request_id=event.request_id,
            domain=pause.domain,
            num_blocks=event.num_blocks,
            last_hash=event.last_hash,
            num_tokens=event.num_tokens,
            tail_bytes=event.tail_bytes,
            pinned_ns=record.at_ns,
        )
        self.pins[event.number] = self._changed_pins[event.number] = pin

    def _request_paused(
        self, record: Record, event: events.RequestPaused, row: RequestRow, minute: MinuteRow
    ) -> None:
        """The end of a pause that was begun, or all of one that had nothing to save. One that was
        going on again is held as before.
        """
        number = row.number
        if number in self.undecided and self._nothing_came_of(number):
            self._back_to_waiting(row, record.at_ns)
        self.undecided.discard(number)
        if number not in self.pauses:
            self.pauses[number] = _held_while_waiting(record, event, row)
        pause = self._touch(number)
        pause.resume_started_ns = None
        if pause.paused_ns is None:
            pause.paused_ns = record.at_ns
            pause.num_cached_tokens = event.num_cached_tokens
            pause.num_output_tokens = event.num_output_tokens
            row.num_pauses += 1
            minute.num_pauses += 1
        row.phase = "paused"

    def _nothing_came_of(self, number: int) -> bool:
        """Whether the core has neither pinned what was saved of a pause nor dropped it: then it
        waited, and is held anew.
        """
        return number not in self.pins and self.pauses[number].dropped is None

    # Going on

    def _resume_started(self, record: Record, event: events.ResumeStarted, row: RequestRow) -> None:
        """What came from where still holds of a chain that was kept; else it begins anew."""
        self.pauses[row.number].resume_started_ns = record.at_ns
        row.phase = "resuming"
        if row.number not in self.pins or not event.num_cached_tokens:
            forget_row(row)

    def restored(self, event: events.ChainRestored, row: RequestRow) -> None:
        """The row of a request that is going on has been filled: what it had computed itself it
        has still, less what is lost.
        """
        pause = self._touch(row.number)
        pause.read_bytes = event.read_bytes
        if row.number in self.pins:
            most = min(event.num_tokens, row.num_prompt_tokens)
            row.num_memory_tokens = min(row.num_memory_tokens, most)
            row.num_disk_tokens = min(row.num_disk_tokens, most - row.num_memory_tokens)
        else:
            row.num_memory_tokens, row.num_disk_tokens = event.of_prompt(row.num_prompt_tokens)
        count_prefilled(row, event.num_tokens)

    def _request_resumed(
        self,
        record: Record,
        event: events.RequestResumed,
        row: RequestRow,
        minute: MinuteRow,
    ) -> None:
        pause = self.pauses[row.number]
        pause.resumed_ns = record.at_ns
        pause.resumed_run_id = record.run_id
        pause.num_restored_tokens = event.num_cached_tokens
        pause.num_lost_tokens = event.num_lost_tokens
        minute.num_resumes += 1
        minute.held_ns += self._close(row, "resumed", record.at_ns)
        row.phase = "prefilling"

    def unpin(self, number: int) -> None:
        """What the request kept on disk may go."""
        if self.pins.pop(number, None) is not None:
            self._changed_pins[number] = None

    # Other ends

    def end(self, row: RequestRow, outcome: str, at_ns: int, minute: MinuteRow) -> None:
        """The request has ended, or waits with nothing in the engine: so does its pause."""
        if row.number in self.pauses:
            minute.held_ns += self._close(row, outcome, at_ns)

    def _close(self, row: RequestRow, outcome: str, at_ns: int) -> int:
        """Closes the pause of a request; how long it was held. A chain of which nothing is left is
        not unpinned by an event.
        """
        number = row.number
        self.undecided.discard(number)
        self.unpin(number)
        pause = self._touch(number)
        del self.pauses[number]
        pause.outcome = outcome
        if outcome != "resumed":
            pause.ended_ns = at_ns
        held_ns = 0 if pause.paused_ns is None else at_ns - pause.paused_ns
        row.held_ns += held_ns
        return held_ns

    # Another run

    def server_started(self, row: RequestRow, at_ns: int) -> None:
        """The recovery table, for a request that was pausing or resuming. A pause whose tail was
        not saved is none.
        """
        pause = self._touch(row.number)
        if row.phase == "resuming":
            row.phase = "paused"
            pause.resume_started_ns = None
        elif pause.saved_ns is None:
            self._back_to_waiting(row, at_ns)
        else:
            self.undecided.add(row.number)

    def settle(self, rows: dict[int, RequestRow], last_ns: int, at_ns: int) -> list[RequestRow]:
        """Called between two steps, the last of which was at `last_ns`: the requests that turn out
        to wait, since that step has completed no pause of an earlier run.
        """
        for pause in self.pauses.values():
            if pause.paused_ns == last_ns and pause.run_id != self.run_id:
                return []
        waiting = [rows[number] for number in sorted(self.undecided)]
        for row in waiting:
            self._back_to_waiting(row, at_ns)
        return waiting

    def _back_to_waiting(self, row: RequestRow, at_ns: int) -> None:
        self._close(row, GIVEN_UP, at_ns)
        row.phase = "waiting"
        forget_row(row)

    def engine_ready(self, domain: str) -> None:
        """What another model has pinned is of no use, and held no longer."""
        self.domain = domain or None
        for number, pin in list(self.pins.items()):
            if pin.domain != domain:
                self.unpin(number)
                self._touch(number).dropped = "other_domain"

    def _touch(self, number: int) -> PauseRow:
        pause = self.pauses[number]
        self._changed_pauses[pause.pause_seq] = pause
        return pause


def _held_while_waiting(record: Record, event: events.RequestPaused, row: RequestRow) -> PauseRow:
    """The pause of a request that had nothing in the engine: it begins as it ends."""
    return PauseRow(
        pause_seq=record.seq,
        number=row.number,
        request_id=row.request_id,
        run_id=record.run_id,
        reason=event.reason,
        from_phase=row.phase,
        started_ns=record.at_ns,
        num_cached_tokens=event.num_cached_tokens,
        num_output_tokens=event.num_output_tokens,
    )


def forget_row(row: RequestRow) -> None:
    """What the request held in the engine is gone with its row."""
    row.num_memory_tokens = 0
    row.num_disk_tokens = 0
    row.num_prefilled_tokens = 0


def is_empty(row: RequestRow) -> bool:
    """Whether nothing of the prompt has come into the request's row yet."""
    return not (row.num_memory_tokens or row.num_disk_tokens or row.num_prefilled_tokens)


def count_prefilled(row: RequestRow, num_cached_tokens: int) -> None:
    """Its row holds so many tokens: what of the prompt was not restored has been computed."""
    restored = row.num_memory_tokens + row.num_disk_tokens
    row.num_prefilled_tokens = min(num_cached_tokens, row.num_prompt_tokens) - restored
