"""A journal is made shorter by writing its successor and renaming that over it.

The successor begins with state_carried, which takes the place and the seq of the last event that
it stands for; later events keep theirs. Projections, parameters and the token ids still stored go
along. It is written in bounded portions between commits, and takes the journal's place once it has
caught up. Killed at any moment, either file is whole, and it is the one under the journal's name.
"""

from collections.abc import Generator
from contextlib import ExitStack, contextmanager, suppress

import msgspec

from journal.crashpoints import reach
from journal.database import Database, Run, file_uri, make_engine, translated
from journal.events import Record, StateCarried
from journal.files import create_private, flush, replacement_of
from journal.moments import bounds, end_of_step, last_before
from journal.queries import event_columns, read_records
from journal.rebuild import Rebuild, load_base
from journal.statements import INSERT_EVENT

PORTION_EVENTS = 5_000
"""Events copied between two commits: some 20 ms."""

# What decides whether shortening is worth its writing: a tenth of the events has to go.
LEAST_SHARE = 10

_USED_BYTES = (
    "SELECT (page_count - freelist_count) * page_size"
    " FROM pragma_page_count, pragma_freelist_count, pragma_page_size"
)
_SIDE_BYTES = (
    "SELECT (SELECT coalesce(sum(length(ids) + coalesce(length(logprobs), 0)), 0) FROM token_ids)"
    " + (SELECT coalesce(sum(length(body)), 0) FROM request_parameters)"
    " + (SELECT coalesce(sum(length(body)), 0) FROM snapshots)"
)

_COPIED_TABLES = (
    "token_ids",
    "request_parameters",
    "request",
    "run",
    "minute",
    "block",
    "pause",
    "pin",
    "orphan",
    "adoption",
    "phase",
    "disk_plan",
    "alembic_version",
)
_HISTORY_TABLES = ("memory_sample", "disk_write")
"""Each row goes with its event: it is history, of which nothing is open."""
_EMPTY_TABLES = ("events", "step_tokens", "snapshots", "carried_rows", *_HISTORY_TABLES)


