"""`fermata audit pauses` and `audit memory` as a user runs them, on a journal made by hand."""

import csv
import json
import re
from io import StringIO
from pathlib import Path

import pytest

from journal.journal import Journal
from tests.journal_steps import request_id
from tests.pause_steps import HoldingSteps, kv_dropped, request_paused, sample
from tools import audit
from tools.cli import app


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """Request 1 was held and went on; request 2 waited, and is held; request 3 keeps no KV."""
    journal = Journal.open(tmp_path)
    steps = HoldingSteps(journal)
    steps.start()
    for number in (1, 2, 3):
        steps.receive(number, range(39))
    steps.join(1, 3)
    steps.know(sample(5_000_000))
    steps.begin_pause(1)
    steps.end_pause(1, [])
    steps.resume(1, 0, 30, 10)
    steps.decide(request_paused(2, "operator", had_row=False))
    steps.begin_pause(3)
    steps.decide(kv_dropped(3), request_paused(3))
    journal.close()
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What the command prints; it must end with status 0."""
    with pytest.raises(SystemExit) as ended:
        app(["audit", *arguments])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_pauses_as_a_table(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, *lines, last = run(capsys, "pauses", str(stopped)).splitlines()
    assert header.split()[:5] == ["started", "request", "reason", "phase", "place"]
    first, second, third = (re.split(r"  +", line) for line in lines)
    assert first[1:] == [
        *(request_id(1), "high", "decoding", "1 of 3", "950B", "400B", "90B", "390B", "kept"),
        *("2000 ms", "3000 ms", "1000 ms", "10", "resumed"),
    ]
    assert second[1:5] == [request_id(2), "operator", "waiting", "-"]
    assert (third[8], third[9], third[-1]) == ("-", "disk_full", "open")
    assert last == (
        "pauses that are over: 1; held for 3000 ms (half of them at most), 3000 ms (90%),"
        " 3000 ms (99%), 3000 ms (all)"
    )


def test_without_pauses_there_are_no_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Journal.open(tmp_path).close()
    assert run(capsys, "pauses", str(tmp_path)).splitlines()[1:] == ["no pause is over"]


def test_pauses_for_programs(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = run(capsys, "pauses", str(stopped), "--format", "json").splitlines()
    rows = [json.loads(line) for line in lines]
    assert [(row["number"], row["held_ms"]) for row in rows] == [(1, 3000), (2, None), (3, None)]
    text = run(capsys, "pauses", str(stopped), "--format", "csv")
    assert [row["outcome"] for row in csv.DictReader(StringIO(text))] == [
        *("resumed", "open", "open")
    ]


def test_memory_as_a_table(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, line = run(capsys, "memory", str(stopped)).splitlines()
    columns = ["sampled", "run", "active", "cached", "peak", "ceiling", "share", "process"]
    assert header.split() == [*columns, "available", "age"]
    assert line.split()[1:] == ["1", "5.0MB", "50B", "600B", "-", "-", "700B", "800B", "3", "ms"]


def test_a_table_of_pauses_is_bounded(
    stopped: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "TABLE_ROWS", 2)
    lines = run(capsys, "pauses", str(stopped)).splitlines()
    assert len(lines) == 5
    assert lines[3].startswith("... these are the first 2")


@pytest.mark.parametrize("command", ["pauses", "memory"])
def test_what_is_no_journal_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["audit", command, str(tmp_path)])
    assert ended.value.code == 2
    assert "no such journal" in capsys.readouterr().err
