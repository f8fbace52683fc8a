"""Recorded journals come out the same: what the scheduler decided then, it decides now."""

import sqlite3
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from journal import events
from journal.events import AnyEvent, Record, ServerStarted
from scheduler.policy import POLICY_VERSION
from scheduler.replay import Divergence, Replay
from scheduler.request import Phase
from tests.histories import served, simulated
from tests.histories.keeping import SIDE_TABLES, history_files, keep, read, upgraded
from tests.histories.record import COMMAND, MAX_PLAYS, NAMES, record, records_of
from tests.loop_driver import LoopDriver
from tools import replay as command

MAX_BYTES = 224 * 1024
FILES = history_files()
DROPS = {"emergency_alone": "alone", "disk_full_while_pausing": "disk_full"}
ABOUT_CLIENTS = {
    "clients_come_back": {
        *("adopted by content, client_gone", "adopted by key, client_gone", "adopted by key, None"),
        *("RequestRejected key_reused", "RequestCancelled client_gone", "ClientAttached"),
        *("PauseStarted client_gone", "RequestPaused client_gone", "RequestFinished length"),
    },
    "found_by_starts": {
        *("adopted by content, restart", "RequestCancelled nobody_attached"),
        *("RequestCancelled on_restart", "ReleaseRequested", "RequestFinished length"),
    },
    "drained": {
        *("DrainEnded", "PauseStarted drain", "RequestPaused drain", "RequestResumed"),
        *("ServerStopping SIGTERM", "RequestFinished length"),
    },
}
"""What each of these stories is for."""
CRASHES = {"crash_while_pausing": Phase.PAUSING, "crash_while_paused": Phase.PAUSED}

IF_MEANT = (
    "If that is meant, raise POLICY_VERSION in scheduler/policy.py and record the histories anew:"
    f" `{COMMAND}`."
)
RECORD_ANEW = f"Record them with `{COMMAND}`, or let a story in tests/histories come to it."


def path_of(name: str) -> Path:
    """Where the history of this name is kept."""
    [file] = [file for file in FILES if file.stem == name]
    return file


def faults(records: list[Record]) -> list[Divergence]:
    """What may not be: a run of this policy that is decided differently, or a record of any policy
    that cannot be folded.
    """
    found = Replay(records).divergences()
    return [each for each in found if each.problem or not each.of_other_policy]


def say(name: str, found: list[Divergence]) -> str:
    """What a failure says: where, what, and what to do."""
    lines = [f"{name}: {len(found)} steps are decided differently, or cannot be folded."]
    for divergence in found[:3]:
        lines += command.lines_of(divergence)
    return "\n".join([*lines, IF_MEANT])


def missing_kinds(journals: list[list[Record]]) -> list[str]:
    """Decisions that were never taken under this policy."""
    seen: set[type[AnyEvent]] = set()
    for records in journals:
        policy_version = 0
        for each in records:
            if isinstance(each.event, ServerStarted):
                policy_version = each.event.policy_version
            if policy_version == POLICY_VERSION:
                seen.add(type(each.event))
    return sorted(kind.__name__ for kind in events.DECISIONS if kind not in seen)


def test_each_story_is_kept() -> None:
    assert [file.stem for file in FILES] == sorted(NAMES), RECORD_ANEW


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_history_is_decided_the_same_again(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = faults(read(file))
    assert not found, say(file.stem, found)
    with upgraded(file) as copy:
        assert command.run(copy, command.Wanted()) in (command.SAME, command.OTHER_POLICY)
    assert capsys.readouterr().out.splitlines()[-1].startswith(f"{read(file)[-1].step} steps, ")


def test_every_kind_of_decision_is_in_a_history_of_this_policy() -> None:
    missing = missing_kinds([read(file) for file in FILES])
    assert not missing, f"no history of policy {POLICY_VERSION} has {missing}. {RECORD_ANEW}"


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_history_is_one_small_file_without_what_was_asked_or_said(file: Path) -> None:
    assert file.stat().st_size <= MAX_BYTES
    assert [path.name for path in file.parent.glob(f"{file.name}*")] == [file.name]
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
        for table in SIDE_TABLES:
            assert database.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,), table
        assert database.execute("PRAGMA journal_mode").fetchone() == ("delete",)
    starts = [each.event for each in read(file) if isinstance(each.event, ServerStarted)]
    assert {(start.platform, start.process_id) for start in starts} == {("", 1)}
    assert {start.configuration["state"] for start in starts} == {"state"}