def compaction_point(run: Run, at_ns: int, keep_ns: int, keep_bytes: int) -> int | None:
    """The seq through which the events should go: those before `at_ns - keep_ns`, and as many more
    as bring the file under four fifths of `keep_bytes`. None when that is little or nothing.
    """
    ends = bounds(run)
    if ends is None:
        return None
    first, last = ends
    through = max(
        last_before(run, first, last, at_ns - keep_ns), _last_beyond(run, first, last, keep_bytes)
    )
    through = end_of_step(run, through)
    return through if through - first >= max(1, (last - first) // LEAST_SHARE) else None


def _last_beyond(run: Run, first: int, last: int, keep_bytes: int) -> int:
    """The last seq that has to go to bring the file under four fifths of `keep_bytes`. Token ids
    go by their own retention: where they fill more than half of the file, no history is given
    up for them.
    """
    used_bytes: int = run(_USED_BYTES).scalar_one()
    if used_bytes <= keep_bytes:
        return 0
    side_bytes: int = run(_SIDE_BYTES).scalar_one()
    event_bytes = used_bytes - side_bytes
    if event_bytes < side_bytes:
        return 0
    kept_bytes = max(0, keep_bytes * 4 // 5 - side_bytes)
    return last - (last - first) * kept_bytes // event_bytes


class Compaction:
    """The writing of one successor: `advance` until it says that all is copied, then `complete`."""

    def __init__(self, database: Database, first: Record) -> None:
        """`first` is the record of state_carried."""
        assert isinstance(first.event, StateCarried)
        self._database = database
        self._first = first
        self._rebuild = Rebuild(load_base(database.run))
        self._folded_seq = 0
        self._copied_seq = first.seq
        self._resources = ExitStack()
        self.file = replacement_of(database.file)
        with translated(self.file), ExitStack() as undo:
            undo.callback(self.discard)
            self.file.unlink(missing_ok=True)
            create_private(self.file)
            engine = make_engine(self.file, "rw")
            self._resources.callback(engine.dispose)
            self._run: Run = self._resources.enter_context(engine.connect()).exec_driver_sql
            # Nobody reads this file before it is whole and flushed: it needs neither log nor sync.
            self._run("PRAGMA journal_mode = OFF").close()
            self._run("PRAGMA synchronous = OFF").close()
            with self._old():
                self._make_tables()
            self._run(INSERT_EVENT, event_columns(first))
            undo.pop_all()

    @contextmanager
    def _old(self) -> Generator[None, None, None]:
        """The journal as a second database of this connection, and only as long as it is read."""
        self._run("ATTACH ? AS old", (file_uri(self._database.file, "ro"),))
        try:
            yield
        finally:
            self._run("DETACH old")

    def _make_tables(self) -> None:
        for name in (*_COPIED_TABLES, *_EMPTY_TABLES):
            query = "SELECT sql FROM old.sqlite_master WHERE type = 'table' AND name = ?"
            self._run(self._run(query, (name,)).scalar_one())

    def advance(self) -> bool:
        """Folds or copies one portion; True when all that was committed so far is copied."""
        with translated(self.file):
            if self._folded_seq < self._first.seq:
                self._fold_portion()
                return False
            with self._old():
                last: int = self._run("SELECT max(seq) FROM old.events").scalar_one()
                end = min(last, self._copied_seq + PORTION_EVENTS)
                query = "INSERT INTO events SELECT * FROM old.events WHERE seq > ? AND seq <= ?"
                self._run(query, (self._copied_seq, end))
                self._copy_points(self._copied_seq, end)
            self._copied_seq = end
            reach("journal.compaction.copied")
            return end == last

    def _copy_points(self, after_seq: int, until_seq: int) -> None:
        """Those of the events that stay, which are folded from the new beginning as before."""
        for table in ("carried_rows", "snapshots"):
            query = (
                f"INSERT OR IGNORE INTO {table} SELECT * FROM old.{table}"
                " WHERE seq > ? AND seq <= ? AND seq IN (SELECT seq FROM old.carried_rows)"
                f" AND seq NOT IN (SELECT seq FROM {table})"
            )
            self._run(query, (after_seq, until_seq))

    def _fold_portion(self) -> None:
        """The rows of the projections as they were at state_carried, bit by bit."""
        end = min(self._first.seq, self._folded_seq + PORTION_EVENTS)
        for record in read_records(self._database.run, self._folded_seq, end):
            self._rebuild.apply(record)
        self._folded_seq = end
        reach("journal.compaction.folded")

    def complete(self) -> None:
        """Copies what changes with every commit, and flushes the file. No commit may come between
        the last `advance`, this, and the replacement.
        """
        with translated(self.file), self._old():
            body = msgspec.json.encode(self._rebuild.base()).decode()
            self._run("INSERT INTO carried_rows VALUES (?, ?)", (self._first.seq, body))
            for table in _COPIED_TABLES:
                self._run(f"INSERT INTO {table} SELECT * FROM old.{table}")
            self._copy_points(self._first.seq, self._copied_seq)  # also one that came meanwhile
            snapshots = (
                "INSERT INTO snapshots SELECT * FROM old.snapshots"
                " WHERE seq >= ? AND seq NOT IN (SELECT seq FROM snapshots)"
            )
            self._run(snapshots, (self._first.seq,))
            for table in _HISTORY_TABLES:
                history = f"INSERT INTO {table} SELECT * FROM old.{table} WHERE seq > ?"
                self._run(history, (self._first.seq,))
            query = (
                "SELECT sql FROM old.sqlite_master WHERE sql IS NOT NULL AND type <> 'table'"
                " ORDER BY CASE type WHEN 'view' THEN 1 ELSE 0 END"
            )
            for (statement,) in self._run(query).fetchall():
                self._run(statement)
        self._resources.close()
        reach("journal.compaction.written")
        with translated(self.file):
            flush(self.file)
        reach("journal.compaction.flushed")

    def discard(self) -> None:
        """Gives the successor up. If its file cannot be removed, the next start does it."""
        self._resources.close()
        with suppress(OSError):
            self.file.unlink(missing_ok=True)
