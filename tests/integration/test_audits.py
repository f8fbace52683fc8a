"""`fermata audit` as a user runs it: each question, in each format, and what it refuses."""

import csv
import json
import re
import shutil
import sqlite3
import subprocess
import sys
from bisect import bisect
from collections.abc import Iterator
from contextlib import closing
from importlib.resources import files
from io import StringIO
from pathlib import Path

import pytest

from journal import figures, overlap, sums
from journal.happening import EVERYDAY, NUM_DECISIONS, Happening
from journal.journal import Journal
from journal.reader import JournalReader
from journal.span import time_text
from tests.histories.keeping import FOLDER, upgraded
from tests.journal_steps import Steps
from tools import audit_at
from tools.cli import app
from tools.cli_audit import audit_app

AUDITS = {
    "hits": figures.CacheHits,
    "misses": figures.CacheMiss,
    "causes": figures.MissCause,
    "pauses": overlap.PausePart,
    "held": sums.HeldWithin,
    "memory": figures.Reading,
    "orphans": overlap.OrphanPart,
    "first-tokens": figures.FirstTokens,
    "phases": overlap.PhasePart,
    "waits": overlap.WaitPart,
    "throughput": figures.MinuteFigures,
    "writes": sums.RequestWrites,
    "at": Happening,
}
DOCUMENT = files("journal").joinpath("views.md").read_text()
VIEWS, _, DOCUMENTED = DOCUMENT.partition("\n# The audits\n")
HEAVY = ("mlx", "mlx_lm", "mlx_vlm", "fastapi", "transformers", "alembic")


