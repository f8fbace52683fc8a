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
from scheduler.recovery import code_digest
from scheduler.replay import Divergence, Replay
from tests.histories import simulated
from tests.loop_driver import LoopDriver, settings_of
from tests.unit.kv_driver import busy_with_blocks
from tools import replay as command
from tools.replay_life import life_of
from tools.replay_text import lines_of, lines_of_life

LONG = "a prompt of many chunks " * 20


@pytest.fixture(scope="module")
def records() -> list[Record]:
    """A journal in which there is something of everything."""
    driver = LoopDriver(settings=settings_of(scheduler__max_rows=2, scheduler__chunk_tokens=100))
    driver.engine.failures = [Failure(2, "decode", at=3)]
    streams = [driver.submit(text, 20, content_digest=text) for text in ("a", LONG, "c", "d")]
    driver.run_until(lambda: len(streams[1].tokens) > 5)
    driver.restart()
    driver.sensors.wish(events.CancelRequested(request_id=streams[3].request_id))
    driver.submit("too much", 10**6)
    driver.submit("c", 20, content_digest="c")  # its client comes back
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
    assert f"recorded by policy {POLICY_VERSION}, code " in capsys.readouterr().out
    monkeypatch.setattr("tools.replay.POLICY_VERSION", 99)
    assert command.print_replay(Replay(records)) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"recorded under policy {POLICY_VERSION}, decided by 99"
    assert command.print_replay(Replay(records), command.Wanted(as_json=True)) == 0
    report = msgspec.json.decode(capsys.readouterr().out)
    assert (report["recorded_policy_versions"], report["policy_version"]) == ([POLICY_VERSION], 99)
    monkeypatch.setattr("tools.replay.POLICY_VERSION", POLICY_VERSION)
    assert command.print_replay(Replay(records)) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_the_command_prints_each_divergence_and_the_counts(
    records: list[Record], capsys: pytest.CaptureFixture[str]
) -> None:
    place = place_of(records, events.RequestQueued)
    event = msgspec.structs.replace(records[place].event, num_waiting=99)
    assert command.print_replay(Replay(changed(records, place, event))) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"run 1, step {records[place].step}, at ")
    assert lines[1].startswith(f"  recorded by policy {POLICY_VERSION}, code ")
    assert lines[2] == f"  expected by policy {POLICY_VERSION}, code {code_digest()[:12]}"
    assert lines[3].split() == ["request_queued", "recorded", "expected"]
    assert [line.split() for line in lines if line.startswith("  *")] == [
        ["*", "num_waiting", "99", "0"]
    ]
    assert "  they differ in num_waiting" in lines
    state = lines[lines.index("  decided on:") + 1 : -1]
    assert state[0].startswith(f"    step {records[place].step} of run 1, at ")
    assert state[2].startswith("    requests: ")
    steps = records[-1].step
    decisions = sum(record.source == "decision" for record in records)
    assert lines[-1] == f"{steps} steps, {decisions} decisions, 1 divergences"


def test_the_command_shows_which_rung_comes_out_differently(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replay = Replay(simulated.every_rung().journal.read())
    monkeypatch.setattr("scheduler.relief.MAX_COOLED", 1)
    assert command.print_replay(replay) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[3].split() == ["tier_shrunk", "recorded", "expected"]
    assert [line.split()[1] for line in lines if line.startswith("  *")] == [
        "hashes",
        "freed_bytes",
    ]
    assert "  they differ in hashes, freed_bytes" in lines
    assert any("used and reserved, of" in line for line in lines), "the state that led there"
    assert lines[-1].endswith(" decisions, 1 divergences")


def test_a_decision_that_would_come_before_others_is_shown_alone(
    held_records: list[list[Record]],
) -> None:
    for records in held_records:
        step = records[place_of(records, events.PauseStarted)].step
        decided: Any = [r.event for r in records if r.step == step and r.source == "decision"]
        assert len(decided) >= 3
        shorter = tuple(decided[1:])
        found = Divergence(1, step, POLICY_VERSION, expected=tuple(decided), recorded=shorter)
        shown = [line.split('"')[0] for line in lines_of(found)]
        assert shown[3:] == ["  recorded nothing", "  expected {"]


def test_a_life_is_what_the_journal_says_of_one_request(records: list[Record]) -> None:
    life = life_of(iter(records), f"req_{2:026}")
    phases = [moment.phase for moment in life.moments]
    kinds = [moment.kind for moment in life.moments]
    assert kinds[:3] == ["request_received", "request_queued", "request_admitted"]
    assert kinds[-2:] == ["request_finished", "kv_freed"]
    assert phases[-2:] == ["finished", "finished"]
    assert kinds.count("server_started") == 1, "the restart put it back into the queue"
    assert phases[kinds.index("server_started")] == "waiting"
    assert sum(moment.num_tokens for moment in life.moments) == 20
    assert sum(moment.num_steps for moment in life.moments) == 20
    starts = [m.numbers["start"] for m in life.moments if m.kind == "prefill_chunk_planned"]
    assert starts[0] == 0
    text = lines_of_life(life)
    assert len(text) == len(kinds) + 2
    assert "request_finished" in text[-2]


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


def test_the_state_at_a_step_and_a_life_as_text_and_json(state_folder: Path) -> None:
    driver = LoopDriver(state_folder)
    stream = driver.submit("hello", 5)
    driver.run_until(lambda: len(stream.tokens) == 2)
    step = driver.state.step
    driver.run_until_idle()
    last = driver.state.step
    status, out, _ = run_command(str(state_folder), "--until", str(step), "--show")
    assert status == 0
    assert "requests: 1 decoding; batch 1 of 1 rows" in out
    assert f"{step} steps, " in out.splitlines()[-1]
    status, out, _ = run_command(str(state_folder), "--until", str(step), "--show", "--json")
    shown = msgspec.json.decode(out)
    assert (shown["steps"], shown["divergences"]) == (step, [])
    assert shown["state"]["requests"][0]["num_output_tokens"] == 2
    status, out, _ = run_command(str(state_folder), "--request", "000", "--json")
    assert msgspec.json.decode(out)["moments"][-1]["phase"] == "finished"
    status, out, _ = run_command(str(state_folder), "--request", "000", "--until", str(step))
    assert status == 0
    assert re.search(r" decoding +fact +tokens_decoded +2 tokens in 2 steps\n$", out)
    for wrong in (
        *(("--until", str(last + 1)), ("--until", "0"), ("--request", "req_x")),
        *(("--request", "000", "--until", text) for text in (str(last + 1), "0", "1")),
    ):
        status, out, err = run_command(str(state_folder), *wrong)
        assert (status, out) == (2, ""), wrong
        assert err.startswith("fermata replay: ")
        assert err.count("\n") == 1
    driver.journal.close()


def test_no_journal_is_status_2(tmp_path: Path) -> None:
    status, out, err = run_command(str(tmp_path))
    assert (status, out) == (2, "")
    assert err.startswith("fermata replay: ")
    assert err.count("\n") == 1
