"""A backup is the journal of one moment, beside its writer; what is not sound gets no name."""

import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from journal import backup as module
from journal.backup import BackupError, BackupUnsound, back_up
from journal.database import WAL
from journal.errors import JournalError
from journal.journal import Journal
from journal.reader import JournalReader
from tests.integration.seen import scratch
from tests.journal_steps import Steps, request_id, run_sql
from tools import backup as command


def written(folder: Path) -> Journal:
    """An open journal: one request has ended, one runs."""
    opened = Journal.open(folder)
    steps = Steps(opened)
    steps.start()
    steps.receive(1)
    steps.receive(2)
    steps.join(1, 2)
    steps.finish(1, [11], 1)
    return opened


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    """A journal that is being written."""
    opened = written(tmp_path / "state")
    yield opened
    opened.close()


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Where the backup goes: a folder of its own."""
    (tmp_path / "backups").mkdir()
    return tmp_path / "backups" / "one.db"


def files_beside(target: Path) -> list[str]:
    return sorted(path.name for path in target.parent.iterdir())


def test_backup_is_the_journal_and_leaves_the_writers_files_alone(
    journal: Journal, target: Path
) -> None:
    folder = journal.file.parent
    before = {path.name: path.read_bytes() for path in folder.iterdir() if "shm" not in path.name}
    assert before["journal.db-wal"], "what the log holds has to be in the backup"
    backup = back_up(folder, target)
    after = {path.name: path.read_bytes() for path in folder.iterdir() if "shm" not in path.name}
    assert after == before
    assert backup == (target, 1, 15, 15, target.stat().st_size)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    with JournalReader.open(target) as reader:
        assert list(reader.read()) == list(journal.read())
        assert reader.prompt_tokens(request_id(2)) == journal.prompt_tokens(request_id(2))
    assert files_beside(target) == ["one.db"]


def test_backup_of_a_journal_that_nobody_writes(tmp_path: Path, target: Path) -> None:
    journal = written(tmp_path)
    records = list(journal.read())
    journal.close()
    back_up(journal.file, target)
    with JournalReader.open(target) as reader:
        assert list(reader.read()) == records


def test_backup_of_an_empty_journal(tmp_path: Path, target: Path) -> None:
    Journal.open(tmp_path).close()
    assert back_up(tmp_path, target).num_events == 0


def test_writer_goes_on_meanwhile(
    journal: Journal, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = list(journal.read())
    steps = Steps(journal)
    num_flushes = 0

    def commit(descriptor: int) -> None:
        nonlocal num_flushes
        num_flushes += 1
        steps.receive(10 + num_flushes)

    monkeypatch.setattr(module, "PORTION_LENGTH", 1)
    with monkeypatch.context() as patched:
        patched.setattr(module.os, "fsync", commit)
        back_up(journal.file, target)
    assert num_flushes > 10
    assert journal.last.seq >= len(records) + num_flushes
    with JournalReader.open(target) as reader:
        assert list(reader.read()) == records


def test_backup_becomes_a_journal_again(journal: Journal, tmp_path: Path, target: Path) -> None:
    back_up(journal.file, target)
    (tmp_path / "other").mkdir()
    shutil.copy(target, tmp_path / "other" / "journal.db")
    opened = Journal.open(tmp_path / "other")
    try:
        assert run_sql(opened, WAL).scalar() == "wal"
        steps = Steps(opened)
        steps.start()
        steps.receive(3)
        assert opened.verify() == []
    finally:
        opened.close()


def test_what_is_not_sound_is_not_backed_up(
    journal: Journal, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_sql(journal, "DROP TRIGGER events_never_go")
    with pytest.raises(BackupUnsound) as caught:
        back_up(journal.file, target)
    assert [line for line in caught.value.findings if "events_never_go" in line]
    assert command.run(journal.file, target, force=False) == 1
    said = capsys.readouterr()
    assert "events_never_go is missing" in said.out
    assert said.err.count("\n") == 1
    assert files_beside(target) == []


class Refusal(NamedTuple):
    """A name that no backup gets: what lies there, and what is said of it."""

    name: str
    prepare: Callable[[Path], object]
    said: str


REFUSALS = (
    Refusal("one.db", Path.touch, "exists"),
    Refusal("one.db", lambda path: path.symlink_to("nowhere"), "exists"),
    Refusal("one.db", Path.mkdir, "is a folder"),
    Refusal("one.sqlite", lambda _: None, "end in .db"),
    Refusal("missing/one.db", lambda _: None, "there is no folder"),
    Refusal("one.db", lambda path: path.with_name("one.db-wal").touch(), "another database"),
)


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: refusal.said)
def test_refused_names(journal: Journal, target: Path, refusal: Refusal) -> None:
    file = target.parent / refusal.name
    refusal.prepare(file)
    before = files_beside(target)
    with pytest.raises(BackupError, match=refusal.said):
        back_up(journal.file, file)
    assert files_beside(target) == before


@pytest.mark.parametrize("link", ["hard", "symbolic", "none"])
def test_journal_is_no_backup_of_itself(journal: Journal, tmp_path: Path, link: str) -> None:
    file = journal.file if link == "none" else tmp_path / "link.db"
    if link == "hard":
        file.hardlink_to(journal.file)
    if link == "symbolic":
        file.symlink_to(journal.file)
    before = list(journal.read())
    with pytest.raises(BackupError, match="the journal itself"):
        back_up(journal.file, file, replace=True)
    assert list(journal.read()) == before
    assert journal.verify() == []


def test_older_backup_is_replaced_only_by_force_and_by_a_whole_one(
    journal: Journal, target: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target.write_text("older")
    assert command.run(journal.file, target, force=False) == 2
    assert "--force" in capsys.readouterr().err
    query = "SELECT sql FROM sqlite_master WHERE name = 'events_never_go'"
    trigger = run_sql(journal, query).scalar_one()
    run_sql(journal, "DROP TRIGGER events_never_go")
    assert command.run(journal.file, target, force=True) == 1
    assert target.read_text() == "older"
    run_sql(journal, trigger)
    assert command.run(journal.file, target, force=True) == 0
    assert "15 events (seq 1 to 15)" in capsys.readouterr().out
    with JournalReader.open(target) as reader:
        assert len(list(reader.read())) == 15
    assert files_beside(target) == ["one.db"]


def test_source_that_is_no_journal(tmp_path: Path, target: Path) -> None:
    with pytest.raises(JournalError, match="no such journal"):
        back_up(tmp_path, target)
    assert files_beside(target) == []


def test_space_is_left_to_others(
    journal: Journal, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SPARE_BYTES", 2**62)
    with pytest.raises(BackupError, match="MB free"):
        back_up(journal.file, target)
    assert files_beside(target) == []


def test_disk_that_fills_up_meanwhile(
    journal: Journal, small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal.save_snapshot(3, 1, "digest", os.urandom(2 * 2**20))
    monkeypatch.setattr(module, "refuse_full_disk", lambda *_: None)
    with pytest.raises(BackupError, match="no space left"):
        back_up(journal.file, small_disk / "one.db")
    assert list(small_disk.iterdir()) == []


def test_flush_that_fails_is_a_failure(
    journal: Journal, target: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(module.os, "fsync", fail)
    with pytest.raises(BackupError, match="No space left"):
        back_up(journal.file, target)
    assert files_beside(target) == []


def test_what_is_damaged_is_named_and_not_the_copy(tmp_path: Path, target: Path) -> None:
    journal = written(tmp_path)
    journal.close()
    scratch(journal.file, "events")
    with pytest.raises(BackupError) as raised:
        back_up(journal.file, target)
    assert str(raised.value).startswith(f"{journal.file}: database disk image is malformed")
    assert target.parent.name not in str(raised.value)
    assert files_beside(target) == []
