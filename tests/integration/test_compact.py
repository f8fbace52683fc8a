"""`fermata journal compact`: what cannot be shortened stays as it is, with nothing beside it."""

import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest

from journal.database import Database
from journal.errors import JournalError
from journal.journal import Journal
from journal.reader import JournalReader
from tests.client_steps import started
from tests.integration.seen import alter, scratch, seen
from tests.integration.test_upgrade import downgraded
from tests.journal_steps import SECOND_NS
from tests.loop_driver import LoopDriver
from tests.pause_steps import HoldingSteps
from tools import compact, export

ALL = compact.Kept(days=0, num_bytes=10**9)
DAY_NS = 86_400 * SECOND_NS


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    """A journal as its server left it, and nothing beside it."""
    driver = LoopDriver(tmp_path / "server")
    driver.submit("hello", 5)
    driver.run_until_idle()
    driver.journal.close()
    (tmp_path / "given").mkdir()
    return Path(shutil.copyfile(driver.journal.file, tmp_path / "given" / "journal.db"))


def emptied(file: Path) -> None:
    file.write_bytes(b"")


def text(file: Path) -> None:
    file.write_text("not a database" * 100)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def scratched(file: Path) -> None:
    scratch(file, "events_of_request")


def foreign(file: Path) -> None:
    file.unlink()
    with closing(sqlite3.connect(file)) as database:
        database.execute("CREATE TABLE notes (text TEXT)")


def newer(file: Path) -> None:
    alter(file, "UPDATE alembic_version SET version_num = '9999'")


def unknown(file: Path) -> None:
    alter(file, "UPDATE alembic_version SET version_num = '00x1'")


def later_kind(file: Path) -> None:
    alter(file, "DROP TRIGGER events_never_change", "UPDATE events SET kind = 'later' WHERE seq=4")


def bundle(file: Path) -> None:
    exported = file.with_name("exported.db")
    assert export.run(file, exported, export.Wanted()) == 0
    exported.rename(file)


def protected(file: Path) -> None:
    file.chmod(0o444)


UNFIT: dict[Callable[[Path], None], str] = {
    emptied: "is empty",
    text: "file is not a database",
    cut: "database disk image is malformed",
    scratched: "is damaged, and stays as it is",
    foreign: "a database, but no journal",
    newer: "written by a later release",
    unknown: "has schema '00x1', which no release has",
    later_kind: "unknown kind of event: 'later'",
    bundle: "a bundle, which stays as it was exported",
    protected: "is write-protected",
}


@pytest.mark.parametrize("make", UNFIT, ids=lambda make: make.__name__)
def test_what_is_unfit_is_one_line_and_stays_as_it_is(
    make: Callable[[Path], None], whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole.chmod(0o644)
    make(whole)
    before, mode = seen(whole.parent), whole.stat().st_mode
    capsys.readouterr()
    assert compact.run(whole, ALL) == 2
    printed = capsys.readouterr()
    assert (printed.out, printed.err.count("\n")) == ("", 1)
    assert f"fermata journal compact: {whole}: {UNFIT[make]}" in printed.err
    assert (seen(whole.parent), whole.stat().st_mode) == (before, mode)


def test_where_nothing_is_to_go_nothing_is_written(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole.chmod(0o644)
    before, mode = seen(whole.parent), whole.stat().st_mode
    assert compact.run(whole, compact.Kept(days=14, num_bytes=10**9)) == 0
    assert capsys.readouterr().out == f"{whole}: nothing is to go, or too little to be worth it\n"
    assert (seen(whole.parent), whole.stat().st_mode) == (before, mode)


def test_a_server_that_has_it_shortens_it(
    state_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    driver = LoopDriver(state_folder)
    driver.submit("hello", 5)
    driver.run_until_idle()
    assert compact.run(state_folder, ALL) == 2
    assert "a server has it" in capsys.readouterr().err
    driver.journal.close()


def test_what_was_written_after_the_look_is_kept(
    whole: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened = Journal.open

    def a_server_was_here(path: Path) -> Journal:
        monkeypatch.undo()
        driver = LoopDriver(path)
        last_seq = driver.journal.last_seq
        driver.journal.close()
        assert last_seq > 0
        return opened(path)

    monkeypatch.setattr(Journal, "open", a_server_was_here)
    assert compact.run(whole, ALL) == 2
    assert "was written to while it was read" in capsys.readouterr().err
    with JournalReader.open(whole) as reader:
        assert next(iter(reader.read())).seq == 1


def test_days_are_counted_from_the_last_event(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The journal is of long ago: of what its last day holds nothing may go."""
    steps = HoldingSteps(Journal.open(tmp_path))
    steps.know(started())
    for number in range(1, 6):
        steps.receive(number)
    steps.journal.close()
    with JournalReader.open(tmp_path) as reader:
        whole = list(reader.read())
    assert whole[-1].at_ns - whole[0].at_ns < DAY_NS
    assert compact.run(tmp_path, compact.Kept(days=1, num_bytes=10**9)) == 0
    assert "nothing is to go" in capsys.readouterr().out
    assert compact.run(tmp_path, ALL) == 0
    assert "are now one" in capsys.readouterr().out
    with JournalReader.open(tmp_path) as reader:
        assert next(iter(reader.read())).seq > 1


def test_an_upgrade_on_the_way_is_said(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    old = whole.with_name("old.db")
    downgraded(whole, old, "0005")
    before = old.read_bytes()
    assert compact.run(old, compact.Kept(days=14, num_bytes=10**9)) == 0
    assert old.read_bytes() == before, "it is upgraded only where there is something to do"
    capsys.readouterr()
    assert compact.run(old, ALL) == 0
    assert "upgraded from schema 0005 to " in capsys.readouterr().out


def test_a_bundle_is_not_opened_for_writing(whole: Path) -> None:
    bundle(whole)
    before = whole.read_bytes()
    with pytest.raises(JournalError, match="a bundle, which is read and not written"):
        Database.open(whole)
    assert whole.read_bytes() == before
