"""The long journal of the benchmarks is a journal, as far as audits look."""

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from journal.verify import ORPHANS
from tools import bench_audit, bench_long_journal


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_long_journal, "NUM_REQUESTS", 4)
    monkeypatch.setattr(bench_long_journal, "ARRIVALS_S", 8)


@pytest.mark.usefixtures("short")
def test_a_stretch_is_copied_behind_itself(tmp_path: Path) -> None:
    bench_long_journal.write_stretch(tmp_path, 1)
    with closing(sqlite3.connect(tmp_path / "journal.db", isolation_level=None)) as database:
        run = database.execute
        (length,) = run("SELECT count(*) FROM events").fetchone()
        schema = run("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall()
        assert bench_long_journal.multiply(database, 2 * length + 1) == 3 * length
        assert run("SELECT type, name, sql FROM sqlite_master ORDER BY name").fetchall() == schema
        assert run("SELECT count(*), max(seq) FROM events").fetchone() == (3 * length, 3 * length)
        back = "SELECT count(*) FROM events a JOIN events b ON b.seq = a.seq + 1 WHERE"
        assert run(f"{back} b.at_ns < a.at_ns OR b.step < a.step").fetchone() == (0,)
        for what, query in ORPHANS.items():
            assert run(query).fetchone() == (0,), what
        assert run("SELECT count(*), count(DISTINCT request_id) FROM request").fetchone() == (
            12,
            12,
        )
        assert run("SELECT count(*) FROM waits").fetchone()[0] >= 12
        late = "SELECT count(*) FROM phase p JOIN events e USING (seq) WHERE p.began_ns <> e.at_ns"
        assert run(late).fetchone() == (0,)


@pytest.mark.usefixtures("short")
def test_an_audit_is_timed_as_a_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench_audit, "AUDITS", ("hits",))
    monkeypatch.setattr(bench_audit, "AT_MOST_S", 0)
    timed = bench_audit.seconds

    def seconds(*arguments: str) -> bench_audit.Seconds:
        """Two of them are enough here."""
        few = {"--since", "--help"}.isdisjoint(arguments)
        return timed(*arguments) if few else bench_audit.Seconds(1, 1)

    monkeypatch.setattr(bench_audit, "seconds", seconds)
    size = bench_audit.Size(rounds=1, events=1)
    assert bench_audit.run(size, tmp_path, as_json=False) == 1
    lines = capsys.readouterr().out.splitlines()
    names = ["hits", "hits, one hour", "hits, second half"]
    assert sorted(line.split("  ")[0] for line in lines[1:4]) == names
    assert all(line.endswith("MISSED") for line in lines[1:4])
    others = [
        "the most processor time of an audit",
        "audit --help",
        "journal export, the first hour",
    ]
    assert [line.split("  ")[0] for line in lines[4:7]] == others
    assert list(tmp_path.iterdir()) == []
