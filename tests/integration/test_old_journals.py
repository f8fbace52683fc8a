"""A journal of an earlier schema is read by every command, and stays as it is."""

import logging
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from journal import upgraded
from journal.errors import JournalError
from journal.files import Lock
from journal.reader import JournalReader
from journal.tables import SCHEMA
from tests.integration.seen import alter, scratch, seen
from tests.integration.test_untouched import COMMANDS
from tests.integration.test_upgrade import downgraded
from tests.loop_driver import LoopDriver
from tools import backup, journal_info

SHOWN = f"schema     0005, read in a copy upgraded to {SCHEMA}\n"


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where temporary files lie."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


@pytest.fixture
def old(tmp_path: Path) -> Iterator[Path]:
    """A state folder of a server that was stopped before the schema was as it is."""
    driver = LoopDriver(tmp_path / "new")
    driver.submit("hello", 5)
    driver.submit("to you", 5)
    driver.run_until_idle()
    driver.journal.close()
    folder = tmp_path / "old"
    folder.mkdir()
    downgraded(driver.journal.file, folder / "journal.db", "0005")
    folder.chmod(0o500)
    yield folder
    folder.chmod(0o700)


def test_every_command_reads_it_and_leaves_no_trace(
    old: Path, temporary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = seen(old)
    for command, run in COMMANDS.items():
        (tmp_path / command).mkdir()
        assert run(old, tmp_path / command) == 0, command
        assert capsys.readouterr().err == ""
        assert seen(old) == before, command
        assert list(temporary.iterdir()) == [], command
    with JournalReader.open(old) as reader, JournalReader.open(tmp_path / "new") as new:
        assert list(reader.read()) == list(new.read())
        [copy] = temporary.iterdir()
        assert copy.stat().st_mode & 0o077 == 0, "nobody else may read it"


def test_a_backup_of_it_is_as_old(old: Path, tmp_path: Path) -> None:
    """It is made before an upgrade, for a way back."""
    assert backup.run(old, tmp_path / "backup.db", force=False) == 0
    with closing(sqlite3.connect(tmp_path / "backup.db")) as database:
        assert database.execute("SELECT version_num FROM alembic_version").fetchone() == ("0005",)


def test_it_is_said_what_was_looked_at(old: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert journal_info.info(old, as_json=False) == 0
    assert SHOWN in capsys.readouterr().out
    assert journal_info.verify(old) == 0
    assert capsys.readouterr().out == f"0 findings, read in a copy upgraded to {SCHEMA}\n"


def test_an_older_server_beside_it_goes_on(old: Path, tmp_path: Path) -> None:
    """Its log is read with it, and what it writes next is not in the way."""
    folder = tmp_path / "served"
    shutil.copytree(old, folder)
    folder.chmod(0o700)
    names = "run_id, step, source, kind, request_id, at_ns, version, body"
    more = (
        f"INSERT INTO events (seq, {names}) SELECT (SELECT max(seq) + 1 FROM events), {names}"
        " FROM events WHERE kind = 'engine_ready' LIMIT 1"
    )
    with closing(sqlite3.connect(folder / "journal.db", isolation_level=None)) as server:
        lock = Lock(folder / "journal.db")
        server.execute("PRAGMA journal_mode = WAL")
        server.execute(more)
        (last,) = server.execute("SELECT max(seq) FROM events").fetchone()
        with JournalReader.open(folder) as reader:
            assert [record.seq for record in reader.read()][-1] == last
            server.execute(more)
            assert [record.seq for record in reader.read()][-1] == last, "as it was opened"
        assert server.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        assert server.execute("SELECT version_num FROM alembic_version").fetchone() == ("0005",)
        lock.release()


@pytest.mark.parametrize("where", ["copying", "looking"])
def test_no_place_for_the_copy_is_one_line(
    where: str,
    old: Path,
    temporary: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    before = seen(old)
    if where == "looking":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(9, 8, 1))
    else:

        def full(_: object) -> None:
            error = sqlite3.OperationalError("database or disk is full")
            error.sqlite_errorcode = sqlite3.SQLITE_FULL
            raise error

        monkeypatch.setattr(upgraded.UpgradedCopy, "_announce", lambda _, one: full(one))
    assert journal_info.verify(old) == 2
    error = capsys.readouterr().err
    assert f"{old}/journal.db: has schema 0005, which is read in a copy" in error
    assert "set TMPDIR" in error
    assert error.count("\n") == 1
    assert list(temporary.iterdir()) == []
    assert seen(old) == before


def test_a_large_copy_is_announced(
    old: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        JournalReader.open(old).close()
        assert caplog.messages == []
        monkeypatch.setattr(upgraded, "LARGE_BYTES", 1)
        JournalReader.open(old).close()
    [message] = caplog.messages
    assert message.startswith(f"{old}/journal.db: has schema 0005: 0 MB are copied to ")


def test_a_damaged_one_is_one_line(
    old: Path, temporary: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = old / "journal.db"
    unreadable, cut, scratched = (tmp_path / name for name in ("unreadable.db", "cut.db", "s.db"))
    for damaged in (unreadable, cut, scratched):
        shutil.copyfile(whole, damaged)
    alter(
        unreadable, "DROP TRIGGER events_never_change", "UPDATE events SET kind = 'x' WHERE seq = 3"
    )
    with cut.open("r+b") as file:
        file.truncate(cut.stat().st_size // 2)
    scratch(scratched, "events")
    malformed = "database disk image is malformed"
    for damaged, words in (
        (unreadable, "unknown kind of event: 'x'"),
        (cut, malformed),
        (scratched, f"{malformed}; use a backup"),
    ):
        assert journal_info.verify(damaged) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"fermata journal verify: {damaged}: {words}")
        assert error.count("\n") == 1
        assert list(temporary.iterdir()) == []
    with pytest.raises(JournalError, match=r"^[^:]*/unreadable\.db: unknown"):
        JournalReader.open(unreadable)
