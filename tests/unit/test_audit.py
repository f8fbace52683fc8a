"""`fermata audit pauses`, `orphans` and `memory` as a user runs them, on journals made by hand."""

import csv
import json
import re
from io import StringIO
from pathlib import Path

import pytest

from journal.journal import Journal
from journal.span import time_text
from tests.client_steps import adopts, arrival, attached, gone, orphan_limits, started
from tests.journal_steps import KV_DOMAIN, SECOND_NS, request_id
from tests.pause_steps import HoldingSteps, cancelled, kv_dropped, request_paused, sample
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
    header, *lines, times, drop, cut = run(capsys, "pauses", str(stopped)).splitlines()
    assert header.split()[:5] == ["started", "request", "reason", "phase", "place"]
    first, second, third = (re.split(r"  +", line) for line in lines)
    assert first[1:] == [
        *(request_id(1), "high", "decoding", "1 of 3", "950B", "400B", "90B", "390B", "kept"),
        *("2000 ms", "3000 ms", "3000 ms", "1000 ms", "10", "resumed"),
    ]
    assert second[1:5] == [request_id(2), "operator", "waiting", "-"]
    assert (third[8], third[9], third[-1]) == ("-", "disk_full", "not over")
    assert (second[-4:], third[-4]) == (["2000 ms", "-", "-", "not over"], "0 ms")
    assert times == (
        "high: 2 held, of these 1 not over; for 0 ms (half of them at most), 3000 ms (90%),"
        " 3000 ms (99%), 3000 ms (all)"
    )
    assert drop.startswith("operator: 1 held, of these 1 not over; for 2000 ms ")
    assert cut == "pauses: 2 not over at the end of the journal"


def test_without_pauses_there_are_no_times(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Journal.open(tmp_path).close()
    assert run(capsys, "pauses", str(tmp_path)).splitlines()[1:] == [
        *("nobody was held", "pauses: 0 not over at the end of the journal")
    ]


def test_pauses_for_programs(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(run(capsys, "pauses", str(stopped), "--format", "json"))
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
    assert len(lines) == 7
    assert lines[3].startswith("... these are the first 2")


@pytest.fixture
def lost(tmp_path: Path) -> Path:
    """Five requests: adopted by 6, finished and adopted by 7, back again, given up, and one that
    has a key. Then the server is started anew.
    """
    steps = HoldingSteps(Journal.open(tmp_path))
    steps.know(started())
    steps.ready(KV_DOMAIN)
    for number in (1, 2, 3, 4):
        steps.receive(number)
    steps.commit([arrival(5, "key")])
    steps.join(1, 2, 4)
    steps.decode({4: [7, 8]})
    steps.know(*(gone(number) for number in (1, 2, 3, 4, 5)))
    steps.commit([arrival(6)], adopts(6, 1))
    steps.finish(2, [11], 1)
    steps.commit([arrival(7)], adopts(7, 2))
    steps.know(attached(3))
    steps.decide(cancelled(4))
    steps.finish(1, [11], 1)
    steps.know(started(orphan_limits("hold")))
    steps.journal.close()
    return tmp_path


def test_orphans_as_a_table(lost: Path, capsys: pytest.CaptureFixture[str]) -> None:
    header, *lines, last = run(capsys, "orphans", str(lost)).splitlines()
    assert header.split() == ["lost", "request", "key", "why", "phase", "for", "within", "outcome"]
    rows = [re.split(r"  +", line)[1:] for line in lines]
    assert [row[0] for row in rows] == [request_id(number) for number in (1, 2, 3, 4, 5, 3)]
    assert rows[0][1:] == [
        *("no", "client_gone", "decoding", "1000 ms", "1000 ms", f"adopted by {request_id(6)}")
    ]
    assert [row[-1] for row in rows[1:5]] == [
        f"finished: length; adopted by {request_id(7)}",
        "attached",
        "cancelled: deadline",
        rows[5][-1],
    ]
    assert rows[4][1:3] == ["yes", "client_gone"]
    assert rows[5][2:5] == ["restart", "waiting", "-"]
    assert rows[5][-1].startswith("held, until 20")
    assert last == (
        "times without a client: 6; of these 1 adopted, 1 attached, 1 cancelled, 1 finished, 2 open"
        "; 2 not over at the end of the journal"
    )


def test_those_that_run_on_are_told_from_those_that_are_held(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = HoldingSteps(Journal.open(tmp_path))
    steps.know(started())
    steps.receive(1)
    steps.commit([arrival(2, "key"), gone(2)])
    steps.know(started())
    steps.journal.close()
    keyed, found = run(capsys, "orphans", str(tmp_path)).splitlines()[1:-1]
    assert re.split(r"  +", keyed)[-1] == "runs on"
    assert re.split(r"  +", found)[-1].startswith("runs on, until 20")


def test_without_a_lost_client_there_is_nothing_to_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Journal.open(tmp_path).close()
    assert run(capsys, "orphans", str(tmp_path)).splitlines()[1:] == ["no client was lost"]


def test_orphans_for_programs(lost: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = json.loads(run(capsys, "orphans", str(lost), "--format", "json"))
    assert [(row["number"], row["adopter_id"]) for row in rows][:3] == [
        (1, request_id(6)),
        (2, request_id(7)),
        (3, None),
    ]
    text = run(capsys, "orphans", str(lost), "--format", "csv")
    ends = [row["outcome"] for row in csv.DictReader(StringIO(text))]
    assert ends == ["adopted", "finished", "attached", "cancelled", "open", "open"]


def test_without_a_server_that_is_said_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    steps = HoldingSteps(Journal.open(tmp_path))
    steps.start()
    steps.receive(1, range(39))
    steps.join(1)
    [died] = steps.know(sample(5_000_000))
    [again] = steps.know(started())
    steps.journal.close()
    assert again.at_ns - died.at_ns == SECOND_NS
    during = time_text(died.at_ns + SECOND_NS // 2)
    gone, last, *told = json.loads(
        run(capsys, "at", str(tmp_path), "--time", during, "--format", "json")
    )
    words = f"run 1 was killed; its last event is {died.seq}, at {time_text(died.at_ns)}"
    assert (gone["what"], gone["name"], gone["detail"]) == ("run", "no server runs", words)
    assert (last["name"], last["detail"][-8:]) == ("run 1", ", killed")
    told = [row for row in told if row["what"] in ("memory", "request")]
    assert [row["name"] for row in told] == ["reading", "decoding"]
    assert all(row["detail"].startswith(f"as of {time_text(died.at_ns)}: ") for row in told)
    for at_ns, name in ((died.at_ns - 1_000_000, "run 1"), (again.at_ns, "run 2")):
        time = ("--time", time_text(at_ns))
        rows = json.loads(run(capsys, "at", str(tmp_path), *time, "--format", "json"))
        assert rows[0]["name"] == name
        assert not any("as of" in row["detail"] for row in rows)


@pytest.mark.parametrize("command", ["pauses", "orphans", "memory"])
def test_what_is_no_journal_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        app(["audit", command, str(tmp_path)])
    assert ended.value.code == 2
    assert "no such journal" in capsys.readouterr().err
