"""The journal: the single writer of the record of facts and decisions.

It is used from one thread. One step is one transaction: its events, their tokens, and the rows of
the projections that they change.
"""

from array import array
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import msgspec

from journal import queries
from journal.changes import write_changes
from journal.compaction import Compaction, compaction_point
from journal.crashpoints import reach
from journal.database import Database, Durability, translated
from journal.errors import JournalFull
from journal.events import (
    Decision,
    Fact,
    Record,
    RequestPaused,
    ServerStarted,
    StateCarried,
    TokensDecoded,
)
from journal.files import journal_file
from journal.outputs import Outputs
from journal.place import Position, Positioned, place
from journal.points import is_due, put_point
from journal.rebuild import Base, base_of
from journal.rows import Changes
from journal.statements import (
    INSERT_EVENT,
    INSERT_PARAMETERS,
    INSERT_TOKEN_IDS,
    PUT_SNAPSHOT,
)
from journal.tokens import NO_ROWS, Logprobs, SideRows
from journal.verify import verify

GATHER_STEPS = 512
CHECKPOINT_BYTES = 8 * 2**20
COMMIT_BYTES = 16 * 2**10
KEPT_SNAPSHOTS = 2
PURGED_REQUESTS = 100


class Journal(Positioned):
    """See the module's text. `last` is the position of the newest event."""

    def __init__(self, database: Database, durability: Durability, gather_steps: int) -> None:
        self._database = database
        self._durability: Durability = durability
        self._gather_steps = gather_steps
        self._run_begun = False
        self._log_bytes = 0
        self._compaction: Compaction | None = None
        self._load()

    @classmethod
    def open(
        cls,
        path: Path,
        *,
        durability: Durability = "process",
        gather_steps: int = GATHER_STEPS,
    ) -> "Journal":
        """Opens the journal of a state folder (or a file `.db`) for writing, makes it where it is
        missing and upgrades its schema. `durability` is the least that every commit gets.

        Raises JournalLocked, JournalTooNew, JournalFull, JournalBroken, or JournalError when
        the folder cannot be written or the file is no journal.
        """
        database = Database.open(journal_file(path))
        with ExitStack() as stack:
            stack.callback(database.close)
            journal = cls(database, durability, gather_steps)
            journal.remove_orphan_side_rows()
            reach("journal.open.done")
            stack.pop_all()
            return journal

    @property
    def file(self) -> Path:
        """The database file."""
        return self._database.file

    def _load(self) -> None:
        """Takes from the file all that is kept in memory."""
        with translated(self.file):
            self._run = self._database.run
            self.last = queries.last_position(self._run)
            self._projection = queries.load_projection(self._run, self.last.at_ns)
            self._outputs = Outputs(self._run, self._gather_steps)
            self._outputs.load(self._projection.requests)

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
        """Writes one step and returns its records; seqs follow the order given. The first commit
        after `open` begins with server_started, which begins a run.

        Raises JournalFull (nothing was written, the same commit can be tried again) or
        JournalBroken (the process has to end).
        """
        records = place(self.last, step, at_ns, facts, decisions)
        begun = self._run_begun or isinstance(facts[0], ServerStarted)
        assert begun, "the first commit begins with server_started"
        assert len(side.prompts) == len(side.parameters), "each prompt comes with its parameters"
        if self._durability == "power":
            durability = "power"
        with self._loaded_again_after_failure(), self._database.transaction(durability):
            self._write(records, side)
        newest = records[-1]
        self.last = Position(newest.seq, step, at_ns, newest.run_id)
        self._run_begun = True
        self._checkpoint_when_due(side)
        return records

    @contextmanager
    def _loaded_again_after_failure(self) -> Generator[None, None, None]:
        """What is kept in memory runs ahead of the file while a transaction is written."""
        done = False
        try:
            yield
            done = True
        finally:
            if not done:
                self._load()

    def _write(self, records: list[Record], side: SideRows) -> None:
        self._run(INSERT_EVENT, [queries.event_columns(record) for record in records])
        reach("journal.write.events")
        self._write_side_rows(records, side)
        reach("journal.write.side")
        for record in records:
            self._projection.apply(record)
        changes = self._projection.take_changes(records[-1].seq)
        if changes is not None:
            self._write_changes(changes)
        reach("journal.write.changes")
        if any(isinstance(record.event, RequestPaused) for record in records):
            self._outputs.gather()  # it may be held for long, and step rows are everybody's
        else:
            self._outputs.gather_when_due()

    def _write_side_rows(self, records: list[Record], side: SideRows) -> None:
        if side.prompts:
            rows = [(name, "prompt", 0, ids, None) for name, ids in side.prompts]
            self._run(INSERT_TOKEN_IDS, rows)
        if side.parameters:
            self._run(INSERT_PARAMETERS, list(side.parameters))
        for index, record in enumerate(records):
            if isinstance(record.event, TokensDecoded) and any(record.event.counts):
                tokens = side.tokens[index]
                requests = self._projection.requests
                self._outputs.write_step(record.seq, record.event, tokens, requests)

    def _write_changes(self, changes: Changes) -> None:
        write_changes(self._run, changes)
        for number in changes.ended:
            self._outputs.end(number)

    def _checkpoint_when_due(self, side: SideRows) -> None:
        """Copies the log into the file now and then: what a commit adds to it is estimated."""
        self._log_bytes += COMMIT_BYTES + sum(len(ids) for _, ids in side.prompts)
        if self._log_bytes >= CHECKPOINT_BYTES:
            self._log_bytes = 0
            # A full disk is no failure of the commit, which is in the log; the next copy comes.
            with suppress(JournalFull):
                self._database.checkpoint()

    def read(self, after_seq: int = 0, until_seq: int | None = None) -> Iterator[Record]:
        """The records after `after_seq`, up to and with `until_seq`, in order."""
        with translated(self.file):
            yield from queries.read_records(self._run, after_seq, until_seq)

    def save_snapshot(self, seq: int, state_version: int, code_digest: str, body: bytes) -> None:
        """Keeps the state as folded through `seq`, and the one before; older ones go, but for those
        that are points (see points.py).
        """
        assert seq <= self.last.seq
        reach("journal.snapshot.before")
        with self._database.transaction("process"):
            self._run(PUT_SNAPSHOT, (seq, state_version, code_digest, body))
            reach("journal.snapshot.within")
            if seq == self.last.seq and is_due(self._run, seq, len(body)):
                put_point(self._run, seq, self._base())
            newest = "SELECT seq FROM snapshots ORDER BY seq DESC LIMIT ?"
            points = "SELECT seq FROM carried_rows"
            self._run(
                f"DELETE FROM snapshots WHERE seq NOT IN ({newest}) AND seq NOT IN ({points})",
                (KEPT_SNAPSHOTS,),
            )
        reach("journal.snapshot.after")

    def _base(self) -> Base:
        """What a rebuild from here on starts from, but for the blocks."""
        return base_of(self._projection.open_rows(), self._outputs.counts(), ())

    def latest_snapshot(self, state_version: int, code_digest: str) -> tuple[int, bytes] | None:
        """The newest snapshot that this code can use, as (seq, body)."""
        query = (
            "SELECT seq, body FROM snapshots WHERE state_version = ? AND code_digest = ?"
            " ORDER BY seq DESC LIMIT 1"
        )
        with translated(self.file):
            row = self._run(query, (state_version, code_digest)).fetchone()
        return None if row is None else (row[0], row[1])

    def prompt_tokens(self, request_id: str) -> "array[int] | None":
        """The prompt's token ids, or None when they were purged."""
        with translated(self.file):
            return queries.prompt_tokens(self._run, request_id)

    def parameters(self, request_id: str) -> bytes | None:
        """The JSON of the request's parameters, or None when it was purged."""
        with translated(self.file):
            return queries.parameters(self._run, request_id)

    def output_tokens(self, request_id: str) -> "tuple[array[int], list[Logprobs] | None]":
        """The output so far, with log-probabilities when the request asked for them."""
        with translated(self.file):
            number = self._projection.numbers.get(request_id)
            return self._outputs.read(request_id, number).unpacked()

    def gather(self) -> None:
        """Gathers the output of all open requests; called at a stop."""
        with self._loaded_again_after_failure(), self._database.transaction("process"):
            self._outputs.gather()

    def purge(self, at_ns: int, retention_ns: int) -> int:
        """Removes prompt, output and parameters of requests that ended `retention_ns` ago, at most
        `PURGED_REQUESTS` at a time; returns how many it was.
        """
        with translated(self.file):
            names = queries.purgeable(self._run, at_ns - retention_ns, PURGED_REQUESTS)
        if names:
            reach("journal.purge.before")
            with self._loaded_again_after_failure(), self._database.transaction("process"):
                # Step rows are shared: what others still need of them is gathered first.
                self._outputs.gather()
                for table in ("token_ids", "request_parameters"):
                    self._run(f"DELETE FROM {table} WHERE request_id = ?", names)
                    reach("journal.purge.within")
            reach("journal.purge.after")
        return len(names)

    def remove_orphan_side_rows(self) -> int:
        """Removes prompts and parameters of requests that no event speaks of, and returns how many
        rows it was. Called by `open`.
        """
        with self._database.transaction("process"):
            return sum(self._run(query).rowcount for query in queries.REMOVE_ORPHANS)

    def compaction_point(self, at_ns: int, keep_ns: int, keep_bytes: int) -> int | None:
        """The seq through which events should go so that those younger than `keep_ns` stay and the
        file is under `keep_bytes`; None when it is not worth it. The caller folds the state
        there and begins a compaction.
        """
        with translated(self.file):
            return compaction_point(self._run, at_ns, keep_ns, keep_bytes)

    def begin_compaction(
        self, through_seq: int, state_version: int, state: dict[str, object]
    ) -> None:
        """Begins to write a successor that starts with `state`, folded through `through_seq` (the
        last of its step), as builtins.
        """
        assert self._compaction is None, "one compaction at a time"
        with translated(self.file):
            (replaced,) = queries.read_batch(self._run, through_seq - 1, through_seq)
            following = queries.read_batch(self._run, through_seq, through_seq + 1)
        assert not following or following[0].step > replaced.step, "inside a step"
        carried = StateCarried(state_version=state_version, through_seq=through_seq, state=state)
        first = msgspec.structs.replace(replaced, source="fact", event=carried)
        self._compaction = Compaction(self._database, first)
        reach("journal.compaction.begun")

    def advance_compaction(self) -> bool:
        """Goes on with it by one portion, between two commits. True once the successor has taken
        the journal's place. It waits while somebody reads the journal; call it again later.

        Raises JournalFull when there is no space for the successor: it is given up, and the
        journal is as before.
        """
        compaction = self._compaction
        assert compaction is not None, "no compaction was begun"
        with ExitStack() as stack:
            stack.callback(self._give_up_compaction)
            done = compaction.advance() and self._replace(compaction)
            stack.pop_all()
        if done:
            self._compaction = None
        return done

    def _replace(self, compaction: Compaction) -> bool:
        with self._loaded_again_after_failure(), self._database.transaction("process"):
            self._outputs.gather()
            self._projection.flush()
            changes = self._projection.take_changes(self.last.seq)
            assert changes is not None
            self._write_changes(changes)
        reach("journal.compaction.gathered")
        if not self._database.leave_wal():
            return False
        reach("journal.compaction.left_wal")
        with ExitStack() as stack:
            stack.callback(self._database.enter_wal)
            stack.callback(compaction.discard)  # before it, which needs space
            compaction.complete()
            stack.pop_all()
        self._database.replace(compaction.file)
        self._load()
        return True

    def _give_up_compaction(self) -> None:
        if self._compaction is not None:
            self._compaction.discard()
            self._compaction = None

    def verify(self) -> list[str]:
        """What is wrong with the journal, one line each. Reads all of it."""
        with translated(self.file):
            return list(verify(self._run))

    def close(self) -> None:
        """Gives the file and its lock back."""
        if self._compaction is not None:
            self._compaction.discard()
        reach("journal.close.before")
        self._database.close()
        reach("journal.close.after")

    def abandon(self) -> None:
        """Gives the file and its lock back once it is broken, and tries nothing more with it."""
        if self._compaction is not None:
            self._compaction.discard()
        self._database.abandon()
