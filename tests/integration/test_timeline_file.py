"""`fermata timeline`: the file that it writes, and what it says where it cannot."""

import hashlib
import json
import re
import sqlite3
import subprocess
import sys
from contextlib import closing
from datetime import datetime, timedelta
from functools import cache
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from journal import events
from journal.events import Record
from journal.journal import Journal
from journal.overlap import EPOCH
from scheduler.evolve import fold
from scheduler.state import SchedulerState
from tests.histories.keeping import keep, read
from tests.integration.timeline_journals import (
    drawn,
    embedded,
    kept_story,
    kind_name,
    story,
    upgraded_histories,
)
from tools import timeline as command
from tools import timeline_fold
from tools.timeline_file import SCRIPTS, data_of, html_of
from tools.timeline_kinds import KINDS_OF
from tools.timeline_parts import PHASES, Picture
from tools.timeline_window import Wanted

MICROSECOND = timedelta(microseconds=1)
VIEW = Path(command.__file__).parent / "timeline_view"


def test_one_request_alone_has_its_lane_and_the_server(tmp_path: Path) -> None:
    file, output = kept_story("every_rung", tmp_path), tmp_path / "one.html"
    request_id = f"req_{1:026}"
    assert command.run(file, output, Wanted(request=request_id)) == 0
    picture = embedded(output.read_text())
    assert [lane.request_id for lane in picture.lanes] == [request_id]
    shown = {kind_name(picture, entry) for entry in picture.entries if not entry.lanes}
    assert "emergency_declared" in shown
    assert not shown & {"pause_started", "tokens_decoded", "batch_changed", "request_received"}
    assert f"req_{2:026}" not in output.read_text()


def test_times_and_seqs_bound_the_window(tmp_path: Path) -> None:
    records = story("every_rung")
    file, output = kept_story("every_rung", tmp_path), tmp_path / "part.html"
    assert command.run(file, output, Wanted(since="100", until="200")) == 0
    picture = embedded(output.read_text())
    assert (picture.first_seq, picture.last_seq) == (100, 200)
    assert command.run(file, output, Wanted(since="3s")) == 0
    picture = embedded(output.read_text())
    least_ns = records[-1].at_ns - 3_000_000_000
    assert picture.first_seq == min(r.seq for r in records if r.at_ns >= least_ns)
    assert command.run(file, output, Wanted(until="2023-11-14T22:13:23")) == 0
    most_ns = 1_700_000_003 * 10**9
    picture = embedded(output.read_text())
    assert picture.last_seq == max(r.seq for r in records if r.at_ns <= most_ns)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    said = capsys.readouterr()
    assert not said.out
    assert said.err.startswith("fermata timeline: ")
    assert said.err.count("\n") == 1
    return said.err


@cache
def away_for_a_second() -> tuple[Record, ...]:
    """A story of a death, of which the next run begins a second later than it is simulated."""
    records = story("crash_while_paused")
    started = [r.seq for r in records if isinstance(r.event, events.ServerStarted)]
    return tuple(replace(r, at_ns=r.at_ns + 10**9) if r.seq >= started[-1] else r for r in records)


def gaps() -> list[tuple[Record, Record]]:
    """Two events each, between which is a millisecond or more."""
    pairs = pairwise(away_for_a_second())
    return [pair for pair in pairs if pair[1].at_ns - pair[0].at_ns >= 10**6]


