"""Who only reads a journal writes nothing, into no file and beside none."""

import fcntl
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from journal import files
from journal import untouched as untouched_module
from journal.errors import JournalError, JournalLocked
from journal.journal import Journal
from journal.reader import JournalReader
from tests.integration.seen import alter, seen
from tests.loop_driver import LoopDriver
from tools import audit, audit_at, audit_times, backup, export, journal_info, replay, timeline
from tools import whatif as whatif_command

COMMANDS: dict[str, Callable[[Path, Path], int]] = {
    "audit": lambda journal, _: audit_times.phases(journal, audit.Wanted(form="csv")),
    "audit at": lambda journal, _: audit_at.at(journal, None, "csv"),
    "replay": lambda journal, _: replay.run(journal, replay.Wanted(show=True)),
    "replay --request": lambda journal, _: replay.run_life(journal, f"req_{1:026}", as_json=True),
    "whatif": lambda journal, _: whatif_command.run(journal, whatif_command.Wanted()),
    "timeline": lambda journal, out: timeline.run(journal, out / "picture.html"),
    "export": lambda journal, out: export.run(journal, out / "part.db", export.Wanted()),
    "backup": lambda journal, out: backup.run(journal, out / "backup.db", force=False),
    "info": lambda journal, _: journal_info.info(journal, as_json=True),
    "verify": lambda journal, _: journal_info.verify(journal),
}
LOOKING = ("info", "verify", "backup")
"""They say what there is, also of a bundle that somebody has changed."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Folders with the same journal: closed; closed, with the log that an older reader has left;
    by a server that died; copied from that without the index; and as a bundle.
    """
    folder = tmp_path_factory.mktemp("inputs")
    driver = LoopDriver(folder / "closed")
    driver.submit("hello", 5)
    driver.submit("to you", 5)
    driver.run_until_idle()
    shutil.copytree(folder / "closed", folder / "dead")
    copy(folder / "dead", folder / "copied", "journal.db", "journal.db-wal")
    driver.journal.close()
    copy(folder / "closed", folder / "read", "journal.db")
    for name in ("journal.db-wal", "journal.db-shm"):
        (folder / "read" / name).touch()
    (folder / "bundle").mkdir()
    exported = folder / "bundle" / "incident.db"
    assert export.run(folder / "closed", exported, export.Wanted()) == 0
    for made in folder.iterdir():
        made.chmod(0o500)
    yield folder
    for made in folder.iterdir():
        made.chmod(0o700)


def copy(source: Path, target: Path, *names: str) -> None:
    target.mkdir()
    for name in names:
        shutil.copyfile(source / name, target / name)


def journal_in(folder: Path) -> Path:
    """A state folder, or the bundle in this one."""
    return folder / "incident.db" if folder.name == "bundle" else folder


