"""A window of an audit has what lies in it, also what began before, and how much of it does."""

import json
import sqlite3
from collections.abc import Iterator
from datetime import datetime
from itertools import combinations_with_replacement, pairwise
from math import ceil
from pathlib import Path
from typing import NamedTuple

import pytest

from journal import audit, sums
from journal.journal import Journal as JournalFile
from journal.moments import is_known
from journal.overlap import MS, ORPHANS, PAUSES, PHASES, WAITS, Lasting, edges
from journal.reader import JournalReader
from journal.span import ALWAYS, Span, time_text
from tests.integration.timeline_journals import kept_story
from tests.journal_steps import Steps
from tools import export
from tools.cli import app

STORIES = ("every_rung", "crash_while_paused", "lost_clients")
READERS = {
    "pauses": (audit.pauses, PAUSES),
    "phases": (audit.phases, PHASES),
    "waits": (audit.waits, WAITS),
    "orphans": (audit.orphans, ORPHANS),
}
FROM = {"pauses": "paused_ns"}
"""From when on the time of a row counts, where that is not its begin."""


class Stored(NamedTuple):
    """A row as its table has it, in nanoseconds."""

    key: tuple[int, ...]
    began: int
    ended: int | None
    counts_from: int | None

    def is_in(self, span: Span) -> bool:
        """Whether some of it lies in the span."""
        lasts = self.ended is None or self.ended > span.first_ns
        return self.began <= span.last_ns and (self.began >= span.first_ns or lasts)

    def within_ms(self, span: Span, end_ns: int) -> float:
        """How much of it does."""
        if self.counts_from is None:
            return 0
        end = min(end_ns, span.last_ns, self.ended or end_ns)
        return max(0, end - max(self.counts_from, span.first_ns)) / 1e6


class Journal(NamedTuple):
    """A story as a file, its times, and how to read it."""

    reader: JournalReader
    end_ns: int
    spans: list[Span]

    def stored(self, name: str) -> list[Stored]:
        """All rows that last."""
        kind: Lasting = READERS[name][1]
        query = (
            f"SELECT {kind.key}, {kind.began}, {kind.ended}, {FROM.get(name, kind.began)}"
            f" FROM {kind.table} WHERE {kind.condition} ORDER BY {kind.key}"
        )
        with self.reader.transaction() as run:
            return [Stored(tuple(row[:-3]), *row[-3:]) for row in run(query).fetchall()]


