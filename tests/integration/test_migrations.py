"""The schema: made from nothing, upgraded in one transaction, refused when it is a later one."""

import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory

import migrations
from journal import tables
from journal.database import make_engine
from journal.errors import JournalError, JournalTooNew
from journal.journal import Journal
from journal.reader import JournalReader
from tests.journal_steps import Steps


def script_directory() -> ScriptDirectory:
    config = Config()
    config.set_main_option("script_location", str(Path(migrations.__path__[0])))
    return ScriptDirectory.from_config(config)


def execute(file: Path, statement: str) -> list[tuple[object, ...]]:
    """Runs a statement beside the journal and returns its rows."""
    with closing(sqlite3.connect(file)) as connection:
        rows = connection.execute(statement).fetchall()
        connection.commit()
        return rows


def test_the_newest_revision_is_the_one_that_the_code_knows() -> None:
    assert script_directory().get_heads() == [tables.SCHEMA]


def test_revisions_sort_in_the_order_of_their_application() -> None:
    # A later schema is told by comparing names.
    revisions = [revision.revision for revision in script_directory().walk_revisions()]
    assert revisions == sorted(revisions, reverse=True)


def test_the_migrated_schema_is_that_of_the_tables(tmp_path: Path) -> None:
    Journal.open(tmp_path).close()
    engine = make_engine(tmp_path / "journal.db", "ro")
    with engine.connect() as connection:
        context = MigrationContext.configure(
            connection, opts={"include_object": lambda _o, name, *_r: name != "alembic_version"}
        )
        assert compare_metadata(context, tables.metadata) == []
        for table in tables.metadata.tables.values():
            columns = connection.exec_driver_sql(f"PRAGMA table_info({table.name})").fetchall()
            assert [(name, kind) for _, name, kind, *_ in columns] == [
                (column.name, column.type.compile(engine.dialect)) for column in table.columns
            ]
    engine.dispose()


def test_all_tables_are_strict_and_events_have_at_most_two_indexes(tmp_path: Path) -> None:
    Journal.open(tmp_path).close()
    file = tmp_path / "journal.db"
    rows = execute(file, "SELECT name, strict FROM pragma_table_list WHERE type = 'table'")
    loose = {name for name, strict in rows if not strict}
    assert loose == {"alembic_version", "sqlite_schema", "sqlite_temp_schema"}
    assert len(execute(file, "PRAGMA index_list(events)")) <= 2


def test_events_are_append_only(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    Steps(journal).start()
    journal.close()
    file = tmp_path / "journal.db"
    copy = (
        "INSERT OR REPLACE INTO events SELECT {}, run_id, step, source, kind, request_id, at_ns,"
        " version, body FROM events WHERE seq = 1"
    )
    for statement in (
        "UPDATE events SET at_ns = 0",
        "DELETE FROM events",
        copy.format(1),
        copy.format(2),
        copy.format(4),
    ):
        with pytest.raises(sqlite3.IntegrityError, match="append-only"):
            execute(file, statement)
    execute(file, copy.format(3))
    assert execute(file, "SELECT max(seq) FROM events") == [(3,)]


def test_a_journal_at_the_newest_schema_opens_without_alembic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Journal.open(tmp_path).close()
    # None makes an import fail.
    monkeypatch.setitem(sys.modules, "journal.migration", None)
    Journal.open(tmp_path).close()
    with pytest.raises(ImportError):
        Journal.open(tmp_path / "new")


def test_a_later_schema_is_refused_and_left_alone(tmp_path: Path) -> None:
    Journal.open(tmp_path).close()
    file = tmp_path / "journal.db"
    execute(file, "UPDATE alembic_version SET version_num = '9999'")
    before = file.read_bytes()
    with pytest.raises(JournalTooNew, match=r"schema 9999, this one knows 0\d+"):
        Journal.open(tmp_path)
    with pytest.raises(JournalTooNew):
        JournalReader.open(tmp_path)
    assert file.read_bytes() == before


def test_an_older_schema_is_upgraded_by_the_writer_only(tmp_path: Path) -> None:
    # The schema before the first revision is a file without tables.
    file = tmp_path / "journal.db"
    file.touch()
    with pytest.raises(JournalError, match="is empty"):
        JournalReader.open(tmp_path)
    Journal.open(tmp_path).close()
    execute(file, "UPDATE alembic_version SET version_num = '0001'")
    before = file.read_bytes()
    with pytest.raises(JournalError, match=r"0001, and a copy of it cannot be upgraded to .*dupl"):
        JournalReader.open(tmp_path)  # its tables are not those of that schema
    assert file.read_bytes() == before
    execute(file, f"UPDATE alembic_version SET version_num = '{tables.SCHEMA}'")
    with JournalReader.open(tmp_path) as reader:
        assert list(reader.read()) == []


def test_an_interrupted_upgrade_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from journal import migration

    upgrade = migration.upgrade

    def interrupted(*arguments: object) -> None:
        upgrade(*arguments)  # pyright: ignore[reportArgumentType]
        raise KeyboardInterrupt

    monkeypatch.setattr(migration, "upgrade", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Journal.open(tmp_path)
    assert execute(tmp_path / "journal.db", "SELECT name FROM sqlite_master") == []
    monkeypatch.undo()
    Journal.open(tmp_path).close()
    version = execute(tmp_path / "journal.db", "SELECT version_num FROM alembic_version")
    assert version == [(tables.SCHEMA,)]


def test_another_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "journal.db"
    execute(file, "CREATE TABLE notes (text TEXT)")
    before = file.read_bytes()
    with pytest.raises(JournalError, match="a database, but no journal"):
        Journal.open(tmp_path)
    assert file.read_bytes() == before


def test_a_file_that_is_no_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    file = tmp_path / "journal.db"
    file.write_bytes(b"no database at all\n" * 100)
    with pytest.raises(JournalError, match="not a database"):
        Journal.open(tmp_path)
    assert file.read_bytes() == b"no database at all\n" * 100


def test_a_folder_with_a_percent_sign_is_no_obstacle(tmp_path: Path) -> None:
    folder = tmp_path / "50%? of 'all'"
    Journal.open(folder).close()
    with JournalReader.open(folder) as reader:
        assert list(reader.read()) == []
