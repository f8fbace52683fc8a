"""`fermata journal export` and `compact`: a part that stands alone, and a journal made shorter."""

import sqlite3
from datetime import UTC, datetime
from pathlib import Path

import pytest

from journal import events
from journal.events import StateCarried
from journal.journal import Journal
from journal.reader import JournalReader
from journal.verify import verify
from scheduler.replay import Replay
from tests.loop_driver import LoopDriver, settings_of
from tools import compact, export

LONG = "a prompt of several chunks " * 20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The journal of a server that died once and was stopped then, with requests that one window or
    the other cuts.
    """
    folder = tmp_path / "state"
    settings = settings_of(scheduler__max_rows=2, scheduler__chunk_tokens=64)
    driver = LoopDriver(folder, settings)
    streams = [driver.submit(text, 12) for text in ("first", LONG, "third", "fourth")]
    driver.run_until(lambda: len(streams[1].tokens) > 3)
    driver.sensors.wish(events.HoldRequested(request_id=streams[1].request_id))
    driver.run_until(lambda: streams[1].request_id in held_ids(driver))
    driver.restart()
    driver.sensors.wish(events.ReleaseRequested(request_id=streams[1].request_id))
    driver.run_until_idle()
    driver.submit("last", 4)
    driver.run_until_idle()
    driver.journal.close()
    return folder


def held_ids(driver: LoopDriver) -> list[str]:
    return [driver.state.requests[number].request_id for number in driver.state.paused]


def findings(file: Path) -> list[str]:
    with JournalReader.open(file) as reader, reader.transaction() as run:
        return list(verify(run))


def step_times(folder: Path) -> list[tuple[int, int]]:
    """(step, time) of all steps."""
    with JournalReader.open(folder) as reader:
        return sorted({(record.step, record.at_ns) for record in reader.read()})


def iso(at_ns: int) -> str:
    """A time as the command takes it, to the microsecond."""
    return f"{datetime.fromtimestamp(at_ns / 1e9, UTC):%Y-%m-%dT%H:%M:%S.%f}"


def exported(folder: Path, file: Path, wanted: export.Wanted) -> Path:
    assert export.run(folder, file, wanted) == export.DONE
    return file


def windows(folder: Path) -> list[export.Wanted]:
    """From several steps on, to several, and one request's life."""
    times = step_times(folder)
    moments = [iso(times[len(times) * share // 7][1]) for share in range(1, 7)]
    since = [export.Wanted(since=moment) for moment in moments]
    until = [export.Wanted(until=moment) for moment in moments[:2]]
    both = [export.Wanted(since=moments[1], until=moments[4])]
    request = [export.Wanted(request=f"req_{2:026}"), export.Wanted(request=f"req_{5:026}")]
    return [export.Wanted(), *since, *until, *both, *request]


def test_each_window_is_a_sound_journal_that_is_decided_the_same_again(
    folder: Path, tmp_path: Path
) -> None:
    before = (folder / "journal.db").read_bytes()
    with JournalReader.open(folder) as reader:
        whole = {record.seq: record for record in reader.read()}
    for number, wanted in enumerate(windows(folder)):
        file = exported(folder, tmp_path / f"{number}.db", wanted)
        assert findings(file) == [], wanted
        with JournalReader.open(file) as reader:
            records = list(reader.read())
        first = records[0]
        if isinstance(first.event, StateCarried):
            assert first.seq == first.event.through_seq
            assert whole[first.seq].step < records[1].step, "it begins with a step"
            records = records[1:]
        assert records, wanted
        assert records == [whole[record.seq] for record in records]
        last = records[-1].seq
        assert last == max(whole) or whole[last + 1].step > records[-1].step
        assert list(Replay([first, *records[first is records[0] :]]).divergences()) == []
    assert (folder / "journal.db").read_bytes() == before, "the input is never written to"


def test_a_bundle_holds_no_tokens_unless_they_are_wanted(folder: Path, tmp_path: Path) -> None:
    bare = exported(folder, tmp_path / "bare.db", export.Wanted())
    full = exported(folder, tmp_path / "full.db", export.Wanted(with_tokens=True))
    with JournalReader.open(folder) as reader:
        prompt = reader.prompt_tokens(f"req_{2:026}")
        output = reader.output_tokens(f"req_{2:026}")
    assert prompt is not None
    assert prompt.tobytes() not in bare.read_bytes()
    with JournalReader.open(bare) as reader:
        assert reader.prompt_tokens(f"req_{2:026}") is None
        assert reader.parameters(f"req_{2:026}") is None
    with JournalReader.open(full) as reader:
        assert reader.prompt_tokens(f"req_{2:026}") == prompt
        assert reader.output_tokens(f"req_{2:026}") == output
        assert reader.parameters(f"req_{2:026}") is not None
    assert findings(full) == []
    assert bare.stat().st_mode & 0o777 == 0o600


def damaged(file: Path, *statements: str) -> list[str]:
    """What verify says of a bundle after somebody has been at it, the missing triggers apart."""
    copy = file.with_name("damaged.db")
    copy.write_bytes(file.read_bytes())
    with sqlite3.connect(copy) as connection:
        for trigger in ("events_never_change", "events_never_go"):
            connection.execute(f"DROP TRIGGER {trigger}")
        for statement in statements:
            assert connection.execute(statement).rowcount != 0
    connection.close()
    return [line for line in findings(copy) if "trigger" not in line]


CHANGE = "UPDATE events SET body = body || ' ' WHERE seq = 40"
LATER = "UPDATE events SET at_ns = at_ns + 1 WHERE seq = (SELECT max(seq) FROM events)"
TAIL = "DELETE FROM events WHERE step = (SELECT max(step) FROM events)"
TAIL_DIGEST = "DELETE FROM step_digest WHERE step = (SELECT max(step) FROM step_digest)"


@pytest.mark.parametrize(
    ("statements", "says"),
    [
        ((CHANGE,), "is not what was exported"),
        ((LATER,), "is not what was exported"),
        ((TAIL,), "steps of"),
        ((TAIL, TAIL_DIGEST), "steps of"),
        (("DELETE FROM bundle",), "0 descriptions"),
    ],
)
def test_a_change_and_a_missing_tail_are_noticed(
    folder: Path, tmp_path: Path, statements: tuple[str, ...], says: str
) -> None:
    file = exported(folder, tmp_path / "bundle.db", export.Wanted())
    found = damaged(file, *statements)
    assert any(line.startswith("bundle: ") and says in line for line in found), found


def test_what_cannot_be_exported_is_one_line_and_leaves_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    taken = tmp_path / "taken.db"
    taken.touch()
    wrong = [
        (taken, export.Wanted()),
        (tmp_path / "none" / "bundle.db", export.Wanted()),
        (tmp_path / "bundle.db", export.Wanted(since="2090-01-01")),
        (tmp_path / "bundle.db", export.Wanted(until="1990-01-01")),
        (tmp_path / "bundle.db", export.Wanted(since="yesterday")),
        (tmp_path / "bundle.db", export.Wanted(request="req_unknown")),
        (tmp_path / "bundle.db", export.Wanted(request="0")),
    ]
    for file, wanted in wrong:
        assert export.run(folder, file, wanted) == export.UNUSABLE
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("fermata journal export: ")
        assert err.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["state", "taken.db"]
    assert export.run(tmp_path, tmp_path / "bundle.db", export.Wanted()) == export.UNUSABLE


def test_the_words_for_a_window_say_all_only_of_all(folder: Path) -> None:
    with JournalReader.open(folder) as reader:
        assert export.window_of(reader, export.Wanted()).what == "all of it"
        assert export.window_of(reader, export.Wanted(since="1d")).what == "since 1d"
        wanted = export.Wanted(since="1d", until="0s")
        assert export.window_of(reader, wanted).what == "since 1d, until 0s"


def test_a_bundle_of_a_bundle_is_one(folder: Path, tmp_path: Path) -> None:
    times = step_times(folder)
    middle = iso(times[len(times) // 2][1])
    first = exported(folder, tmp_path / "first.db", export.Wanted(since=middle))
    second = tmp_path / "second.db"
    assert export.run(first, second, export.Wanted()) == export.DONE
    assert findings(second) == []
    with JournalReader.open(first) as one, JournalReader.open(second) as other:
        assert list(one.read()) == list(other.read())


def test_a_journal_is_shortened_by_hand_and_later_steps_are_decided_the_same(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with JournalReader.open(folder) as reader:
        whole = list(reader.read())
    assert compact.run(folder, compact.Kept(days=0, num_bytes=10**9)) == compact.DONE
    assert "are now one" in capsys.readouterr().out
    with JournalReader.open(folder) as reader:
        left = list(reader.read())
    assert isinstance(left[0].event, StateCarried)
    assert len(left) < len(whole)
    assert findings(folder) == []
    driver = LoopDriver(folder)
    driver.num_requests = 10
    driver.submit("after it", 4)
    driver.run_until_idle()
    assert list(Replay(driver.journal.read()).divergences()) == []
    driver.journal.close()
    assert findings(folder) == []


def test_a_journal_that_is_in_use_is_not_shortened(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = Journal.open(folder)
    assert compact.run(folder, compact.Kept(days=0, num_bytes=0)) == compact.UNUSABLE
    journal.close()
    assert compact.run(tmp_path, compact.Kept(days=0, num_bytes=0)) == compact.UNUSABLE
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("fermata journal compact: ") for line in lines)
