"""Histories as files: journals as a server writes them, with nothing of what was asked or said."""

import shutil
import sqlite3
import tempfile
from collections.abc import Generator, Iterable
from contextlib import closing, contextmanager
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import msgspec

from journal.events import Record, ServerStarted
from journal.files import journal_file
from journal.journal import Journal
from journal.reader import JournalReader
from tools.bench_long_journal import commit

FOLDER = Path(__file__).parent
SIDE_TABLES = ("token_ids", "step_tokens", "request_parameters", "snapshots")
"""What no replay needs."""

UNIT_BYTES = 1024
"""SQLite writes in units of this size; in those of 4 KiB a small journal is mostly empty."""


def history_files() -> list[Path]:
    """Every history that is kept, by name."""
    return sorted(FOLDER.glob("*.db"))


def read(file: Path) -> list[Record]:
    """All records of a history, which may have been recorded under an older schema."""
    with upgraded(file) as copy, JournalReader.open(copy) as reader:
        return list(reader.read())


@contextmanager
def upgraded(file: Path) -> Generator[Path, None, None]:
    """A copy in the schema of this release: a history stays as it was recorded."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "journal.db"
        shutil.copyfile(journal_file(file), copy)
        Journal.open(copy).close()
        yield copy


def keep(records: Iterable[Record], file: Path) -> None:
    """Writes a journal anew: the same records but for where and by which process they were made,
    and no token, parameter or snapshot beside them. `file` is one whole file without a log.
    """
    kept = [without_place(record) for record in records]
    file.unlink(missing_ok=True)
    for _, run in groupby(kept, key=attrgetter("run_id")):
        journal = Journal.open(file)
        try:
            for _, step in groupby(run, key=attrgetter("step")):
                commit(journal, list(step))
        finally:
            journal.close()
    purge(file)
    file.with_suffix(".lock").unlink()
    assert read(file) == kept


def without_place(record: Record) -> Record:
    """The record without the machine, the process and the folder that it comes from."""
    event = record.event
    if not isinstance(event, ServerStarted):
        return record
    configuration = event.configuration | {"state": "state"}
    event = msgspec.structs.replace(event, configuration=configuration, platform="", process_id=1)
    return msgspec.structs.replace(record, event=event)


def purge(file: Path) -> None:
    """Removes what no replay needs, and makes the file small and whole."""
    with closing(sqlite3.connect(file, isolation_level=None)) as database:
        for table in SIDE_TABLES:
            database.execute(f"DELETE FROM {table}")
        assert database.execute("PRAGMA journal_mode = DELETE").fetchone() == ("delete",)
        database.execute(f"PRAGMA page_size = {UNIT_BYTES}")
        database.execute("VACUUM")
    file.chmod(0o644)