@pytest.fixture(scope="module")
def story() -> Iterator[Path]:
    """Two requests of which each is held once, under every rung of pressure."""
    with upgraded(FOLDER / "every_rung.db") as file:
        yield file


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Status, and what was printed."""
    with pytest.raises(SystemExit) as ended:
        app(["audit", *arguments])
    printed = capsys.readouterr()
    assert isinstance(ended.value.code, int)
    return ended.value.code, printed.out, printed.err


def test_each_audit_is_documented_with_its_view() -> None:
    rows = re.findall(r"^\| ([\w-]+) \| .* \| (?:`(\w+)`)?.* \|$", DOCUMENTED, flags=re.MULTILINE)
    assert [name for name, _ in rows if name not in ("audit",)] == list(AUDITS)
    assert list(AUDITS) == [command.name for command in audit_app.registered_commands]
    assert all(f"## {view}\n" in VIEWS for _, view in rows if view)


@pytest.mark.parametrize("name", AUDITS)
def test_an_audit_says_the_same_in_each_format(
    name: str, story: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fields = list(AUDITS[name].__struct_fields__)
    status, text, _ = run(capsys, name, str(story), "--format", "json")
    objects = json.loads(text)
    assert status == 0
    _, text, _ = run(capsys, name, str(story), "--format", "jsonl")
    assert [json.loads(line) for line in text.splitlines()] == objects
    assert all(list(each) == fields for each in objects)
    assert bool(objects) is (name != "orphans")
    _, text, _ = run(capsys, name, str(story), "--format", "csv")
    assert text.splitlines()[0] == ",".join(fields)
    assert [list(row.values()) for row in csv.DictReader(StringIO(text))] == [
        ["" if value is None else str(value) for value in each.values()] for each in objects
    ]
    _, text, _ = run(capsys, name, str(story))
    assert len(text.splitlines()) >= 1 + len(objects)


@pytest.mark.parametrize("name", [name for name in AUDITS if name not in ("at", "orphans")])
def test_a_span_is_part_of_it(name: str, story: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run(capsys, name, str(story), "--format", "csv")[1].splitlines()
    everything = ("--since", "2000-01-01", "--until", "2100-01-01")
    assert run(capsys, name, str(story), "--format", "csv", *everything)[1].splitlines() == whole
    status, text, _ = run(capsys, name, str(story), "--format", "csv", "--since", "1s")
    assert status == 0
    part = text.splitlines()
    assert len(part) <= len(whole)
    if name in ("waits", "misses", "hits", "first-tokens"):
        assert part == whole[:1], "nothing of that lies in the last second"


def moment(story: Path) -> tuple[str, int]:
    """A time at which both requests are held, as text and as seq."""
    with JournalReader.open(story) as reader, reader.transaction() as run_sql:
        query = "SELECT began_at, seq FROM phases WHERE phase = 'paused' ORDER BY seq DESC LIMIT 1"
        at, seq = run_sql(query).one()
    return at, seq


def test_what_was_happening_at_a_time(story: Path, capsys: pytest.CaptureFixture[str]) -> None:
    at, seq = moment(story)
    _, text, _ = run(capsys, "at", str(story), "--time", f"{at[:-1]}999", "--format", "json")
    rows = json.loads(text)
    by_what = {
        what: [row for row in rows if row["what"] == what]
        for what in ("run", "memory", "request", "decision", "everyday")
    }
    assert sum(map(len, by_what.values())) == len(rows)
    assert [row["name"] for row in by_what["request"]] == ["paused", "paused"]
    assert all(row["age_ms"] >= 0 for row in by_what["request"] + by_what["memory"])
    assert (len(by_what["run"]), len(by_what["memory"])) == (1, 1)
    decisions = [row["seq"] for row in by_what["decision"]]
    with JournalReader.open(story) as reader:
        expected = [
            record.seq
            for record in reader.read()
            if record.source == "decision"
            and type(record.event).__struct_config__.tag not in EVERYDAY
            and getattr(record.event, "reason", "") != "budget"
        ]
    place = bisect(expected, max(row["seq"] for row in by_what["request"]))
    assert expected[place - 1] == seq, "it was decided that the last one is held"
    assert decisions == expected[place - NUM_DECISIONS : place + NUM_DECISIONS]
    assert [row["age_ms"] < 0 for row in by_what["decision"]].index(True) == NUM_DECISIONS
    assert all("[" not in row["detail"] for row in by_what["decision"])
    by_kind = {row["name"]: row["detail"].split()[0] for row in by_what["everyday"]}
    with JournalReader.open(story) as reader:
        end = None if len(decisions) < 2 * NUM_DECISIONS else decisions[-1]
        between = [r.event for r in reader.read(decisions[0] - 1, end)]
    for kind, number in by_kind.items():
        events_of = [
            event
            for event in between
            if type(event).__struct_config__.tag == kind
            and getattr(event, "reason", "budget") == "budget"
        ]
        assert len(events_of) == int(number)
    assert {"block_save_planned", "prefill_chunk_planned"} <= set(by_kind)


def test_after_the_last_event_nothing_is_known(
    story: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with JournalReader.open(story) as reader:
        last = list(reader.read())[-1]
    status, text, error = run(capsys, "at", str(story), "--time", "2030-01-01")
    assert (status, text) == (2, "")
    words = f"the journal ends at {time_text(last.at_ns)}: of later it knows nothing"
    assert error == f"fermata audit: {words}\n"
    assert run(capsys, "at", str(story), "--time", time_text(last.at_ns))[0] == 0


def test_before_the_first_event_nothing_was_happening(
    story: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text, error = run(capsys, "at", str(story), "--time", "2001-01-01")
    assert (status, text) == (2, "")
    assert error == "fermata audit: the journal has no events as early as 2001-01-01\n"
    assert audit_at.at(story, "2001-01-01", "json") == 2


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--since", "2100-01-01"), "nothing of the journal lies in this window (since 2100-01-01"),
        (("--until", "2001-01-01"), "nothing of the journal lies in this window (until 2001-01-01"),
        (("--since", "1s", "--until", "5s"), "this window (since 1s, until 5s)"),
        (("--since", "tomorrow"), "tomorrow is no time: write 2026-01-31T12:00"),
        (("--since", "99999999999999d"), "99999999999999d is no time"),
        (("--until", "0001-01-01T00:00+14:00"), "0001-01-01"),
    ],
)
def test_no_window_is_one_line(
    options: tuple[str, ...], words: str, story: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, text, error = run(capsys, "hits", str(story), *options)
    assert (status, text) == (2, "")
    assert words in error
    assert len(error.splitlines()) == 1


def broken_journals(folder: Path, story: Path) -> dict[str, Path]:
    """What is no journal that can be read."""
    made = {name: folder / f"{name}.db" for name in ("text", "empty", "cut", "newer", "other")}
    made["text"].write_text("not a database" * 100)
    made["empty"].touch()
    made["cut"].write_bytes(story.read_bytes()[: story.stat().st_size // 2])
    shutil.copyfile(story, made["newer"])
    with closing(sqlite3.connect(made["newer"])) as database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
        database.commit()
    with closing(sqlite3.connect(made["other"])) as database:
        database.execute("CREATE TABLE notes (text TEXT)")
    journal = Journal.open(folder / "live")
    Steps(journal).start()
    made["no_log"] = folder / "no_log.db"
    shutil.copyfile(journal.file, made["no_log"])  # its log, with all of it, is left behind
    journal.close()
    return made


def test_what_is_no_journal_is_one_line_and_stays_as_it_is(
    tmp_path: Path, story: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, file in broken_journals(tmp_path, story).items():
        before = file.read_bytes()
        status, text, error = run(capsys, "phases", str(file))
        assert (name, status, text) == (name, 2, "")
        assert len(error.splitlines()) == 1
        assert error.startswith(f"fermata audit: {file}: "), error
        assert file.read_bytes() == before


def test_no_audit_imports_what_is_heavy(story: Path) -> None:
    code = (
        "import sys\nfrom tools.cli import app\n"
        f"for name in {list(AUDITS)!r}:\n"
        "    try:\n        app(['audit', name, sys.argv[1]])\n"
        "    except SystemExit as ended:\n        assert ended.code == 0, name\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    command = (sys.executable, "-c", code, str(story))
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.splitlines()[-1] == "[]"


SHELL = shutil.which("sqlite3")


@pytest.mark.skipif(SHELL is None, reason="the sqlite3 shell is not installed")
def test_every_view_can_be_read_in_the_sqlite3_shell(story: Path) -> None:
    names = re.findall(r"^## (\w+)$", VIEWS, flags=re.MULTILINE)
    queries = "".join(f"SELECT '{name}', count(*) FROM {name};\n" for name in names)
    uri = f"file:{story}?mode=ro"
    done = subprocess.run(
        ("sqlite3", "-bail", "-list", uri),
        input=queries,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert [line.split("|")[0] for line in done.stdout.splitlines()] == names
