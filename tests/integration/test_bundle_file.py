"""The file of a bundle: which names it may have, what is left of one that was not finished, and
what is said when there is no space for it.
"""

import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from journal.journal import Journal
from journal.reader import JournalReader
from journal.verify import verify
from tests.failing_sqlite import failing_sqlite
from tests.journal_steps import Steps
from tools import backup, export

Command = Callable[[Path, Path], int]


def export_all(folder: Path, file: Path) -> int:
    return export.run(folder, file, export.Wanted())


def back_up(folder: Path, file: Path) -> int:
    return backup.run(folder, file, force=False)


COMMANDS = pytest.mark.parametrize("command", [export_all, back_up])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A journal of two requests, of which one has ended."""
    folder = tmp_path / "state"
    steps = Steps(Journal.open(folder))
    steps.start()
    steps.receive(1)
    steps.receive(2)
    steps.join(1, 2)
    steps.finish(1, [11], 1)
    steps.journal.close()
    return folder


def dead_process() -> int:
    """The id of a process that has ended, and that nobody has been given since."""
    child = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"],
        capture_output=True,
        check=True,
        timeout=20,
    )
    return int(child.stdout)


@COMMANDS
def test_what_a_dead_process_left_of_the_same_file_is_removed(
    folder: Path, tmp_path: Path, command: Command
) -> None:
    dead, alive = dead_process(), os.getppid()
    for name in (
        f".one.db.{dead}.part.db",
        f".one.db.{dead}.part.db-wal",
        f".one.db.{alive}.part.db",
        f".other.db.{dead}.part.db",
        f".one.db.{os.getpid()}.part.db",
    ):
        (tmp_path / name).write_bytes(b"half of it")
    assert command(folder, tmp_path / "one.db") == 0
    left = sorted(path.name for path in tmp_path.iterdir() if path.name.startswith("."))
    assert left == sorted([f".one.db.{alive}.part.db", f".other.db.{dead}.part.db"])
    assert (tmp_path / f".one.db.{alive}.part.db").read_bytes() == b"half of it"


@COMMANDS
@pytest.mark.parametrize(
    "wrong",
    [
        ("one", None, "has to end in .db"),
        ("one.sqlite", None, "has to end in .db"),
        ("one.db", "one.db-wal", "belongs to another database"),
        ("one.db", "one.db-journal", "belongs to another database"),
        ("state.db/one.db", None, "there is no folder"),
        ("folder.db", None, "is a folder"),
    ],
)
def test_a_name_that_no_reader_would_take_is_refused(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    command: Command,
    wrong: tuple[str, str | None, str],
) -> None:
    tmp_path = folder.parent
    name, beside, says = wrong
    (tmp_path / "folder.db").mkdir()
    if beside is not None:
        (tmp_path / beside).touch()
    before = sorted(path.name for path in tmp_path.iterdir())
    assert command(folder, tmp_path / name) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert says in err
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("failing", ["INSERT INTO events", "INSERT INTO bundle", "COMMIT"])
def test_a_full_disk_is_named_with_the_bundle_and_nobody_tries_again(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], failing: str
) -> None:
    with failing_sqlite() as sqlite:
        sqlite.fail(failing, sqlite3.SQLITE_FULL)
        assert export_all(folder, tmp_path / "one.db") == 2
        assert sqlite.tried
    _, err = capsys.readouterr()
    assert err == (
        f"fermata journal export: {tmp_path}: no space left for one.db; make some, or choose "
        "another disk\n"
    )
    assert [path.name for path in tmp_path.iterdir()] == ["state"]


def test_a_broken_disk_is_named_with_the_bundle_and_not_with_its_part(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with failing_sqlite() as sqlite:
        sqlite.fail("INSERT INTO events", sqlite3.SQLITE_IOERR)
        assert export_all(folder, tmp_path / "one.db") == 2
    assert capsys.readouterr().err == (
        f"fermata journal export: {tmp_path / 'one.db'}: disk I/O error\n"
    )


def test_tokens_are_not_promised_by_a_journal_that_has_none(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    full = export.Wanted(with_tokens=True)
    bare, second, third = (tmp_path / name for name in ("bare.db", "second.db", "third.db"))
    assert export_all(folder, bare) == 0
    assert export.run(bare, second, full) == 2
    assert "was exported without prompts and answers" in capsys.readouterr().err
    assert not second.exists()
    assert export.run(folder, second, full) == 0
    assert "with prompts and answers of 2 of 2 requests" in capsys.readouterr().out
    assert export.run(second, third, full) == 0
    for file in (bare, second, third):
        with JournalReader.open(file) as reader, reader.transaction() as run:
            assert list(verify(run)) == []