def between(before: Record, after: Record) -> tuple[str, str]:
    """A window in the middle of two events."""
    third_ns = (after.at_ns - before.at_ns) // 3
    ends = (before.at_ns + third_ns, after.at_ns - third_ns)
    since, until = ((EPOCH + at_ns // 1_000 * MICROSECOND).isoformat() for at_ns in ends)
    return since, until


@pytest.mark.parametrize("died", [False, True])
def test_what_goes_on_between_two_events_is_drawn(
    died: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / "journal.db", tmp_path / "between.html"
    keep(away_for_a_second(), file)
    after_death = [pair for pair in gaps() if isinstance(pair[1].event, events.ServerStarted)]
    while_held = [pair for pair in gaps() if pair[0].seq > after_death[0][0].seq]
    before, after = after_death[0] if died else while_held[1]
    seq, (since, until) = before.seq, between(before, after)
    assert command.run(file, output, Wanted(since=since, until=until)) == 0
    assert f"0 events (between seq {seq} and {seq + 1})" in capsys.readouterr().out
    picture = embedded(output.read_text())
    length_ns = (
        (datetime.fromisoformat(until) - datetime.fromisoformat(since)) // MICROSECOND * 1_000
    )
    assert (picture.num_events, picture.end_ns, picture.entries) == (0, length_ns, [])
    state = SchedulerState()
    fold(state, away_for_a_second()[:seq])
    phases = {
        lane.request_id: [PHASES[each.phase] for each in lane.stretches] for lane in picture.lanes
    }
    assert phases == {each.request_id: [each.phase.value] for each in state.requests.values()}
    assert phases
    assert [(away.begin_ns, away.end_ns) for away in picture.aways] == [(0, length_ns)] * died
    [lane] = [lane for lane in picture.lanes if "paused" in phases[lane.request_id]]
    [hold] = picture.holds
    assert picture.lanes[hold.lane] == lane
    assert hold.end_ns is None


def test_a_window_between_two_events_is_one_of_the_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = tmp_path / "journal.db", tmp_path / "x.html"
    records = away_for_a_second()
    keep(records, file)
    received = [r.event.request_id for r in records if isinstance(r.event, events.RequestReceived)]
    statuses: set[int] = set()
    for before, after in (gaps()[0], gaps()[-1]):
        since, until = between(before, after)
        alive = SchedulerState()
        fold(alive, records[: before.seq])
        for request_id in received:
            status = 0 if alive.find(request_id) else 2
            wanted = Wanted(since=since, until=until, request=request_id)
            assert command.run(file, output, wanted) == status
            statuses.add(status)
            if status:
                assert "nothing of the journal" in one_line(capsys)
            else:
                capsys.readouterr()
                picture = embedded(output.read_text())
                assert [lane.request_id for lane in picture.lanes] == [request_id]
    assert statuses == {0, 2}
    since, until = between(*gaps()[0])
    assert command.run(file, output, Wanted(since=until, until=since)) == 2
    assert "nothing of the journal" in one_line(capsys)


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (Wanted(since="0", until="2001-01-01"), "nothing of the journal"),
        (Wanted(until="2001-01-01"), "nothing of the journal"),
        (Wanted(since="100000"), "nothing of the journal lies in this window (since 100000)"),
        (Wanted(since="2030-01-01"), "nothing of the journal"),
        (Wanted(until="1d"), "nothing of the journal"),
        (Wanted(since="yesterday"), "yesterday is neither an event nor a time"),
        (Wanted(request="req_9"), "the journal knows no request req_9"),
        (Wanted(request="req_0"), "may be any of several"),
    ],
)
def test_no_window_is_one_line(
    wanted: Wanted, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = kept_story("emergency_alone" if "any" not in words else "every_rung", tmp_path)
    output = tmp_path / "x.html"
    assert command.run(file, output, wanted) == 2
    assert words in one_line(capsys)
    assert not output.exists()


def test_what_is_no_journal_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "x.html"
    text = tmp_path / "text.db"
    text.write_text("not a database" * 100)
    newer = kept_story("emergency_alone", tmp_path)
    cut = tmp_path / "cut.db"
    cut.write_bytes(newer.read_bytes()[: newer.stat().st_size // 2])
    with closing(sqlite3.connect(newer)) as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
        database.commit()
    for file in (tmp_path / "nothing", text, cut, newer):
        assert command.run(file, output) == 2
        assert str(file) in one_line(capsys)
    assert not output.exists()


def test_a_record_that_cannot_be_folded_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = kept_story("emergency_alone", tmp_path)
    with closing(sqlite3.connect(file)) as database:
        guards = "SELECT name FROM sqlite_master WHERE type = 'trigger' AND tbl_name = 'events'"
        for (name,) in database.execute(guards).fetchall():
            database.execute(f"DROP TRIGGER {name}")
        database.execute("DELETE FROM events WHERE seq = 20")
        database.commit()
    assert command.run(file, tmp_path / "x.html") == 2
    assert "event 21 cannot be folded" in one_line(capsys)


def test_more_than_a_browser_takes_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timeline_fold, "MAX_ENTRIES", 50)
    file = kept_story("emergency_alone", tmp_path)
    assert command.run(file, tmp_path / "x.html") == 2
    said = one_line(capsys)
    assert "more than 50 events lie in this window (all of it)" in said
    until = re.search(r"to seq (\d+), would fit", said)
    assert until is not None
    assert command.run(file, tmp_path / "x.html", Wanted(until=until[1])) == 0


def test_where_nothing_can_be_written_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = kept_story("emergency_alone", tmp_path)
    (tmp_path / "folder.html").mkdir()
    cases = {
        tmp_path / "folder.html": "is a folder",
        tmp_path / "none" / "x.html": "there is no folder",
        tmp_path / f"{'x' * 300}.html": "cannot be written (File name too long)",
        file: "ends in .html",
    }
    for output, words in cases.items():
        assert command.run(file, output) == 2
        assert words in one_line(capsys)


def test_the_journal_stays_as_it_is_and_the_file_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, output = kept_story("emergency_alone", tmp_path), tmp_path / "x.html"
    digest = hashlib.sha256(file.read_bytes()).digest()
    output.write_text("old")
    assert command.run(file, output) == 0
    said = capsys.readouterr().out
    assert f"{output}: {len(story('emergency_alone'))} events" in said
    assert "<!doctype html>" in output.read_text()
    assert hashlib.sha256(file.read_bytes()).digest() == digest
    assert sorted(tmp_path.iterdir()) == [file, output]


def test_a_journal_that_is_being_written_is_drawn(tmp_path: Path) -> None:
    file, output = kept_story("emergency_alone", tmp_path), tmp_path / "x.html"
    with closing(Journal.open(file)) as journal:
        first, last = story("emergency_alone")[0], story("emergency_alone")[-1]
        assert isinstance(first.event, events.ServerStarted)
        stopping = events.ServerStopping(reason="test")
        journal.commit(last.step + 1, last.at_ns + 5, [first.event, stopping], [])
        assert command.run(file, output) == 0
    picture = embedded(output.read_text())
    assert kind_name(picture, picture.entries[-1]) == "server_stopping"


def test_every_history_has_a_picture(tmp_path: Path) -> None:
    for file in upgraded_histories(tmp_path):
        output = tmp_path / f"{file.stem}.html"
        assert command.run(file, output) == 0
        records, picture = read(file), embedded(output.read_text())
        assert picture.num_events == len(records)
        ended = [lane.end_ns for lane in picture.lanes]
        assert len(ended) == sum(isinstance(r.event, events.RequestReceived) for r in records)
        begun = {(e.request_id) for r in records if isinstance(e := r.event, events.PauseStarted)}
        held = {picture.lanes[hold.lane].request_id for hold in picture.holds}
        assert begun <= held


def test_nothing_in_the_data_ends_its_element() -> None:
    evil = "</script><script>alert(1)</script><!--\u2028&amp;"
    picture = Picture(journal=evil, what="all of it")
    text = data_of(picture)
    assert not set(text) & set("<>&\u2028")
    assert json.loads(text)["journal"] == evil
    assert html_of(picture).count("</script>") == 2


def test_the_file_may_reach_nothing() -> None:
    html = html_of(drawn(story("emergency_alone")))
    found = re.search(r'http-equiv="Content-Security-Policy" content="([^"]*)"', html)
    assert found is not None
    policy = found[1]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "connect-src" not in policy
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttp|WebSocket", html)


def test_every_file_of_the_view_is_used() -> None:
    names = {*SCRIPTS, "timeline.html", "timeline.css"}
    assert {path.name for path in VIEW.iterdir()} == names
    for path in VIEW.iterdir():
        lines = path.read_text().splitlines()
        assert len(lines) <= 400, path.name
        assert max(map(len, lines)) <= 100, path.name


def test_it_needs_neither_model_nor_web_framework(tmp_path: Path) -> None:
    file = kept_story("emergency_alone", tmp_path)
    script = (
        "import sys; from pathlib import Path; from tools import timeline\n"
        f"status = timeline.run(Path({str(file)!r}), Path({str(tmp_path / 'x.html')!r}))\n"
        "print(status, *sorted({n.partition('.')[0] for n in sys.modules}))"
    )
    done = subprocess.run(
        (sys.executable, "-c", script), capture_output=True, text=True, check=True
    )
    status, *loaded = done.stdout.splitlines()[-1].split()
    assert status == "0"
    assert {"mlx", "mlx_lm", "fastapi", "transformers", "numpy"}.isdisjoint(loaded)


def luminance(color: str) -> float:
    """Relative luminance of `#rrggbb` (https://www.w3.org/TR/WCAG22/#dfn-relative-luminance)."""
    parts = [int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


TEXTS = ("text", "quiet", "accent", "paused", "on-paused", "low", "high", "emergency", "ceiling")
SHAPES = (*PHASES, "alone", "usage", "edge", *KINDS_OF)


def test_contrast_is_enough_in_light_and_dark() -> None:
    css = (VIEW / "timeline.css").read_text()
    schemes = re.findall(r":root \{(.*?)\}", css, re.DOTALL)
    assert len(schemes) == 2
    for scheme in schemes:
        colors = dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", scheme))
        for ground in ("ground", "raised"):
            poor = {n: contrast(colors[n], colors[ground]) for n in TEXTS}
            assert min(poor.values()) >= 4.5, poor
        poor = {n: contrast(colors[n], colors["ground"]) for n in SHAPES}
        assert min(poor.values()) >= 3, poor
        for phase in ("prefilling", "decoding"):
            assert contrast(colors[f"on-{phase}"], colors[phase]) >= 4.5, phase
