"""A bundle in which a row outside `events` was changed is not believed."""

import shutil
import sqlite3
from pathlib import Path

import msgspec
import pytest

from journal.bundle import refuse_changed
from journal.errors import JournalError
from journal.reader import JournalReader
from journal.row_digests import RowDigests
from journal.verify import verify
from tests.integration.seen import alter
from tests.integration.test_upgrade import downgraded
from tests.loop_driver import LoopDriver
from tools import export, journal_info

PAUSE = (
    "INSERT INTO pause (pause_seq, number, request_id, run_id, reason, from_phase, outcome,"
    " started_ns, num_cached_tokens, num_output_tokens)"
    " VALUES (7, 1, 'req_1', 1, 'emergency', 'decoding', 'open', 1, 0, 0)"
)
CHANGES = {
    "pause": PAUSE,
    "request": "UPDATE request SET outcome = 'aborted' WHERE number = 1",
    "run": "UPDATE run SET model_name = model_name || ' '",
    "minute": "UPDATE minute SET num_received = num_received + 1",
    "phase": "DELETE FROM phase WHERE seq = (SELECT max(seq) FROM phase)",
    "memory_sample": "INSERT INTO memory_sample VALUES (1, 1, 1, 1, 1, 1, 1, 1, 1, NULL)",
    "token_ids": "UPDATE token_ids SET ids = zeroblob(4) WHERE part = 'output'",
    "request_parameters": "DELETE FROM request_parameters",
}


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a server that answered two requests."""
    driver = LoopDriver(tmp_path_factory.mktemp("rows") / "state")
    driver.submit("hello", 5)
    driver.submit("to you", 5)
    driver.run_until_idle()
    driver.journal.close()
    return driver.journal.file.parent


@pytest.fixture
def bundle(journal: Path, tmp_path: Path) -> Path:
    """All of it, with tokens."""
    file = tmp_path / "bundle.db"
    assert export.run(journal, file, export.Wanted(with_tokens=True)) == export.DONE
    return file


def refusal(file: Path) -> str:
    """Why a bundle is not read, or nothing."""
    with JournalReader.open(file) as reader:
        try:
            refuse_changed(reader)
        except JournalError as error:
            return str(error)
    return ""


def findings(file: Path) -> list[str]:
    with JournalReader.open(file) as reader, reader.transaction() as run:
        return list(verify(run))


def changed(file: Path, statement: str) -> Path:
    """The file, in which something else stands now."""
    with sqlite3.connect(file) as database:
        assert database.execute(statement).rowcount > 0, "nothing was changed"
    database.close()
    return file


@pytest.mark.parametrize("table", CHANGES)
def test_the_table_is_named(bundle: Path, table: str) -> None:
    assert refusal(bundle) == ""
    fault = f"bundle: the rows of {table} are not what was exported"
    changed(bundle, CHANGES[table])
    assert refusal(bundle) == f"{bundle}: {fault}; have it exported again"
    assert fault in findings(bundle)


def test_rows_that_come_in_another_order_and_a_table_of_somebodys_own_change_nothing(
    bundle: Path,
) -> None:
    alter(
        bundle,
        "CREATE TABLE kept AS SELECT * FROM phase ORDER BY seq DESC, number DESC",
        "DELETE FROM phase",
        "INSERT INTO phase SELECT * FROM kept",
        "ANALYZE",
    )
    assert refusal(bundle) == ""


def test_a_missing_table_and_digests_that_are_none_are_said(bundle: Path, tmp_path: Path) -> None:
    other = Path(shutil.copyfile(bundle, tmp_path / "other.db"))
    alter(bundle, "DROP TABLE snapshots")
    assert "bundle: table snapshots is missing; have it exported again" in refusal(bundle)
    changed(other, "UPDATE bundle SET row_digests = '[' || row_digests")
    assert "the digests of its rows cannot be read" in refusal(other)


def test_a_bundle_that_was_exported_without_them_is_read_as_before(
    bundle: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    alter(bundle, "ALTER TABLE bundle DROP COLUMN row_digests")
    assert refusal(bundle) == ""
    capsys.readouterr()
    assert journal_info.verify(bundle) == journal_info.SOUND
    again = bundle.with_name("again.db")
    assert export.run(bundle, again, export.Wanted()) == export.DONE
    changed(again, CHANGES["request"])
    assert "the rows of request" in refusal(again), "an export of it has them"


def test_a_bundle_of_an_earlier_schema_is_not_held_to_the_rows_that_were_made_anew(
    bundle: Path, tmp_path: Path
) -> None:
    old = tmp_path / "old.db"
    downgraded(bundle, old, "0005")
    alter(
        old,
        f"ATTACH '{bundle}' AS new",
        "CREATE TABLE bundle AS SELECT * FROM new.bundle",
        "CREATE TABLE step_digest AS SELECT * FROM new.step_digest",
    )
    seal = msgspec.json.encode(RowDigests("0005", {"request": 64 * "0"})).decode()
    alter(old, f"UPDATE bundle SET row_digests = '{seal}'")
    assert refusal(old) == ""
    assert findings(old) == []
