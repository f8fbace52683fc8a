"""`fermata journal info` and `verify` as a user runs them."""

import json
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from journal.journal import Journal
from tests.journal_steps import Steps, request_id, run_sql
from tools import export, journal_info


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A stopped server's state folder: one request finished, one open."""
    journal = Journal.open(tmp_path)
    steps = Steps(journal)
    steps.start()
    steps.receive(1)
    steps.receive(2)
    steps.join(1)
    steps.finish(1, [11], 1)
    journal.save_snapshot(3, 1, "digest", b"state")
    journal.close()
    return tmp_path


def test_info_shows_a_state_folder_or_a_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert journal_info.info(folder, as_json=False) == 0
    shown = capsys.readouterr().out
    lines = dict(line.split(maxsplit=1) for line in shown.splitlines())
    assert lines["events"] == "13 (seq 1 to 13)"
    assert lines["requests"] == "1 finished, 1 waiting"
    assert lines["snapshots"] == "seq 3"
    assert lines["runs"].startswith("1, the last is not ended and has no log, as after ")
    assert journal_info.info(folder / "journal.db", as_json=False) == 0
    assert capsys.readouterr().out == shown


def last_run(file: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What is said of the runs."""
    capsys.readouterr()
    assert journal_info.info(file, as_json=False) == 0
    lines = capsys.readouterr().out.splitlines()
    return next(line for line in lines if line.startswith("runs"))


def test_info_warns_only_of_a_copy_that_may_lack_something(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = folder / "part.db"
    assert export.run(folder, part, export.Wanted()) == 0
    words = "the last is not ended where this bundle ends"
    assert last_run(part, capsys) == f"runs       1, {words}"
    lacks = "a copy that was made without its log lacks what came last"
    assert last_run(folder, capsys).endswith(f"as after `journal backup` or `compact`; {lacks}")
    with closing(Journal.open(folder)) as journal:
        Steps(journal).start()
        assert last_run(folder, capsys) == "runs       2, the last is not ended"


def test_info_as_json_is_one_object_on_the_last_line(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert journal_info.info(folder, as_json=True) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (summary["num_events"], summary["num_runs"]) == (13, 1)
    assert summary["requests"] == {"finished": 1, "waiting": 1}
    assert summary["num_output_tokens"] == 1


def test_info_of_an_empty_journal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Journal.open(tmp_path).close()
    assert journal_info.info(tmp_path, as_json=False) == 0
    assert "events     none" in capsys.readouterr().out


def test_verify_says_what_is_wrong_and_exits_1(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert journal_info.verify(folder) == 0
    assert capsys.readouterr().out == "0 findings\n"
    journal = Journal.open(folder)
    run_sql(journal, "DROP TRIGGER events_never_go")
    journal.close()
    assert journal_info.verify(folder) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert "events_never_go is missing" in first
    assert last == "1 findings"


@pytest.mark.parametrize(
    ("subcommand", "command"),
    [
        ("verify", journal_info.verify),
        ("info", lambda path: journal_info.info(path, as_json=False)),
    ],
)
def test_what_is_no_journal_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], subcommand: str, command: object
) -> None:
    assert callable(command)
    assert command(tmp_path) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fermata journal {subcommand}: ")
    assert "no such journal" in error


SCRIPT = """
import sys
from tools.cli import app
folder = sys.argv[1]
for arguments in (
    ["journal", "info"], ["journal", "verify"], ["journal", "export", "part.db"],
    ["journal", "backup", "copy.db"], ["replay"], ["replay", "--request", sys.argv[2]],
    ["journal", "compact", "--keep-days", "0"],
):
    files = [f"{folder}/{name}" for name in arguments if name.endswith(".db")]
    words = [name for name in arguments if not name.endswith(".db")]
    try:
        app([*words, folder, *files])
    except SystemExit as ended:
        assert ended.code != 2, arguments
print(*sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_no_command_on_a_journal_imports_what_is_heavy(folder: Path) -> None:
    # alembic takes most of a second, and only an upgrade needs it.
    command = [sys.executable, "-c", SCRIPT, str(folder), request_id(1)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = result.stdout.splitlines()[-1].split()
    assert "journal" in loaded
    heavy = {"alembic", "mlx", "mlx_lm", "mlx_vlm", "fastapi", "transformers", "numpy"}
    assert heavy.isdisjoint(loaded)
