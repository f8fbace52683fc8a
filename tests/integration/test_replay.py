"""`fermata replay` finds what differs, and nothing else."""

import re
import subprocess
import sys
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import pytest

from journal import events
from journal.events import AnyEvent, Record
from scheduler.engine.fake_row import Failure
from scheduler.policy import POLICY_VERSION
from scheduler.replay import Divergence, Replay
from tests.histories import simulated
from tests.loop_driver import LoopDriver, settings_of
from tests.unit.kv_driver import busy_with_blocks
from tools import replay as command

LONG = "a prompt of many chunks " * 20


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """A journal in which there is something of everything."""
    driver = LoopDriver(settings=settings_of(scheduler__max_rows=2, scheduler__chunk_tokens=100))
    driver.engine.failures = [Failure(2, "decode", at=3)]
    streams = [driver.submit(text, 20) for text in ("a", LONG, "c", "d")]
    driver.run_until(lambda: len(streams[1].tokens) > 5)
    driver.restart()
    driver.sensors.wish(events.CancelRequested(request_id=streams[3].request_id))
    driver.submit("too much", 10**6)
    driver.run_until_idle()
    return list(driver.journal.read())


@pytest.fixture(scope="module")
def held_records() -> list[list[Record]]:
    """Journals of servers that were short of memory: of all that they did about it."""
    stories = (simulated.every_rung, simulated.emergency_alone, simulated.crash_while_paused)
    return [list(story().journal.read()) for story in stories]


def divergences(records: list[Record]) -> list[Divergence]:
    return list(Replay(records).divergences())


def changed(records: list[Record], place: int, event: AnyEvent) -> list[Record]:
    """The journal with another event at this place."""
    record = msgspec.structs.replace(records[place], event=event)
    return [*records[:place], record, *records[place + 1 :]]


def place_of(records: list[Record], kind: type[AnyEvent], nth: int = 0) -> int:
    """Where the nth event of a kind is."""
    return [i for i, record in enumerate(records) if isinstance(record.event, kind)][nth]


def test_an_unchanged_journal_comes_out_the_same(
    records: list[Record], held_records: list[list[Record]]
) -> None:
    journals = [records, busy_with_blocks().records, *held_records]
    for played in journals:
        replay = Replay(played)
        assert list(replay.divergences()) == []
        assert replay.num_steps == played[-1].step
        assert replay.num_decisions == sum(record.source == "decision" for record in played)
    kinds = {type(r.event) for r in chain(*journals) if r.source == "decision"}
    assert kinds == set(events.DECISIONS)


@pytest.mark.parametrize(
    ("kind", "change"),
    [
        (events.PrefillChunkDone, {"length": 17}),
        (events.RequestReceived, {"max_tokens": 19}),
        (events.EngineFailed, {"error": "another error", "number": 1, "request_id": "req_x"}),
        (events.CancelRequested, {"request_id": "req_x"}),
    ],
)
def test_a_changed_fact_is_found(
    records: list[Record], kind: type[AnyEvent], change: dict[str, object]
) -> None:
    place = place_of(records, kind)
    event = msgspec.structs.replace(records[place].event, **change)
    found = divergences(changed(records, place, event))
    assert found
    assert found[0].step == records[place].step


def test_a_changed_decision_is_found_where_it_is(records: list[Record]) -> None:
    place = place_of(records, events.RequestQueued)
    event = msgspec.structs.replace(records[place].event, num_waiting=99)
    [found] = divergences(changed(records, place, event))
    assert found.step == records[place].step, "the recorded decision is folded: it stands alone"
    assert found.problem == ""
    assert event in found.recorded
    assert records[place].event in found.expected


def test_a_record_that_cannot_be_folded_ends_the_replay(records: list[Record]) -> None:
    place = place_of(records, events.BatchChanged)
    event = msgspec.structs.replace(records[place].event, joined=(77,), numbers=(77,))
    found = divergences(changed(records, place, event))
    assert "cannot be folded" in found[-1].problem
    assert found[-1].step == records[place].step


