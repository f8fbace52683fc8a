"""Held requests over deaths of the server, over compactions, and under `verify`."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from journal.journal import (
    Journal,
)
from tests.journal_steps import (
    KV_DOMAIN,
    SECOND_NS,
    run_sql,
    server_started,
)
from tests.pause_steps import (
    NUM_CACHED,
    PROMPT,
    A,
    B,
    Held,
    HoldingSteps,
    at,
    chain_pinned,
    chain_saved,
    decoding,
    hold,
    pause_of,
    pause_started,
    phase_of,
    request_paused,
    resume_started,
    sample,
)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    held = decoding(tmp_path)
    yield held
    held.close()


# Another run


def test_a_held_request_is_held_over_a_death(held: Held) -> None:
    hold(held)
    parts = held.parts(1)
    held.kill()
    held("start")
    row = held.requests()[0]
    assert (row.phase, row.num_recoveries, row.num_deaths) == ("paused", 0, 0)
    assert (held.parts(1), [pin.number for pin in held.pins()]) == (parts, [1])
    held("resume", 1, 0, 40, 0)
    pause = pause_of(held)
    assert (pause.run_id, pause.resumed_run_id, pause.outcome) == (1, 2, "resumed")
    assert held.requests()[0].held_ns == 4 * SECOND_NS


def test_one_that_was_going_on_is_held_again(held: Held) -> None:
    hold(held)
    held("decide", resume_started(1, NUM_CACHED, 2))
    held.kill()
    held("start")
    row = held.requests()[0]
    assert (row.phase, row.num_recoveries, row.num_deaths) == ("paused", 1, 1)
    pause = pause_of(held)
    assert (pause.outcome, pause.resume_started_ns, pause.paused_ns) == ("open", None, at(10))


def test_a_pause_whose_tail_was_not_saved_is_none(held: Held) -> None:
    held("begin_pause", 1)
    held.kill()
    held("start")
    assert (phase_of(held), pause_of(held).outcome) == ("waiting", "given_up")
    assert held.parts(1) == (0, 0, 0)
    assert held.requests()[0].num_deaths == 1


def saved_and_killed(held: Held) -> None:
    """The tail is on disk, and the process dies before the chain is pinned."""
    held("begin_pause", 1)
    held("know", chain_saved(1))
    held.kill()


def test_a_pause_that_is_completed_after_a_death_is_one_pause(held: Held) -> None:
    saved_and_killed(held)
    both = (chain_pinned(1, [A, B]), request_paused(1, had_row=False))
    held("commit", [server_started()], both)
    held("ready", KV_DOMAIN)
    pause, row = pause_of(held), held.requests()[0]
    assert (pause.outcome, pause.run_id, pause.started_ns) == ("open", 1, at(8))
    assert (pause.paused_ns, pause.freed_ns) == (at(10), None)
    assert (row.phase, row.num_pauses, row.num_recoveries) == ("paused", 1, 1)
    assert held.pins()[0].domain == KV_DOMAIN


def test_a_pause_that_is_not_completed_after_a_death_waits(held: Held) -> None:
    saved_and_killed(held)
    held("commit", [server_started()])
    assert phase_of(held) == "pausing", "nothing has said yet what becomes of it"
    held("ready", KV_DOMAIN)
    pause = pause_of(held)
    assert (phase_of(held), pause.outcome, pause.ended_ns) == ("waiting", "given_up", at(10))
    assert (held.parts(1), held.requests()[0].num_pauses) == ((0, 0, 0), 0)


def test_the_others_have_time_while_pauses_are_completed(held: Held) -> None:
    held("receive", 2, PROMPT)
    held("join", 2)
    held("decide", pause_started(2))
    held("know", chain_saved(2))
    saved_and_killed(held)
    first = (chain_pinned(2, [A]), request_paused(2, had_row=False))
    held("commit", [server_started()], first)
    held("commit", [sample()], (chain_pinned(1, [A]), request_paused(1, had_row=False)))
    held("ready", KV_DOMAIN)
    assert [pause.outcome for pause in held.pauses()] == ["open", "open"]
    assert (phase_of(held, 1), phase_of(held, 2)) == ("paused", "paused")


def test_one_that_was_not_completed_may_be_held_anew_at_once(held: Held) -> None:
    saved_and_killed(held)
    held("commit", [server_started()], [request_paused(1, "operator", had_row=False)])
    old, new = held.pauses()
    assert (old.outcome, new.outcome, new.from_phase) == ("given_up", "open", "waiting")
    assert held.requests()[0].num_pauses == 1


def test_another_model_has_no_use_for_what_is_pinned(held: Held) -> None:
    hold(held)
    held.kill()
    held("commit", [server_started()])
    held("ready", "e" * 64)
    assert (held.pins(), pause_of(held).dropped, phase_of(held)) == ([], "other_domain", "paused")


# What is kept, and what it costs


def test_open_pauses_and_pins_outlive_a_compaction_and_readings_do_not(held: Held) -> None:
    held("know", sample(500))
    hold(held)
    held.compact()
    assert run_sql(held.file.journal, "SELECT count(*) FROM memory_sample").scalar() == 0
    held.check()
    held("know", sample(700))
    held("resume", 1, 0, 40, 0)
    held.compact()
    held.check()
    assert (pause_of(held).outcome, held.pins()) == ("resumed", [])


def test_a_pause_goes_on_after_a_compaction(held: Held) -> None:
    """Its first token is still under way."""
    held("receive", 2, PROMPT)
    held("join", 2)
    held("begin_pause", 2)
    held.compact()
    held("late_token", 2, 5)
    held("end_pause", 2, [A, B])
    assert held.requests()[1].first_token_ns == at(11)
    assert held.parts(2) == (0, 0, 39)
    assert held.pins()[0].domain == KV_DOMAIN


def test_an_undecided_pause_is_decided_after_a_compaction(held: Held) -> None:
    saved_and_killed(held)
    held("commit", [server_started()])
    held.compact()
    held.check()
    held("ready", KV_DOMAIN)
    assert (phase_of(held), pause_of(held).outcome) == ("waiting", "given_up")


def test_a_reading_is_a_row(held: Held) -> None:
    held("know", sample(510))
    (row,) = run_sql(held.file.journal, "SELECT * FROM memory_sample").fetchall()
    assert tuple(row[1:]) == (1, at(8), 510, 50, 600, 700, 800, 3_000_000, None)


def test_decode_steps_beside_a_held_request_write_an_event_and_their_tokens(held: Held) -> None:
    held("receive", 2, PROMPT)
    held("join", 2)
    hold(held)
    held("decode", {2: [1]})
    journal = held.file.journal
    before = run_sql(journal, "SELECT total_changes()").scalar()
    for token in range(10):
        held.file.decode({2: [token]})
        held.twin.decode({2: [token]})
    assert run_sql(journal, "SELECT total_changes()").scalar() == before + 2 * 10


@pytest.mark.parametrize(
    ("statement", "finding"),
    [
        ("UPDATE pause SET reason = 'x' WHERE outcome <> 'open'", "reason is 'x', rebuilt 'high'"),
        ("UPDATE pause SET freed_bytes = 1 WHERE outcome = 'open'", "freed_bytes is 1, rebuilt"),
        ("DELETE FROM pause WHERE outcome = 'open'", "pin: rows of requests that are not held: 1"),
        ("DELETE FROM pause WHERE outcome <> 'open'", "pause: a row is missing"),
        ("UPDATE pin SET num_blocks = 9", "pin 1: num_blocks is 9, rebuilt 2"),
        ("DELETE FROM pin", "pin: a row is missing"),
        ("UPDATE memory_sample SET active_bytes = 1", "active_bytes is 1, rebuilt 500"),
        ("DELETE FROM memory_sample", "memory_sample: a row is missing"),
        (
            "INSERT INTO memory_sample VALUES (1, 1, 1, 1, 1, 1, 1, 1, 1, 1)",
            "memory_sample: rows of no memory_sampled: 1",
        ),
        ("UPDATE request SET held_ns = 1", "request: rows whose pauses are not those in pause: 1"),
        ("UPDATE minute SET num_resumes = 9", "num_resumes is 9, rebuilt 1"),
    ],
)
def test_verify_finds_what_is_wrong(tmp_path: Path, statement: str, finding: str) -> None:
    steps = HoldingSteps(Journal.open(tmp_path))
    steps.start()
    steps.receive(1, PROMPT)
    steps.join(1)
    steps.know(sample())
    steps.begin_pause(1)
    steps.end_pause(1, [A, B])
    steps.resume(1, 0, 40)
    steps.begin_pause(1)
    steps.end_pause(1, [A, B])
    assert steps.journal.verify() == []
    run_sql(steps.journal, statement)
    findings = steps.journal.verify()
    steps.journal.close()
    assert any(finding in line for line in findings), findings
