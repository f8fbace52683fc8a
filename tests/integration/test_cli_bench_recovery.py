"""`fermata bench recovery`: that it measures what it says; never how fast this machine is."""

import json
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from scheduler.recovery import code_digest
from scheduler.state import STATE_VERSION
from tools import bench_recovery
from tools.bench_history import write_history
from tools.bench_recovery import Size, forget_snapshots, later, run


@pytest.fixture
def _signals() -> Iterator[None]:
    """Puts back what a run in this process changes."""
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("_signals")
def test_it_reports_each_number_of_the_documented_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(Size(rounds=1, events=2_500), tmp_path, as_json=True)
    body = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert body["name"] == "recovery.listening, snapshot - empty"
    found = {measurement["name"]: measurement for measurement in body["measurements"]}
    targets = {name for name, measurement in found.items() if measurement["target"]}
    assert targets == {"listening, snapshot - empty", "listening, no_snapshot - empty"}
    assert status == int(not all(found[name]["met"] for name in targets))
    parts = {name for name in found if " - " not in name}
    sides = {"snapshot", "no_snapshot"}
    expected = {f"{part}, {side}" for part in bench_recovery.PARTS for side in sides}
    assert parts == expected | {f"{part}, empty" for part in bench_recovery.PARTS[:3]}
    for side in sides:
        taken = [found[f"{part}, {side}"]["value"] for part in bench_recovery.PARTS]
        assert 0 < taken[0] < min(taken[1:])
    assert body["details"]["unfinished requests"] == bench_recovery.NUM_OPEN
    assert body["details"]["events"] >= 2_500
    assert list(tmp_path.iterdir()) == []


def test_differences_are_taken_within_a_round() -> None:
    starts = {
        "empty": [{"ready": 1.0}, {"ready": 4.0}],
        "snapshot": [{"ready": 2.5}, {"ready": 4.5}],
    }
    assert later(starts, "snapshot", "ready") == [1.5, 0.5]


def test_snapshot_is_one_that_this_code_uses_until_it_is_forgotten(tmp_path: Path) -> None:
    write_history(tmp_path, 50_500, num_open=8, seed=1)
    query = "SELECT count(*) FROM snapshots WHERE state_version = ? AND code_digest = ?"
    with closing(sqlite3.connect(tmp_path / "journal.db")) as database:
        usable = (STATE_VERSION, code_digest())
        assert database.execute(query, usable).fetchone() == (1,)
        forget_snapshots(tmp_path)
        assert database.execute(query, usable).fetchone() == (0,)