def test_a_fact_that_makes_no_sense_ends_the_replay(records: list[Record]) -> None:
    place = next(
        i
        for i, record in enumerate(records)
        if isinstance(record.event, events.TokensDecoded) and records[i + 1].step > record.step
    )
    event = msgspec.structs.replace(records[place].event, counts=(1, 1, 1, 1))
    [found] = divergences(changed(records, place, event))
    assert found.expected == found.recorded == (), "there was nothing to decide"
    assert "cannot be folded" in found.problem


def test_another_constant_in_the_policy_is_found(
    records: list[Record], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.admission.MAX_ADMISSIONS", 1)
    assert divergences(records)


def test_runs_of_another_policy_are_told_apart(
    records: list[Record], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("scheduler.admission.MAX_ADMISSIONS", 1)
    monkeypatch.setattr("scheduler.replay.POLICY_VERSION", 99)
    assert all(divergence.of_other_policy for divergence in divergences(records))
    assert command.print_replay(Replay(records)) == 3
    monkeypatch.setattr("scheduler.admission.MAX_ADMISSIONS", 32)
    assert command.print_replay(Replay(records)) == 0
    assert f"by policy {POLICY_VERSION}" in capsys.readouterr().out


def test_the_command_prints_each_divergence_and_the_counts(
    records: list[Record], capsys: pytest.CaptureFixture[str]
) -> None:
    place = place_of(records, events.RequestQueued)
    event = msgspec.structs.replace(records[place].event, num_waiting=99)
    assert command.print_replay(Replay(changed(records, place, event))) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"run 1, step {records[place].step}:"
    assert '"num_waiting":99' in lines[1]
    assert '"num_waiting":0' in lines[2]
    steps = records[-1].step
    decisions = sum(record.source == "decision" for record in records)
    assert lines[3:] == [
        "  they differ in num_waiting",
        f"{steps} steps, {decisions} decisions, 1 divergences",
    ]


def test_the_command_shows_which_rung_comes_out_differently(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replay = Replay(simulated.every_rung().journal.read())
    monkeypatch.setattr("scheduler.relief.MAX_COOLED", 1)
    assert command.print_replay(replay) == 1
    head, recorded, expected, fields, counts = capsys.readouterr().out.splitlines()
    assert head.startswith("run 1, step ")
    assert recorded.startswith('  recorded {"kind":"tier_shrunk"')
    assert expected.startswith('  expected {"kind":"tier_shrunk"')
    assert len(expected) < len(recorded)
    assert fields == "  they differ in hashes, freed_bytes"
    assert counts.endswith(" decisions, 1 divergences")


def test_a_decision_that_would_come_before_others_is_shown_alone(
    held_records: list[list[Record]],
) -> None:
    for records in held_records:
        step = records[place_of(records, events.PauseStarted)].step
        decided: Any = [r.event for r in records if r.step == step and r.source == "decision"]
        assert len(decided) >= 3
        shorter = tuple(decided[1:])
        found = Divergence(1, step, POLICY_VERSION, expected=tuple(decided), recorded=shorter)
        shown = [line.split('"')[0] for line in command.lines_of(found)]
        assert shown == [f"run 1, step {step}:", "  recorded nothing", "  expected {"]


def run_command(*arguments: str) -> tuple[int, str, str]:
    result = subprocess.run(
        (sys.executable, "-c", "from tools.cli import main; main()", "replay", *arguments),
        capture_output=True,
        text=True,
        check=False,
    )
    return result.returncode, result.stdout, result.stderr


@pytest.mark.parametrize("name", ["", "journal.db"])
def test_the_command_reads_a_folder_or_a_file(state_folder: Path, name: str) -> None:
    driver = LoopDriver(state_folder)
    driver.submit("hello", 5)
    driver.run_until_idle()  # the journal stays open: it is read beside its writer
    status, out, err = run_command(str(state_folder / name))
    assert (status, err) == (0, "")
    assert re.fullmatch(r"\d+ steps, \d+ decisions, 0 divergences\n", out)
    driver.journal.close()


def test_no_journal_is_status_2(tmp_path: Path) -> None:
    status, out, err = run_command(str(tmp_path))
    assert (status, out) == (2, "")
    assert err.startswith("fermata replay: ")
    assert err.count("\n") == 1