@pytest.fixture(params=STORIES)
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Journal]:
    with JournalReader.open(kept_story(request.param, tmp_path)) as reader:
        with reader.transaction() as run:
            times = [row[0] for row in run("SELECT DISTINCT at_ns FROM events").fetchall()]
        some = [*times[:: max(1, len(times) // 6)], times[-1]]
        some += [at_ns + 1_300_000 for at_ns in some[::3]]
        pairs = combinations_with_replacement(sorted(some), 2)
        yield Journal(reader, times[-1], [ALWAYS, *(Span(*pair) for pair in pairs)])


def key_of(row: object, name: str) -> tuple[int, ...]:
    return tuple(getattr(row, part) for part in READERS[name][1].key.split(", "))


@pytest.mark.parametrize("name", READERS)
def test_rows_are_those_of_which_some_lies_in_the_window(journal: Journal, name: str) -> None:
    stored = journal.stored(name)
    for span in journal.spans:
        rows = list(READERS[name][0](journal.reader, span))
        expected = [each for each in stored if each.is_in(span)]
        assert [key_of(row, name) for row in rows] == [each.key for each in expected]
        end_ns = min(span.last_ns, journal.end_ns)
        for row, each in zip(rows, expected, strict=True):
            assert abs(row.within_ms - each.within_ms(span, journal.end_ns)) <= 2
            if each.ended is None or abs(each.ended - end_ns) > 1_000_000:
                assert row.is_over == (each.ended is not None and each.ended <= end_ns)
        found = edges(journal.reader, READERS[name][1], span)
        assert found.num_before == sum(each.began < span.first_ns for each in expected)
        assert found.num_not_over == sum(
            each.ended is None or each.ended > end_ns for each in expected
        )


def test_times_held_are_those_inside(journal: Journal) -> None:
    with journal.reader.transaction() as run:
        query = "SELECT reason, paused_ns, coalesce(resumed_ns, ended_ns) FROM pause"
        pauses = [row for row in run(query).fetchall() if row[1] is not None]
    assert pauses
    for span in journal.spans:
        end_ns = min(span.last_ns, journal.end_ns)
        times: dict[str, list[int]] = {}
        num_open: dict[str, int] = {}
        for reason, paused, ended in pauses:
            if paused > end_ns or (ended is not None and ended <= span.first_ns):
                continue
            inside = (min(ended or end_ns, end_ns) - max(paused, span.first_ns)) // 1_000_000
            times.setdefault(reason, []).append(inside)
            is_open = ended is None or ended > end_ns
            num_open[reason] = num_open.get(reason, 0) + is_open
        rows = sums.held_times(journal.reader, span)
        assert {row.reason: row.num_pauses for row in rows} == {
            reason: len(found) for reason, found in times.items()
        }
        for row in rows:
            found = sorted(times[row.reason])
            assert (row.held_ms, row.max_ms) == (sum(found), found[-1])
            assert row.p50_ms == found[ceil(len(found) / 2) - 1]
            assert row.num_open == num_open[row.reason]


def test_who_had_no_client_is_counted_as_it_is_shown(journal: Journal) -> None:
    for span in journal.spans:
        ends = sums.orphan_ends(journal.reader, span)
        assert sum(ends.values()) == len(list(audit.orphans(journal.reader, span)))


@pytest.mark.parametrize("name", ["pauses", "phases", "waits"])
def test_a_part_of_a_journal_has_the_same_windows(tmp_path: Path, name: str) -> None:
    whole = kept_story("crash_while_paused", tmp_path)
    part = tmp_path / "part.db"
    assert export.run(whole, part, export.Wanted(since="6s")) == 0
    read = READERS[name][0]
    with JournalReader.open(whole) as reader, JournalReader.open(part) as other:
        with other.transaction() as run:
            first, last = run("SELECT min(at_ns), max(at_ns) FROM events").one()
        num_before = 0
        for place in range(1, 6):
            span = Span(first + (last - first) * place // 6, last)
            rows = list(read(reader, span))
            assert list(read(other, span)) == rows
            num_before += sum(row.is_over == 1 for row in rows)
        assert num_before


def test_a_window_within_a_hold_shows_it_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = kept_story("crash_while_paused", tmp_path)
    with JournalReader.open(file) as reader:
        [pause] = audit.pauses(reader)
        with reader.transaction() as run:
            paused_ns, resumed_ns = run("SELECT paused_ns, resumed_ns FROM pause").one()
    third = (resumed_ns - paused_ns) // 3
    window = [time_text(paused_ns + third), time_text(paused_ns + 2 * third)]
    options = ("--since", window[0], "--until", window[1])
    for name in ("pauses", "held", "waits", "phases"):
        with pytest.raises(SystemExit) as ended:
            app(["audit", name, str(file), *options])
        assert ended.value.code == 0
        lines = capsys.readouterr().out.splitlines()
        number = 2 if name == "phases" else 1
        words = f"{number} began before this window, {number} not over at the end of this window"
        assert lines[-1].endswith(words)
        shown = next(line for line in lines if pause.request_id in line or name == "held")
        assert name == "held" or "not over" in shown
    with pytest.raises(SystemExit):
        app(["audit", "pauses", str(file), *options, "--format", "json"])
    [row] = json.loads(capsys.readouterr().out)
    assert (row["is_over"], row["resumed_at"]) == (0, pause.resumed_at)
    assert row["within_ms"] == pytest.approx(third / 1e6, abs=2)


def quiet_within(file: Path, begin_ns: int, end_ns: int) -> tuple[str, str]:
    """A time between two events of these, with nothing but the middle of the longest."""
    with JournalReader.open(file) as reader:
        times = [record.at_ns for record in reader.read() if begin_ns <= record.at_ns <= end_ns]
    length, before = max((after - before, before) for before, after in pairwise(times))
    return time_text(before + length // 3), time_text(before + length // 3 * 2)


@pytest.mark.parametrize("name", READERS)
def test_what_goes_on_where_nothing_happens_is_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file = kept_story("lost_clients", tmp_path)
    kind = READERS[name][1]
    with JournalReader.open(file) as reader, reader.transaction() as run:
        query = f"SELECT {FROM.get(name, kind.began)}, {kind.ended} FROM {kind.table}"
        begin, end = max(run(f"{query} WHERE {kind.condition}"), key=lambda row: row[1] - row[0])
    since, until = quiet_within(file, begin, end)
    asked = [name, "held"] if name == "pauses" else [name]
    for question in asked:
        options = ("--since", since, "--until", until, "--format", "json")
        with pytest.raises(SystemExit) as ended:
            app(["audit", question, str(file), *options])
        assert ended.value.code == 0
        rows = json.loads(capsys.readouterr().out)
        length_ms = (datetime.fromisoformat(until) - datetime.fromisoformat(since)) // MS
        assert length_ms > 5
        assert rows
        for row in rows:
            assert row.get("within_ms", row.get("max_ms")) == length_ms
            assert row.get("is_over", 0) == 0


@pytest.mark.parametrize("name", READERS)
def test_outside_of_the_journal_nothing_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    file = kept_story("lost_clients", tmp_path)
    with JournalReader.open(file) as reader:
        times = [record.at_ns for record in reader.read()]
    since, until = quiet_within(file, times[0], times[-1])
    windows = (
        ("--until", time_text(times[0] - 2_000_000)),
        ("--since", time_text(times[-1] + 2_000_000)),
        ("--since", until, "--until", since),
    )
    for window in windows:
        with pytest.raises(SystemExit) as ended:
            app(["audit", name, str(file), *window])
        assert ended.value.code == 2
        said = capsys.readouterr()
        assert (said.out, said.err.count("\n")) == ("", 1)
        assert "nothing of the journal lies in this window" in said.err
    quiet = ("--since", since, "--until", until)
    for question, status in (("hits", 2), ("throughput", 0)):
        with pytest.raises(SystemExit) as ended:
            app(["audit", question, str(file), *quiet, "--format", "json"])
        assert ended.value.code == status
    [*_, minute] = json.loads(capsys.readouterr().out)
    assert until.startswith(minute["minute_at"].rstrip("Z")), "its minute is shown as a whole"


def test_of_a_shortened_journal_its_minutes_are_known(tmp_path: Path) -> None:
    minute_ns = 60 * 10**9
    steps = Steps(JournalFile.open(tmp_path))
    steps.start()
    steps.receive(1)
    steps.journal.close()
    with JournalReader.open(tmp_path) as reader, reader.transaction() as run:
        first = run("SELECT min(at_ns) FROM events").scalar_one() // minute_ns * minute_ns
    with sqlite3.connect(tmp_path / "journal.db") as database:
        database.execute("UPDATE minute SET minute = minute - 3")
    with JournalReader.open(tmp_path) as reader, reader.transaction() as run:
        begin_ns = first - 3 * minute_ns
        assert is_known(run, Span(first - minute_ns, first - 1))
        assert is_known(run, Span(begin_ns - 5, begin_ns))
        assert not is_known(run, Span(begin_ns - 5, begin_ns - 1))