@pytest.mark.parametrize("name", ["closed", "read", "dead", "copied", "bundle"])
def test_no_command_leaves_a_trace(
    name: str, inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with JournalReader.open(inputs / "closed") as reader:
        whole = list(reader.read())
    before = seen(inputs / name)
    for command, run in COMMANDS.items():
        (tmp_path / command).mkdir()
        assert run(journal_in(inputs / name), tmp_path / command) == 0, command
        assert capsys.readouterr().err == ""
        assert seen(inputs / name) == before, command
    with JournalReader.open(journal_in(inputs / name)) as reader:
        assert list(reader.read()) == whole, "what is only in the log is read too"
    assert seen(inputs / name) == before


def test_a_copy_for_the_log_does_not_stay(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with JournalReader.open(inputs / "copied") as reader:
        assert reader.request(f"req_{1:026}")
        [copied] = tmp_path.iterdir()
        assert copied.stat().st_mode & 0o077 == 0, "nobody else may read it"
    assert list(tmp_path.iterdir()) == []


def test_where_no_copy_can_be_made_it_says_so(
    inputs: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    assert journal_info.verify(inputs / "copied") == 2
    error = capsys.readouterr().err
    assert "cannot be made" in error
    assert "set TMPDIR" in error
    assert error.count("\n") == 1


def test_a_journal_that_is_written_is_read_beside_its_writer(
    state_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = LoopDriver(state_folder)
    driver.submit("hello", 5)
    driver.run_until_idle()
    names = sorted(path.name for path in state_folder.iterdir())
    for command, run in COMMANDS.items():
        (tmp_path / command).mkdir()
        assert run(state_folder, tmp_path / command) == 0, command
        assert capsys.readouterr().err == ""
    with JournalReader.open(state_folder) as reader:
        with reader.source() as source:
            assert source.access == "ro", "an index that is only read lags behind"
        before = len(list(reader.read()))
        driver.submit("and more", 5)
        driver.run_until_idle()
        seqs = [record.seq for record in reader.read()]
    assert seqs == list(range(1, driver.journal.last_seq + 1))
    assert len(seqs) > before
    assert sorted(path.name for path in state_folder.iterdir()) == names
    driver.journal.close()


def grown(folder: Path) -> None:
    """One more server's life, from its start to its end."""
    driver = LoopDriver(folder)
    driver.num_requests = 10
    driver.submit("and more", 5)
    driver.run_until_idle()
    driver.journal.close()


def test_a_reader_notices_that_a_server_has_come(inputs: Path, tmp_path: Path) -> None:
    for name in ("closed", "dead", "copied"):
        folder = tmp_path / name
        copy(inputs / name, folder, *(path.name for path in (inputs / name).iterdir()))
        with JournalReader.open(folder) as reader:
            before = len(list(reader.read()))
            driver = LoopDriver(folder)
            assert len(list(reader.read())) > before, "it is in its log"
            driver.journal.close()
            assert list(reader.read())[-1].seq == driver.journal.last_seq


def test_what_was_written_to_meanwhile_is_not_believed(inputs: Path, tmp_path: Path) -> None:
    copy(inputs / "closed", tmp_path / "state", "journal.db")
    with JournalReader.open(tmp_path / "state") as reader:

        def read_while_it_grows() -> None:
            with reader.transaction() as run:
                run("SELECT count(*) FROM events").scalar_one()
                grown(tmp_path / "state")

        with pytest.raises(JournalError, match="was written to while it was read"):
            read_while_it_grows()
        with reader.transaction() as run:
            assert run("SELECT count(*) FROM run").scalar_one() == 2


def test_whether_there_is_a_writer_is_asked_once(
    inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []

    def has_writer(file: Path) -> bool:
        asked.append(file)
        return files.has_writer(file)

    monkeypatch.setattr(untouched_module, "has_writer", has_writer)
    with JournalReader.open(inputs / "dead") as reader:
        for _ in range(3):
            assert list(reader.read())
    assert len(asked) == 1, "who asks is in the way of a server that starts just then"


def test_who_only_asks_keeps_no_server_from_starting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Journal.open(tmp_path).close()
    asking = os.open(tmp_path / "journal.lock", os.O_RDONLY)
    fcntl.flock(asking, fcntl.LOCK_SH)
    waits: list[float] = []
    monkeypatch.setattr("time.sleep", waits.append)
    with pytest.raises(JournalLocked):
        Journal.open(tmp_path)
    assert len(waits) == files.LOCK_TRIES - 1
    monkeypatch.setattr("time.sleep", lambda _: os.close(asking))
    Journal.open(tmp_path).close()


def test_a_lock_that_may_not_be_asked_for_counts_as_held(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(tmp_path)
    assert files.has_writer(journal.file)
    journal.close()
    assert not files.has_writer(journal.file)

    def refuse(*_: object) -> int:
        raise PermissionError

    monkeypatch.setattr(os, "open", refuse)
    assert files.has_writer(journal.file)


def bad_inputs(inputs: Path, folder: Path) -> dict[str, tuple[Path, str]]:
    """What cannot be read, by name, and what is said about it."""
    whole = inputs / "closed" / "journal.db"
    made = {
        "text": "file is not a database",
        "cut": "database disk image is malformed",
        "newer": "written by a later release (schema 9999",
        "without its log": "is empty: no server has begun to write it, or it was copied without",
        "other": "a database, but no journal",
        "changed": "bundle: step 3 is not what was exported",
        "reworded": "view held_times is not that of schema",
        "rewritten": "bundle: the rows of request are not what was exported; have it exported",
    }
    files_made = {name: folder / name / "journal.db" for name in made}
    for file in files_made.values():
        file.parent.mkdir()
    files_made["text"].write_text("not a database" * 100)
    files_made["cut"].write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    shutil.copyfile(inputs / "dead" / "journal.db", files_made["without its log"])
    altered(whole, files_made["newer"], "UPDATE alembic_version SET version_num = '9999'")
    with closing(sqlite3.connect(files_made["other"])) as database:
        database.execute("CREATE TABLE notes (text TEXT)")
    altered(
        inputs / "bundle" / "incident.db",
        files_made["changed"],
        "DROP TRIGGER events_never_change",
        "UPDATE events SET at_ns = at_ns + 1 WHERE step = 3",
    )
    altered(
        inputs / "bundle" / "incident.db",
        files_made["reworded"],
        "DROP VIEW held_times",
        "CREATE VIEW held_times AS SELECT 'pressure' AS reason, 7 AS num_pauses",
    )
    altered(
        inputs / "bundle" / "incident.db",
        files_made["rewritten"],
        "UPDATE request SET outcome = 'aborted' WHERE number = 1",
    )
    return {name: (file, made[name]) for name, file in files_made.items()}


def altered(source: Path, target: Path, *statements: str) -> None:
    """A copy in which something else stands."""
    shutil.copyfile(source, target)
    alter(target, *statements)


def test_bad_input_is_one_line_and_stays_as_it_is(
    inputs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name, (file, words) in bad_inputs(inputs, tmp_path).items():
        before = seen(file.parent)
        for command, run in COMMANDS.items():
            if name in ("changed", "reworded", "rewritten") and command in LOOKING:
                continue
            assert run(file, out) == 2, (name, command)
            printed = capsys.readouterr()
            assert printed.out == ""
            assert printed.err.startswith("fermata ")
            assert f"{file}: {words}" in printed.err, (name, command)
            assert printed.err.count("\n") == 1
            assert seen(file.parent) == before, (name, command)
    assert list(out.iterdir()) == []


def test_a_folder_that_may_not_be_looked_into_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: Path) -> bool:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "is_file", refuse)
    assert journal_info.info(tmp_path, as_json=False) == 2
    assert capsys.readouterr().err.endswith("journal.db: Permission denied\n")
