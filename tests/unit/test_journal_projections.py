"""The projections say what happened to each request, run and minute, and can be rebuilt."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from journal.events import (
    BatchChanged,
    CapacityNumbers,
    EngineFailed,
    PrefillChunkCommitted,
    PrefillChunkDone,
    PrefillChunkPlanned,
    RequestAborted,
    RequestCancelled,
    RequestRejected,
    RequestRetried,
    ServerStopping,
)
from journal.journal import Journal
from journal.queries import find_request, select_rows
from journal.rows import MinuteRow, RequestRow, RunRow
from journal.tables import minute, run
from tests.journal_steps import (
    SECOND_NS,
    START_NS,
    Steps,
    admitted,
    received,
    request_id,
    run_of,
    run_sql,
)


@pytest.fixture
def steps(tmp_path: Path) -> Iterator[Steps[Journal]]:
    journal = Journal.open(tmp_path)
    steps = Steps(journal)
    steps.start()
    yield steps
    assert steps.journal.verify() == []
    steps.journal.close()


def reopen(steps: Steps[Journal]) -> None:
    """As after a kill: what the process had in memory is gone."""
    steps.journal.close()
    steps.journal = Journal.open(steps.journal.file)
    steps.batch = ()


def row_of(steps: Steps[Journal], number: int) -> RequestRow:
    row = find_request(run_of(steps.journal), request_id(number))
    assert row is not None
    return row


def runs_of(steps: Steps[Journal]) -> list[RunRow]:
    return select_rows(run_of(steps.journal), run, RunRow, "ORDER BY run_id")


def minutes_of(steps: Steps[Journal]) -> list[MinuteRow]:
    return select_rows(run_of(steps.journal), minute, MinuteRow, "ORDER BY minute")


def at(step: int) -> int:
    """When a step of these tests happens."""
    return START_NS + step * SECOND_NS


def prefill(steps: Steps[Journal], number: int, length: int) -> None:
    """Plans one chunk, and in the next step has it done and committed."""
    name = request_id(number)
    plan = PrefillChunkPlanned(request_id=name, number=number, chunk=1, start=0, length=length)
    steps.commit([received(number)], [admitted(number), plan])
    done = PrefillChunkDone(
        request_id=name,
        chunk=1,
        start=0,
        length=length,
        duration_ns=7,
        peak_bytes=0,
        active_bytes=0,
    )
    steps.commit([done], [PrefillChunkCommitted(request_id=name, num_cached_tokens=length)])


def test_a_request_is_followed_through_its_life(steps: Steps[Journal]) -> None:
    prefill(steps, 1, 2)
    assert row_of(steps, 1).phase == "prefilling"
    joined = BatchChanged(batch=1, numbers=(1,), joined=(1,), left=())
    steps.commit([received(2)], [joined])
    steps.batch = (1,)
    assert row_of(steps, 1).phase == "decoding"
    steps.decode({1: []})
    steps.decode({1: [11]})
    steps.decode({1: [12]})
    steps.finish(1, [13], 3)
    row = row_of(steps, 1)
    assert (row.phase, row.outcome, row.reason) == ("finished", "finished", "length")
    assert (row.received_ns, row.admitted_ns, row.prefill_started_ns) == (at(2), at(2), at(2))
    assert (row.decode_started_ns, row.first_token_ns, row.ended_ns) == (at(4), at(6), at(8))
    assert (row.num_fed_tokens, row.prefill_duration_ns) == (2, 7)
    assert (row.num_memory_tokens, row.num_disk_tokens, row.num_prefilled_tokens) == (0, 0, 3)
    assert (row.num_prompt_tokens, row.num_output_tokens, row.num_cached_tokens) == (3, 3, 0)
    assert (row.run_id, row.ended_run_id, row.num_admissions) == (1, 1, 1)


def test_decode_steps_write_no_row(steps: Steps[Journal]) -> None:
    steps.receive(1)
    steps.join(1)
    steps.decode({1: [11]})
    before = (minutes_of(steps), row_of(steps, 1))
    for token in range(20):
        steps.decode({1: [token]})
    assert (minutes_of(steps), row_of(steps, 1)) == before


def test_a_rejection_keeps_its_numbers(steps: Steps[Journal]) -> None:
    numbers = CapacityNumbers(
        prompt_tokens=3,
        max_tokens=100,
        required_bytes=900,
        capacity_bytes=800,
        weights_bytes=1,
        kv_bytes_per_token=1,
        max_context_tokens=77,
    )
    rejected = RequestRejected(
        request_id=request_id(1),
        reason="context_length_exceeded",
        numbers=numbers,
        num_waiting=4,
    )
    steps.commit([received(1)], [rejected])
    row = row_of(steps, 1)
    assert (row.phase, row.reason, row.num_waiting) == ("rejected", "context_length_exceeded", 4)
    assert (row.required_bytes, row.capacity_bytes, row.max_context_tokens) == (900, 800, 77)


def test_retries_cancellations_and_aborts_are_told_apart(steps: Steps[Journal]) -> None:
    steps.receive(1)
    steps.receive(2)
    steps.join(1, 2)
    name = request_id(1)
    failed = EngineFailed(request_id=name, number=1, during="decode", error="nan")
    steps.commit([failed], [RequestRetried(request_id=name, number=1, retry=1)])
    assert (row_of(steps, 1).phase, row_of(steps, 1).num_retries) == ("waiting", 1)
    aborted = RequestAborted(
        request_id=name, number=1, reason="engine_failed", detail="nan", num_output_tokens=0
    )
    cancelled = RequestCancelled(
        request_id=request_id(2), number=2, reason="client_gone", num_output_tokens=0
    )
    steps.commit([failed], [aborted, cancelled])
    row = row_of(steps, 1)
    assert (row.outcome, row.reason, row.detail) == ("aborted", "engine_failed", "nan")
    assert (row_of(steps, 2).outcome, row_of(steps, 2).reason) == ("cancelled", "client_gone")
    last = minutes_of(steps)[-1]
    assert (last.num_aborted, last.num_cancelled, last.num_finished) == (1, 1, 0)


def test_a_kill_is_charged_to_what_was_in_the_engine(steps: Steps[Journal]) -> None:
    steps.receive(1)
    steps.receive(2)
    steps.join(1)
    last = steps.decode({1: [11]})[-1]
    reopen(steps)
    steps.start()
    decoding, waiting = row_of(steps, 1), row_of(steps, 2)
    assert (decoding.phase, decoding.num_recoveries, decoding.num_deaths) == ("waiting", 1, 1)
    assert (waiting.phase, waiting.num_recoveries, waiting.num_deaths) == ("waiting", 0, 0)
    first, second = runs_of(steps)
    assert (first.ended_by, first.ended_ns) == ("killed", last.at_ns)
    assert (second.run_id, second.ended_by, second.ready_ns) == (2, None, second.started_ns)


def test_a_stop_is_no_death(steps: Steps[Journal]) -> None:
    steps.receive(1)
    steps.join(1)
    stopping = steps.commit([ServerStopping(reason="SIGTERM")])[-1]
    reopen(steps)
    steps.start()
    assert (row_of(steps, 1).num_recoveries, row_of(steps, 1).num_deaths) == (1, 0)
    first = runs_of(steps)[0]
    assert (first.ended_by, first.end_reason) == ("stopped", "SIGTERM")
    assert first.ended_ns == stopping.at_ns


def test_the_first_token_counts_once_and_over_a_kill(steps: Steps[Journal]) -> None:
    steps.receive(1)
    steps.receive(2)
    steps.join(1, 2)
    first = steps.decode({1: [11]})[-1].at_ns
    reopen(steps)
    steps.start()
    steps.join(1, 2)
    second = steps.decode({1: [12], 2: [21]})[-1].at_ns
    again = row_of(steps, 1)
    assert again.first_token_ns == first
    assert (again.admitted_ns, again.decode_started_ns) == (at(4), at(4))
    assert again.num_admissions == 2
    assert row_of(steps, 2).first_token_ns == second


def test_minutes_count_decode_steps_also_over_a_kill(steps: Steps[Journal]) -> None:
    steps.receive(1)
    steps.receive(2)
    steps.join(1, 2)
    for _ in range(30):
        steps.decode({1: [1], 2: [2, 3]})
    reopen(steps)
    steps.start()
    steps.receive(3)
    row = minutes_of(steps)[0]
    assert (row.num_decode_steps, row.num_decode_rows, row.num_output_tokens) == (30, 60, 90)
    assert row.decode_duration_ns == 30 * 11
    assert (row.num_received, row.num_admitted) == (3, 2)


def test_a_minute_is_written_when_it_is_over(steps: Steps[Journal]) -> None:
    steps.receive(1)
    steps.join(1)
    for _ in range(70):
        steps.decode({1: [1]})
    first, second = minutes_of(steps)
    assert second.minute == first.minute + 1
    # The last written state of the second minute is its begin; the rest is in memory.
    assert first.num_decode_steps + second.num_decode_steps <= 70
    steps.receive(2)
    assert sum(row.num_decode_steps for row in minutes_of(steps)) == 70


def test_a_start_reads_open_requests_by_an_index(steps: Steps[Journal]) -> None:
    plan = run_sql(
        steps.journal,
        "EXPLAIN QUERY PLAN SELECT * FROM request WHERE outcome IS NULL ORDER BY number",
    ).fetchall()
    assert "request_open" in plan[0][-1]
