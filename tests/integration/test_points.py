"""Points in a journal's middle: an export that begins at one is the same as one that has folded
everything before its window.
"""

import ast
import shutil
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import pairwise
from pathlib import Path

import pytest

from journal import events, points
from journal.events import Record
from journal.journal import Journal
from journal.reader import JournalReader
from journal.rebuild import EMPTY
from journal.verify import verify
from scheduler.recovery import CORE
from tests.journal_steps import Steps
from tests.loop_driver import LoopDriver, settings_of
from tools import compact, export, journal_info

LONG = "a prompt of several chunks " * 20
FOLDER = Path(points.__file__).parent


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The journal of a server that died twice, with a point after nearly every step: with requests
    that wait, are prefilled, decode and are held, and a client that is lost.
    """
    monkeypatch.setattr("journal.points.POINT_EVENTS", 1)
    monkeypatch.setattr("journal.points.EVENT_BYTES", 10**6)
    monkeypatch.setattr("journal.points.KEPT_POINTS", 1_000)
    folder = tmp_path / "state"
    driver = LoopDriver(folder, settings_of(scheduler__max_rows=2, scheduler__chunk_tokens=64))
    streams = [driver.submit(text, 12) for text in ("first", LONG, "third", "fourth")]
    held_id = streams[1].request_id
    turn_until(driver, lambda: len(streams[1].tokens) > 3)
    driver.sensors.wish(events.HoldRequested(request_id=held_id))
    turn_until(driver, lambda: held_id in held_ids(driver))
    driver.restart()
    driver.sensors.wish(events.ReleaseRequested(request_id=held_id))
    turn_until(driver, lambda: bool(driver.state.batch_rows))
    driver.sensors.wish(events.ClientGone(request_id=held_id))
    turn_until(driver, lambda: not driver.state.requests or not driver.turn())
    driver.restart()
    last = driver.submit(LONG, 6)
    turn_until(driver, lambda: len(last.tokens) == 6 and not driver.state.requests)
    driver.journal.close()
    return folder


def held_ids(driver: LoopDriver) -> list[str]:
    return [driver.state.requests[number].request_id for number in driver.state.paused]


def turn_until(driver: LoopDriver, reached: Callable[[], bool]) -> None:
    """As `run_until`, with a snapshot after each step."""

    def saved() -> bool:
        driver.loop.save_snapshot()
        return reached()

    driver.run_until(saved)


def seqs_of(folder: Path) -> list[int]:
    with JournalReader.open(folder) as reader, reader.transaction() as run:
        return sorted(points.points_of(run))


def contents(file: Path) -> dict[str, list[tuple[object, ...]]]:
    """All rows of a bundle but for the time at which it was made."""
    with closing(sqlite3.connect(file)) as database:
        query = "SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name"
        names = [name for (name,) in database.execute(query)]
        rows = {name: database.execute(f"SELECT * FROM {name}").fetchall() for name in names}
    rows["bundle"] = [(*row[:1], *row[2:]) for row in rows["bundle"]]
    return rows


def without_points(folder: Path, other: Path) -> Path:
    """A copy that is folded from its beginning."""
    shutil.copytree(folder, other)
    change(other, "DELETE FROM carried_rows WHERE seq > (SELECT min(seq) FROM events)")
    return other


def change(folder: Path, statement: str) -> None:
    with closing(sqlite3.connect(folder / "journal.db", isolation_level=None)) as database:
        assert database.execute(statement).rowcount != 0


@pytest.fixture
def read_from(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """After which seqs events were read."""
    seen: list[int] = []
    read = JournalReader.read

    def reading(
        reader: JournalReader, after_seq: int = 0, until_seq: int | None = None
    ) -> Iterator[Record]:
        seen.append(after_seq)
        return read(reader, after_seq, until_seq)

    monkeypatch.setattr(JournalReader, "read", reading)
    return seen


def exported(
    folder: Path, file: Path, window: export.Window
) -> dict[str, list[tuple[object, ...]]]:
    """What is in a bundle of the window, with tokens."""
    with JournalReader.open(folder) as reader:
        state, point = export.state_before(reader, window)
        export.export(reader, file, window, export.Before(state), point, with_tokens=True)
    found = contents(file)
    file.unlink()
    return found


def compare_all(folder: Path, read_from: list[int]) -> int:
    """Exports from points and from the beginning, with windows that begin at a point and with a
    step that comes after one. How many there were.
    """
    bare = without_points(folder, folder.parent / "bare")
    kept = seqs_of(folder)
    with JournalReader.open(folder) as reader:
        records = list(reader.read())
    ends = [r.seq for r, later in pairwise(records) if later.step > r.step]
    file, last = folder.parent / "bundle.db", records[-1].seq
    chosen = ends[1 :: max(1, len(ends) // 12)]
    for through_seq in chosen:
        window = export.Window(through_seq=through_seq, until_seq=last, what="some")
        read_from.clear()
        from_point = exported(folder, file, window)
        before = max((seq for seq in kept if seq <= through_seq), default=0)
        assert min(read_from) == min(before, through_seq - 1)
        read_from.clear()
        assert exported(bare, file, window) == from_point, through_seq
        assert read_from.count(0) == 1, "what lies before the window is read once"
    return len(chosen)


def test_an_export_from_a_point_is_that_from_the_beginning(
    folder: Path, read_from: list[int]
) -> None:
    assert len(seqs_of(folder)) > 40
    assert compare_all(folder, read_from) >= 12


def test_points_between_which_events_lie_do_as_well(folder: Path, read_from: list[int]) -> None:
    change(folder, "DELETE FROM carried_rows WHERE seq % 3 <> 0")
    assert len(seqs_of(folder)) > 10
    assert compare_all(folder, read_from) >= 12


def test_all_points_are_what_the_events_come_to(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with JournalReader.open(folder) as reader, reader.transaction() as run:
        assert list(verify(run)) == []
    assert journal_info.verify(folder) == 0
    assert capsys.readouterr().out == "0 findings\n"


OTHER_ROWS = (
    "UPDATE carried_rows SET"
    " body = replace(body, '\"num_prompt_tokens\":', '\"num_prompt_tokens\":1')"
    " WHERE seq = (SELECT max(seq) FROM carried_rows WHERE body LIKE '%num_prompt_tokens%')"
)
OTHER_STATE = (
    "UPDATE snapshots SET body = (SELECT body FROM snapshots ORDER BY seq LIMIT 1)"
    " WHERE seq = (SELECT max(seq) FROM snapshots)"
)


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        (
            OTHER_ROWS,
            "carried_rows: seq {} is not what all events come to",
        ),
        (
            "UPDATE carried_rows SET body = '{' WHERE seq = (SELECT max(seq) FROM carried_rows)",
            "carried_rows: seq {} is not what all events come to",
        ),
        (
            OTHER_STATE,
            "snapshots: seq {} is not what all events come to",
        ),
        ("INSERT INTO carried_rows VALUES (99999, '{}')", "carried_rows: rows of no event: 1"),
    ],
)
def test_a_point_that_says_something_else_is_found(
    folder: Path, capsys: pytest.CaptureFixture[str], statement: str, says: str
) -> None:
    change(folder, statement)
    assert journal_info.verify(folder) == 1
    words = capsys.readouterr().out.splitlines()
    assert words[-1] == "1 findings"
    assert words[0] in {says.format(seq) for seq in seqs_of(folder)}


def test_a_point_that_cannot_be_read_is_one_line(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(folder, "UPDATE snapshots SET body = x'c1'")
    wanted = export.Wanted(request=f"req_{5:026}")
    assert export.run(folder, tmp_path / "one.db", wanted) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert "what is kept of an earlier state cannot be read" in err
    assert journal_info.verify(folder) == 1
    assert "cannot be read" in capsys.readouterr().out


def test_many_snapshots_are_shown_in_a_few_words(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    seqs = seqs_of(folder)
    assert journal_info.info(folder, as_json=False) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    with JournalReader.open(folder) as reader, reader.transaction() as run:
        count, first, last = run("SELECT count(*), min(seq), max(seq) FROM snapshots").one()
    assert count >= len(seqs)
    assert shown["snapshots"] == f"{count}, seq {first} to {last}"


@pytest.mark.parametrize("digest", ["tools.export.code_digest", "journal.points.rows_digest"])
def test_a_point_of_other_code_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch, digest: str
) -> None:
    window = export.Window(through_seq=seqs_of(folder)[-2], until_seq=10**9, what="some")
    with JournalReader.open(folder) as reader:
        assert export.state_before(reader, window)[0].seq == window.through_seq
        monkeypatch.setattr(digest, lambda: "of other code")
        state, point = export.state_before(reader, window)
    assert (state.seq, point) == (0, None)
    assert journal_info.verify(folder) == 0


def test_a_shortened_journal_keeps_the_points_of_what_stays(
    folder: Path, read_from: list[int]
) -> None:
    before = seqs_of(folder)
    with JournalReader.open(folder) as reader:
        last_ns = list(reader.read())[-1].at_ns
    journal = Journal.open(folder)
    through_seq = journal.compaction_point(last_ns, 0, 1)
    assert through_seq is not None
    through_seq = before[len(before) // 2]
    state, _ = state_at(folder, through_seq)
    journal.begin_compaction(through_seq, export.STATE_VERSION, state)
    while not journal.advance_compaction():
        pass
    journal.close()
    assert seqs_of(folder) == [seq for seq in before if seq > through_seq]
    assert journal_info.verify(folder) == 0
    assert compare_all(folder, read_from) > 10


def state_at(folder: Path, seq: int) -> tuple[dict[str, object], int]:
    """The state of a point as it is carried."""
    window = export.Window(through_seq=seq, until_seq=seq + 1, what="some")
    with JournalReader.open(folder) as reader:
        state, _ = export.state_before(reader, window)
    version, carried = export.Before(state).carried()
    return carried, version


def test_a_journal_that_was_shortened_whole_has_none(folder: Path) -> None:
    assert compact.run(folder, compact.Kept(days=0, num_bytes=10**9)) == 0
    with JournalReader.open(folder) as reader:
        first = next(reader.read()).seq
    assert all(seq > first for seq in seqs_of(folder))
    assert journal_info.verify(folder) == 0


def test_few_points_are_kept_over_all_of_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("journal.points.POINT_EVENTS", 10)
    monkeypatch.setattr("journal.points.KEPT_POINTS", 8)
    steps = Steps(Journal.open(tmp_path))
    steps.start()
    steps.receive(1)
    steps.join(1)
    for _ in range(500):
        seq = steps.decode({1: [11]})[-1].seq
        steps.journal.save_snapshot(seq, 1, "code", b"x" * 100)
    kept, seq = seqs_of(tmp_path), steps.journal.last_seq
    assert len(kept) == 8
    assert seq - kept[-1] < 10
    gaps = [later - one for one, later in pairwise([0, *kept])]
    assert max(gaps) <= 4 * seq // 8
    with JournalReader.open(tmp_path) as reader, reader.transaction() as run:
        snapshots = {found for (found,) in run("SELECT seq FROM snapshots").fetchall()}
    assert snapshots == {*kept, seq - 1, seq}
    steps.journal.close()


def test_large_points_are_fewer_and_the_newest_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("journal.points.POINT_EVENTS", 1)
    monkeypatch.setattr("journal.points.EVENT_BYTES", 10**6)
    monkeypatch.setattr("journal.points.POINTS_BYTES", 1_000)
    steps = Steps(Journal.open(tmp_path))
    steps.start()
    for number in range(1, 20):
        seq = steps.receive(number)[-1].seq
        steps.journal.save_snapshot(seq, 1, "code", b"x" * 300)
        assert seqs_of(tmp_path)[-1] == seq
        assert len(seqs_of(tmp_path)) <= 3
    steps.journal.save_snapshot(steps.receive(20)[-1].seq, 1, "code", b"x" * 5_000)
    assert len(seqs_of(tmp_path)) == 1
    steps.journal.close()


def test_a_large_state_becomes_a_point_more_rarely(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("journal.points.POINT_EVENTS", 10)
    steps = Steps(Journal.open(tmp_path))
    steps.start()
    for number in range(1, 100):
        seq = steps.receive(number)[-1].seq
        steps.journal.save_snapshot(seq, 1, "code", b"x" * 8 * 60)
    gaps = [later - one for one, later in pairwise([0, *seqs_of(tmp_path)])]
    assert min(gaps) >= 60
    assert len(gaps) >= steps.journal.last_seq // 65
    steps.journal.close()


def test_what_was_carried_into_a_journal_is_no_point(tmp_path: Path) -> None:
    steps = Steps(Journal.open(tmp_path))
    steps.start()
    steps.receive(1)
    through_seq = steps.receive(2)[-1].seq
    steps.journal.begin_compaction(through_seq, 1, {})
    while not steps.journal.advance_compaction():
        pass
    steps.journal.close()
    assert seqs_of(tmp_path) == []


def test_the_digest_covers_what_makes_the_rows() -> None:
    core = {Path(path).stem for path in CORE if path.startswith("journal/")}
    apart = core | {"database", "statements"}
    seen: set[str] = set()
    left = {"rebuild"}
    while left:
        name = left.pop()
        seen.add(name)
        left |= imported(name) - apart - seen
    assert {f"{name}.py" for name in seen} == set(points.ROWS_CODE)
    assert points.rows_digest() != EMPTY.code_digest


def imported(name: str) -> set[str]:
    """The modules of the journal that one of them imports."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            parent, _, child = node.module.partition(".")
            if parent == "journal":
                found |= {child} if child else {alias.name for alias in node.names}
    return found
