"""The in-memory twin of the journal, for tests: the same methods and assertions, no file."""

from array import array
from collections.abc import Iterator, Sequence

import msgspec

from journal.blocks import BlockRow, apply
from journal.database import Durability
from journal.errors import JournalError
from journal.events import Decision, Fact, Record, ServerStarted, StateCarried, TokensDecoded
from journal.journal import KEPT_SNAPSHOTS
from journal.place import Position, Positioned, place
from journal.projections import Projection
from journal.queries import Output
from journal.rows import (
    AdoptionRow,
    Changes,
    DiskWriteRow,
    MinuteRow,
    OrphanRow,
    PauseRow,
    PhaseRow,
    PinRow,
    RequestRow,
    RunRow,
    SampleRow,
)
from journal.tokens import ID_BYTES, NO_ROWS, Logprobs, SideRows, unpack_ids


class MemoryJournal(Positioned):
    """See the module's text. `failures` are raised by the next commits, one each, which then
    write nothing. `commits` counts those that wrote, by durability.
    """

    def __init__(self) -> None:
        self.last = Position()
        self.failures: list[JournalError] = []
        self.commits: dict[Durability, int] = {"process": 0, "power": 0}
        self.requests: dict[int, RequestRow] = {}
        self.runs: dict[int, RunRow] = {}
        self.minutes: dict[int, MinuteRow] = {}
        self.blocks: dict[str, BlockRow] = {}
        self.pauses: dict[int, PauseRow] = {}
        self.pins: dict[int, PinRow] = {}
        self.samples: dict[int, SampleRow] = {}
        self.orphans: dict[tuple[int, int], OrphanRow] = {}
        self.adoptions: dict[int, AdoptionRow] = {}
        self.phases: dict[tuple[int, int], PhaseRow] = {}
        self.writes: dict[int, DiskWriteRow] = {}
        self._records: list[Record] = []
        self._prompts: dict[str, bytes] = {}
        self._parameters: dict[str, bytes] = {}
        self._outputs: dict[str, Output] = {}
        self._snapshots: list[tuple[int, int, str, bytes]] = []
        self._projection = Projection()
        self._carried: Record | None = None
        self._run_begun = False

    def reopen(self) -> None:
        """What a new process does: nothing is lost, and the next commit begins a run."""
        self._run_begun = False

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
        records = place(self.last, step, at_ns, facts, decisions)
        begun = self._run_begun or isinstance(facts[0], ServerStarted)
        assert begun, "the first commit begins with server_started"
        assert len(side.prompts) == len(side.parameters), "each prompt comes with its parameters"
        if self.failures:
            raise self.failures.pop(0)
        self._keep_side_rows(records, side)
        for record in records:
            self._projection.apply(record)
        changes = self._projection.take_changes(records[-1].seq)
        if changes is not None:
            self._keep_changes(changes)
        self._records.extend(records)
        self.commits[durability] += 1
        self.last = Position(records[-1].seq, step, at_ns, records[-1].run_id)
        self._run_begun = True
        return records

    def _keep_changes(self, changes: Changes) -> None:
        self.requests.update(changes.requests)
        self.runs.update(changes.runs)
        self.minutes.update(changes.minutes)
        self.pauses.update(changes.pauses)
        self.samples.update(changes.samples)
        self.orphans.update(changes.orphans)
        self.adoptions.update(changes.adoptions)
        self.phases.update(changes.phases)
        self.writes.update(changes.writes)
        for number, pin in changes.pins.items():
            self.pins.pop(number, None)
            if pin is not None:
                self.pins[number] = pin
        for change in changes.blocks:
            apply(self.blocks, change)

    def _keep_side_rows(self, records: list[Record], side: SideRows) -> None:
        self._prompts.update(side.prompts)
        self._parameters.update(side.parameters)
        for index, record in enumerate(records):
            event = record.event
            if isinstance(event, TokensDecoded) and any(event.counts):
                tokens = side.tokens[index]
                assert len(tokens.ids) == ID_BYTES * sum(event.counts), "tokens and counts differ"
                rows = tokens.rows(event.counts)
                for number, (ids, logprobs) in zip(event.numbers, rows, strict=True):
                    if ids:
                        requests = self._projection.requests
                        assert number in requests, f"tokens for request {number}, which has ended"
                        request_id = requests[number].request_id
                        output = self._outputs.setdefault(request_id, Output())
                        output.add(ids, logprobs)

    def read(self, after_seq: int = 0, until_seq: int | None = None) -> Iterator[Record]:
        """As `Journal.read`."""
        for record in list(self._records):
            if record.seq > after_seq and (until_seq is None or record.seq <= until_seq):
                yield record

    def save_snapshot(self, seq: int, state_version: int, code_digest: str, body: bytes) -> None:
        """As `Journal.save_snapshot`."""
        assert seq <= self.last.seq
        kept = [snapshot for snapshot in self._snapshots if snapshot[0] != seq]
        kept.append((seq, state_version, code_digest, body))
        self._snapshots = sorted(kept)[-KEPT_SNAPSHOTS:]

    def latest_snapshot(self, state_version: int, code_digest: str) -> tuple[int, bytes] | None:
        """As `Journal.latest_snapshot`."""
        for seq, version, digest, body in reversed(self._snapshots):
            if (version, digest) == (state_version, code_digest):
                return seq, body
        return None

    def prompt_tokens(self, request_id: str) -> "array[int] | None":
        """As `Journal.prompt_tokens`."""
        ids = self._prompts.get(request_id)
        return None if ids is None else unpack_ids(ids)

    def parameters(self, request_id: str) -> bytes | None:
        """As `Journal.parameters`."""
        return self._parameters.get(request_id)

    def output_tokens(self, request_id: str) -> "tuple[array[int], list[Logprobs] | None]":
        """As `Journal.output_tokens`."""
        return self._outputs.get(request_id, Output()).unpacked()

    def gather(self) -> None:
        """As `Journal.gather`: there is nothing to gather here."""

    def purge(self, at_ns: int, retention_ns: int) -> int:
        """As `Journal.purge`, all at once."""
        names = [
            row.request_id
            for row in self.requests.values()
            if row.ended_ns is not None and row.ended_ns <= at_ns - retention_ns
        ]
        names = [name for name in names if name in self._prompts or name in self._parameters]
        for name in names:
            for rows in (self._prompts, self._parameters, self._outputs):
                rows.pop(name, None)
        return len(names)

    def remove_orphan_side_rows(self) -> int:
        """As `Journal.remove_orphan_side_rows`: there are none, since a commit is whole."""
        return 0

    def compaction_point(self, at_ns: int, keep_ns: int, keep_bytes: int) -> int | None:
        """As `Journal.compaction_point`, by time alone."""
        del keep_bytes  # There is no file that could grow.
        old = [record.seq for record in self._records if record.at_ns < at_ns - keep_ns]
        return old[-1] if len(old) > 1 else None

    def begin_compaction(
        self, through_seq: int, state_version: int, state: dict[str, object]
    ) -> None:
        """As `Journal.begin_compaction`."""
        carried = StateCarried(state_version=state_version, through_seq=through_seq, state=state)
        replaced = next(record for record in self._records if record.seq == through_seq)
        self._carried = msgspec.structs.replace(replaced, source="fact", event=carried)

    def advance_compaction(self) -> bool:
        """As `Journal.advance_compaction`, in one portion."""
        first = self._carried
        assert first is not None, "no compaction was begun"
        later = [record for record in self._records if record.seq > first.seq]
        self._records = [first, *later]
        self._snapshots = [kept for kept in self._snapshots if kept[0] >= first.seq]
        self.samples = {seq: row for seq, row in self.samples.items() if seq > first.seq}
        self.writes = {seq: row for seq, row in self.writes.items() if seq > first.seq}
        self._carried = None
        return True

    def close(self) -> None:
        """As `Journal.close`; what was committed can still be read."""
        self._run_begun = False
