"""Reading a journal beside its writer: read-only, in short transactions, from any thread.

A reader that stays in a transaction holds the writer's log back, so everything is read in bounded
batches, each on its own. Where there is no writer, nothing is written: see untouched.py. A journal
of an earlier schema is read in a copy, and as it was when it was opened: see upgraded.py.
"""

from array import array
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self

from sqlalchemy import Engine

from journal import queries
from journal.database import READER_PRAGMAS, Run, make_engine, refuse_foreign, schema_of, translated
from journal.errors import JournalError
from journal.events import Record
from journal.files import journal_file
from journal.rows import RequestRow
from journal.tables import SCHEMA
from journal.tokens import Logprobs
from journal.untouched import Source, Untouched
from journal.upgraded import UpgradedCopy


class Step(NamedTuple):
    """The records of one step."""

    step: int
    run_id: int
    facts: list[Record]
    decisions: list[Record]


class JournalReader:
    """See the module's text. Use it as a context manager, or close it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.schema = SCHEMA
        """What the file has: an earlier one, if it is read in a copy."""
        self._untouched = Untouched(file)
        self._upgraded: UpgradedCopy | None = None
        self._engines: dict[Source, Engine] = {}

    @classmethod
    def open(cls, path: Path) -> Self:
        """A reader of the journal of a state folder, or of a file `.db`. Raises JournalError when
        there is none or it cannot be read, JournalTooNew when its schema is a later one.
        """
        reader = cls.as_it_is(path)
        try:
            reader.upgrade()
        except JournalError:
            reader.close()
            raise
        return reader

    @classmethod
    def as_it_is(cls, path: Path) -> Self:
        """The same, but an earlier schema is left as it is: only `source` is of use then."""
        file = journal_file(path)
        with translated(file):
            if not file.is_file():
                raise JournalError(f"{file}: no such journal; give a state folder or a .db file")
        reader = cls(file)
        try:
            reader.refuse_unknown()
        except JournalError:
            reader.close()
            raise
        return reader

    def refuse_unknown(self) -> None:
        """Raises JournalError for what this release cannot read, JournalTooNew for a later one."""
        file = self.file
        with self.transaction() as run:
            found = schema_of(run)
            refuse_foreign(run, file, found)
        if found is None:
            raise JournalError(
                f"{file}: is empty: no server has begun to write it, or it was copied without its "
                f"log, {file.name}-wal"
            )
        self.schema = found

    def upgrade(self) -> None:
        """Goes on with an upgraded copy, if the schema is an earlier one. Raises JournalError."""
        if self.schema == SCHEMA:
            return
        with self.source() as source:
            self._upgraded = UpgradedCopy(source, self.file, self.schema)
        self._untouched.close()
        self._untouched = Untouched(self._upgraded.file)

    @contextmanager
    def source(self) -> Generator[Source, None, None]:
        """What to open for one transaction, and how, so that nothing is written."""
        with translated(self.file), self._untouched.source() as source:
            yield source

    @contextmanager
    def transaction(self) -> Generator[Run, None, None]:
        """One consistent view of the file, for a bounded number of rows. Writing is refused."""
        with self.source() as source, self._engine(source).connect() as connection:
            run = connection.exec_driver_sql
            for pragma in READER_PRAGMAS:
                run(pragma).close()
            run("BEGIN")
            yield run
            run("ROLLBACK")

    def _engine(self, source: Source) -> Engine:
        """One for each source, of which a reader sees few."""
        if source not in self._engines:
            self._engines[source] = make_engine(*source)
        return self._engines[source]

    def read(self, after_seq: int = 0, until_seq: int | None = None) -> Iterator[Record]:
        """The records after `after_seq`, up to and with `until_seq`, in order."""
        while True:
            with self.transaction() as run:
                batch = queries.read_batch(run, after_seq, until_seq)
            if not batch:
                return
            yield from batch
            after_seq = batch[-1].seq

    def steps(self, after_seq: int = 0, until_seq: int | None = None) -> Iterator[Step]:
        """The same records, step by step."""
        records = self.read(after_seq, until_seq)
        for number, group in groupby(records, key=lambda record: record.step):
            step = Step(number, 0, [], [])
            for record in group:
                (step.facts if record.source == "fact" else step.decisions).append(record)
            first = step.facts[0] if step.facts else step.decisions[0]
            yield step._replace(run_id=first.run_id)

    def request(self, request_id: str) -> RequestRow | None:
        """What the projection says of a request, or None when the journal does not know it."""
        with self.transaction() as run:
            return queries.find_request(run, request_id)

    def events_of(self, request_id: str, after_seq: int = 0, limit: int = 1_000) -> list[Record]:
        """The events that name a request, at most `limit`, in order. Decode steps name none."""
        with self.transaction() as run:
            return queries.events_of(run, request_id, after_seq, limit)

    def prompt_tokens(self, request_id: str) -> "array[int] | None":
        """The prompt's token ids, or None when they were purged."""
        with self.transaction() as run:
            return queries.prompt_tokens(run, request_id)

    def parameters(self, request_id: str) -> bytes | None:
        """The JSON of the request's parameters, or None when it was purged."""
        with self.transaction() as run:
            return queries.parameters(run, request_id)

    def output_tokens(self, request_id: str) -> "tuple[array[int], list[Logprobs] | None]":
        """The output so far, with log-probabilities when the request asked for them. Empty once
        it was purged.
        """
        with self.transaction() as run:
            return queries.output_tokens(run, request_id).unpacked()

    def close(self) -> None:
        """Gives its connections back."""
        for engine in self._engines.values():
            engine.dispose()
        self._untouched.close()
        if self._upgraded is not None:
            self._upgraded.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