@pytest.mark.parametrize("name", DROPS)
def test_a_history_drops_kv_for_its_reason(name: str) -> None:
    drops = [r.event for r in read(path_of(name)) if isinstance(r.event, events.KvDropped)]
    assert DROPS[name] in {drop.reason for drop in drops}


@pytest.mark.parametrize("name", ABOUT_CLIENTS)
def test_a_history_shows_what_becomes_of_clients(name: str) -> None:
    events_of = [each.event for each in read(path_of(name))]
    assert {words_of(event) for event in events_of} >= ABOUT_CLIENTS[name]


def words_of(event: AnyEvent) -> str:
    """The kind of an event, and the one word that explains it."""
    match event:
        case events.RequestAdopted():
            return f"adopted by {event.by}, {event.orphaned_by}"
        case _:
            return f"{type(event).__name__} {getattr(event, 'reason', '')}".strip()


@pytest.mark.parametrize("name", CRASHES)
def test_a_history_crashes_in_its_phase_and_goes_on(name: str) -> None:
    records = read(path_of(name))
    begun, held = events.PauseStarted, events.RequestPaused
    before = [type(r.event) for r in records if r.run_id == 1]
    after = [type(r.event) for r in records if r.run_id == 2]
    assert before.count(begun) == 1
    assert before.count(held) == int(CRASHES[name] is Phase.PAUSED)
    assert events.ServerStopping not in before
    assert after.count(events.RequestResumed) == 1
    assert after.count(events.RequestFinished) == 2


# When the policy changes


def test_a_policy_that_decides_otherwise_is_told_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records = list(simulated.every_rung().journal.read())
    monkeypatch.setattr("scheduler.relief.MAX_COOLED", 1)
    found = faults(records)
    text = say("every_rung", found)
    assert "tier_shrunk  recorded" in text
    assert "they differ in hashes, freed_bytes" in text
    assert "raise POLICY_VERSION" in text
    assert COMMAND in text
    monkeypatch.setattr("scheduler.replay.POLICY_VERSION", POLICY_VERSION + 1)
    assert faults(records) == [], "a run of an older policy may differ"


def test_histories_of_an_older_policy_are_no_cover_for_this_one() -> None:
    records = list(simulated.every_rung().journal.read())
    older = [with_policy(each, POLICY_VERSION - 1) for each in records]
    assert "TierShrunk" not in missing_kinds([records])
    assert missing_kinds([older]) == sorted(kind.__name__ for kind in events.DECISIONS)


def with_policy(each: Record, policy_version: int) -> Record:
    if not isinstance(each.event, ServerStarted):
        return each
    event = msgspec.structs.replace(each.event, policy_version=policy_version)
    return msgspec.structs.replace(each, event=event)


# Recording


def test_a_simulated_story_is_recorded_the_same_twice(tmp_path: Path) -> None:
    said: list[str] = []
    for part in ("one", "two"):
        (tmp_path / part).mkdir()
        record(("emergency_alone",), tmp_path / part, said.append)
    one, two = (tmp_path / part / "emergency_alone.db" for part in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
    assert said[0].startswith("emergency_alone.db: ")


def test_a_story_in_real_time_is_played_until_it_shows_what_it_is_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plays: list[Path] = []

    def play(folder: Path) -> None:
        plays.append(folder)
        LoopDriver(folder).journal.close()
        served.expect(len(plays) == 3, "it is not the third time")

    monkeypatch.setitem(served.STORIES, "never_fits", play)
    assert records_of("never_fits")
    assert len(set(plays)) == 3
    with pytest.raises(served.Uneventful, match="not the third"):
        records_of("never_fits")
    assert len(plays) == 3 + MAX_PLAYS


def test_what_is_kept_is_what_was_recorded(tmp_path: Path) -> None:
    file = tmp_path / "kept.db"
    journal = simulated.crash_while_paused().journal
    keep(journal.read(), file)
    assert [path.name for path in tmp_path.iterdir()] == ["kept.db"]
    kept, recorded = read(file), list(journal.read())
    assert [each.event for each in kept if not isinstance(each.event, ServerStarted)] == [
        each.event for each in recorded if not isinstance(each.event, ServerStarted)
    ]
    assert [(r.seq, r.run_id, r.step, r.at_ns, r.source) for r in kept] == [
        (r.seq, r.run_id, r.step, r.at_ns, r.source) for r in recorded
    ]
