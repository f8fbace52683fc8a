"""An engine in a random world: it does one piece of work at a time, when it is told to.

It follows scheduler/engine/base.py: it works through its commands in order, delivers one decode
step and launches the next, and holds that one back until the step before is committed. It checks
what the core owes it: a row is started once and dropped once, chunks follow each other, a batch
holds whole rows.
"""

from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from journal import events
from journal.events import AnyEvent, ModelFacts, RowEnd
from scheduler import effects


@dataclass
class Row:
    """A row of the engine: `cached` of its `known` tokens are fed. A number may come back with
    another row, so that steps which were launched hold on to rows, not to numbers.
    """

    request_id: str
    known: int
    left: int
    stop_in: int
    cached: int = 0
    runs: bool = True


@dataclass(frozen=True)
class MakeRow:
    """`StartRow` with what the loop adds to it."""

    number: int
    row: Row


Command = (
    MakeRow
    | effects.RunChunk
    | effects.SetBatch
    | effects.DropRow
    | effects.SendTokens
    | effects.SaveBlocks
    | effects.RestoreRow
)


@dataclass
class FakeEngine:
    """`advance` does one piece of work, and appends what came of it to `results`."""

    measured: ModelFacts
    one_row_only: bool
    commands: deque[Command] = field(default_factory=deque)
    results: deque[AnyEvent] = field(default_factory=deque)
    rows: dict[int, Row] = field(default_factory=dict)
    batch: int = 0
    batch_rows: dict[int, Row] = field(default_factory=dict)
    launched: tuple[int, dict[int, Row]] | None = None
    loaded: bool = False
    held_back: bool = False

    def advance(self) -> bool:
        """Does one piece of work; whether there was any."""
        if not self.loaded:
            self.loaded = True
            self.results.append(
                events.EngineReady(
                    model=self.measured,
                    one_row_only=self.one_row_only,
                    note="",
                    load_ns=1,
                )
            )
            return True
        if self.commands:
            self.obey(self.commands.popleft())
            return True
        return self.decode()

    def obey(self, command: Command) -> None:
        match command:
            case MakeRow():
                assert command.number not in self.rows, "a row is started once"
                self.rows[command.number] = command.row
            case effects.RunChunk():
                self.feed(command)
            case effects.SetBatch():
                self.batch = command.batch
                self.batch_rows = {number: self.rows[number] for number in command.numbers}
                for row in self.batch_rows.values():
                    assert row.cached == row.known - 1, "a row in the batch has one pending token"
            case effects.DropRow():
                self.drop(command.number)
            case effects.SendTokens():
                self.held_back = False
            case _:
                self.obey_about_blocks(command)

    def obey_about_blocks(self, command: Command) -> None:
        raise AssertionError(f"nothing is saved here: {command}")

    def feed(self, command: effects.RunChunk) -> None:
        row = self.rows[command.number]
        assert command.start == row.cached, "chunks follow each other"
        assert command.start + command.length < row.known, "the last token is pending"
        if not row.runs:
            return
        row.cached += command.length
        self.results.append(
            events.PrefillChunkDone(
                request_id=row.request_id,
                chunk=command.chunk,
                start=command.start,
                length=command.length,
                duration_ns=1,
                peak_bytes=1,
                active_bytes=1,
            )
        )

    def drop(self, number: int) -> None:
        row = self.rows.pop(number)
        row.runs = False
        self.results.append(events.KvFreed(request_id=row.request_id, number=number, freed_bytes=1))

    def decode(self) -> bool:
        """Delivers the step that was launched, or else one of the batch that is set; launches the
        next.
        """
        if self.held_back:
            return False
        now = (self.batch, self.batch_rows)
        for batch, rows in [now] if self.launched is None else [self.launched, now]:
            if any(row.runs for row in rows.values()):
                self.deliver_step(batch, rows)
                return True
        return False

    def deliver_step(self, batch: int, rows: dict[int, Row]) -> None:
        running = {number: row for number, row in rows.items() if row.runs}
        counts = tuple(int(number in running) for number in rows)
        ended = [end for n, row in running.items() if (end := put_out(n, row)) is not None]
        self.results.append(
            events.TokensDecoded(
                batch=batch, numbers=tuple(rows), counts=counts, ended=tuple(ended), duration_ns=1
            )
        )
        self.held_back = True
        self.launched = (self.batch, self.batch_rows)

    def break_row(self, which: int, during: Literal["start", "prefill", "decode"]) -> None:
        """An exception in one of the rows, whichever it is."""
        whole = [number for number, row in self.rows.items() if row.runs]
        if whole:
            number = whole[which % len(whole)]
            self.rows[number].runs = False
            name = self.rows[number].request_id
            self.results.append(
                events.EngineFailed(request_id=name, number=number, during=during, error="boom")
            )


def put_out(number: int, row: Row) -> RowEnd | None:
    """One more token, and the end that it may bring."""
    row.known += 1
    row.cached += 1
    row.left -= 1
    row.stop_in -= 1
    row.runs = row.left != 0 and row.stop_in != 0
    if row.runs:
        return None
    return RowEnd(number=number, reason="length" if row.left == 0 else "stop")
