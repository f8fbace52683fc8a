"""`fermata whatif JOURNAL`: what it prints, what it refuses, and that it leaves its input alone."""

import json
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from typer.testing import CliRunner

from scheduler.policy import POLICY_VERSION
from scheduler.whatif.totals import Totals
from tests.histories.keeping import upgraded
from tests.loaded import SCRIPT
from tools import export, whatif
from tools.cli import app
from tools.whatif import Report, Wanted, differences, lines_of, report_of

OTHERS = ("server.port", "journal.keep_days", "engine.blas", "models.accept_any", "kv.num_writers")
HISTORIES = Path(__file__).parents[1] / "histories"


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """A server that was killed while a request was held."""
    with upgraded(HISTORIES / "crash_while_paused.db") as file:
        return Path(shutil.copy(file, tmp_path / "journal.db"))


def refused(path: Path, capsys: pytest.CaptureFixture[str], *changes: str) -> str:
    """The one line that says why."""
    assert whatif.run(path, Wanted(changes)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("fermata whatif: ")
    assert printed.err.count("\n") == 1
    return printed.err


def test_the_error_comes_first_and_then_a_column_for_each_side(journal: Path) -> None:
    lines = lines_of(report_of(journal, {"memory.ceiling": "3GB"}))
    assert lines[0].startswith("cost model, fitted to the first half of the facts, on the second")
    assert lines[1].startswith("the whole, simulated with the recorded settings: finished +")
    assert lines[2] == ""
    assert lines[3].split() == ["recorded", "simulated", "memory.ceiling=3GB"]
    assert [line.split()[0] for line in lines[4:]] == list(Totals.__struct_fields__)


def test_the_error_of_the_whole_is_what_the_columns_say(journal: Path) -> None:
    report = report_of(journal, {})
    recorded = msgspec.structs.replace(report.recorded, total_ms=2_000, pauses=0, gap_p99_ms=None)
    simulated = msgspec.structs.replace(report.recorded, total_ms=2_501, pauses=2, finished=1)
    found = differences(recorded, simulated)
    assert (found["total_ms"], found["pauses"], found["gap_p99_ms"]) == (250, None, None)
    assert (found["finished"], found["peak_bytes"]) == (-500, 0)
    changed = msgspec.structs.replace(report, simulated_error_permille=found)
    assert "finished -50.0%, held_ms +0.0%, total_ms +25.0%" in lines_of(changed)[1]
    assert report.simulated_error_permille == differences(report.recorded, report.simulated)


def test_every_figure_is_explained(journal: Path) -> None:
    readme = (HISTORIES.parents[1] / "README.md").read_text()
    for name in (*Totals.__struct_fields__, *Report.__struct_fields__):
        assert f"`{name}`" in readme, name


def test_programs_read_one_object(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert whatif.run(journal, Wanted(("scheduler.max_rows=1",), as_json=True)) == 0
    report = json.loads(capsys.readouterr().out)
    assert list(report)[:2] == ["prefill_error_permille", "decode_error_permille"]
    assert report["changes"] == {"scheduler.max_rows": "1"}
    assert {"recorded", "simulated", "changed"} < set(report)
    assert set(report["simulated"]) == set(Totals.__struct_fields__)
    assert report["changed"]["finished"] == report["recorded"]["finished"] == 2


def test_another_policy_is_named_before_the_numbers(journal: Path) -> None:
    report = report_of(journal, {})
    assert report.recorded_policy_version == report.policy_version == POLICY_VERSION
    body = "json_set(body, '$.policy_version', 2)"
    tamper(journal, f"UPDATE events SET body = {body} WHERE kind = 'server_started'")
    third = lines_of(report_of(journal, {}))[2]
    assert third.startswith(f"recorded under policy 2, simulated with policy {POLICY_VERSION}")


def test_nothing_is_written_to_the_input(tmp_path: Path, journal: Path) -> None:
    before = journal.read_bytes()
    assert whatif.run(tmp_path, Wanted()) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["journal.db"]
    assert journal.read_bytes() == before


def test_what_is_no_journal_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert "no such journal" in refused(tmp_path, capsys)
    text = tmp_path / "journal.db"
    text.write_text("something else, of some length, which is no database at all\n" * 100)
    assert str(text) in refused(text, capsys)


def test_a_journal_of_a_later_release_is_refused(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(sqlite3.connect(journal, isolation_level=None)) as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    assert "later release" in refused(journal, capsys)


def test_a_journal_without_requests_is_refused(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tamper(journal, "DELETE FROM events WHERE seq > 3")
    assert "no request is in this journal" in refused(journal, capsys)
    tamper(journal, "DELETE FROM events")
    assert "no start of a server" in refused(journal, capsys)


def tamper(file: Path, statement: str) -> None:
    """Does what the journal's own triggers forbid."""
    with closing(sqlite3.connect(file, isolation_level=None)) as database:
        query = "SELECT name FROM sqlite_master WHERE type = 'trigger'"
        for (name,) in database.execute(query).fetchall():
            database.execute(f"DROP TRIGGER {name}")
        database.execute(statement)


def bundle(journal: Path, since: str | None) -> Path:
    """The journal from an event on, as a file to be sent around."""
    file = journal.with_name("bundle.db")
    assert export.run(journal, file, export.Wanted(since=since)) == 0
    return file


def test_a_whole_bundle_is_as_good_as_its_journal(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = bundle(journal, None)
    capsys.readouterr()
    whatif.run(journal, Wanted(as_json=True))
    whatif.run(file, Wanted(as_json=True))
    one, other = capsys.readouterr().out.splitlines()
    assert one == other


def test_a_bundle_that_begins_in_the_middle_has_its_settings_and_what_was_open(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = bundle(journal, "2s")
    capsys.readouterr()
    report = report_of(file, {})
    assert report.num_carried > 0
    assert report.recorded.requests >= report.num_carried
    assert report.simulated.requests == report.recorded.requests
    assert report.simulated.finished == report.recorded.finished > 0
    assert f"{report.num_carried} requests were open where this begins" in lines_of(report)[2]
    tamper(file, "UPDATE events SET at_ns = at_ns + 1 WHERE seq = (SELECT max(seq) FROM events)")
    assert "is not what was exported" in refused(file, capsys)


def test_what_has_not_ended_is_told(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = journal.with_name("begin.db")
    assert export.run(journal, file, export.Wanted(until="2s")) == 0
    capsys.readouterr()
    report = report_of(file, {})
    assert report.num_open > 0
    assert lines_of(report)[2].startswith(f"{report.num_open} requests had not ended where this")


def test_a_bundle_of_one_request_is_run_with_it(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(sqlite3.connect(journal)) as database:
        query = "SELECT request_id FROM request ORDER BY number DESC LIMIT 1"
        ((name,),) = database.execute(query).fetchall()
    file = journal.with_name("one.db")
    assert export.run(journal, file, export.Wanted(request=name)) == 0
    capsys.readouterr()
    report = report_of(file, {"scheduler.max_rows": 1})
    assert report.changed is not None
    assert report.simulated.requests == report.recorded.requests > 0
    assert report.changed.finished == report.recorded.finished > 0


def test_a_state_of_another_release_is_refused(
    journal: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = bundle(journal, "2s")
    capsys.readouterr()
    tamper(file, "DROP TABLE bundle")
    body = "json_set(body, '$.state_version', 1)"
    tamper(file, f"UPDATE events SET body = {body} WHERE kind = 'state_carried'")
    assert "begins with a state of version 1" in refused(file, capsys)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("memory.ceiling", "write NAME=VALUE"),
        ("memory.roof=1GB", "there is no such setting"),
        ("memory.ceiling=much", "memory.ceiling"),
        ("scheduler.max_rows=0", "scheduler.max_rows"),
        ("fake.step_ms=3", "changes nothing in a what-if"),
        ("model=smollm2", "changes nothing in a what-if"),
        ("memory.ceiling=auto", "memory.ceiling=auto follows a machine"),
        *((f"{name}=3", "changes nothing in a what-if") for name in OTHERS),
    ],
)
def test_a_setting_that_cannot_be_is_refused(
    journal: Path, change: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(journal, capsys, change)


def test_a_setting_is_given_once(journal: Path, capsys: pytest.CaptureFixture[str]) -> None:
    why = refused(journal, capsys, "scheduler.max_rows=1", "scheduler.max_rows=1")
    assert "--set scheduler.max_rows: is there twice" in why


def test_without_a_store_nothing_is_found(journal: Path) -> None:
    report = report_of(journal, {"kv.enabled": "false"})
    assert report.changed is not None
    assert report.changed.hit_tokens == 0
    assert report.changed.requests == report.recorded.requests


@pytest.mark.parametrize("options", [(), ("{}", "--limit", "3"), ("{}", "--trace", "{}")])
def test_a_journal_and_a_trace_are_two_questions(journal: Path, options: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, ["whatif", *(text.format(journal) for text in options)])
    assert result.exit_code == 2
    assert "give a journal, or --trace FILE" in result.stderr


@pytest.mark.timeout(60)
def test_neither_a_model_nor_a_web_server_is_imported(journal: Path, tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text(
        '{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [1, 2]}\n'
    )
    for arguments in ([str(journal)], ["--trace", str(trace), "--journal", str(journal)]):
        command = [sys.executable, "-c", SCRIPT, "whatif", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        shown, _, loaded = done.stdout.partition("loaded:")
        assert "finished" in shown
        assert {"mlx", "mlx_lm", "fastapi", "transformers"}.isdisjoint(loaded.split())
