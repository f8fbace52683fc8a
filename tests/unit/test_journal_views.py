"""The SQL views are what the document and the typed readers say they are."""

import re
from datetime import datetime
from importlib.resources import files
from pathlib import Path

import msgspec
import pytest

from journal import audit, figures, sums
from journal.events import RequestRejected, ServerStopping
from journal.journal import Journal
from journal.reader import JournalReader
from tests.client_steps import adopts, arrival, gone, started
from tests.journal_steps import (
    KV_DOMAIN,
    LIMITS,
    SECOND_NS,
    START_NS,
    Steps,
    received,
    request_id,
    run_sql,
    server_started,
)
from tests.pause_steps import A, B, HoldingSteps, sample

VIEWS = {
    "requests": audit.RequestFigures,
    "runs": audit.RunFigures,
    "throughput": audit.MinuteFigures,
    "rejections": audit.Rejection,
    "cache_misses": audit.CacheMiss,
    "cache_hits": figures.CacheHits,
    "blocks": audit.BlockFigures,
    "pauses": audit.Pause,
    "pins": audit.Pin,
    "pinned_blocks": audit.PinnedBlock,
    "orphans": audit.Orphan,
    "adoptions": audit.Adoption,
    "memory": audit.Reading,
    "phases": figures.Phase,
    "waits": figures.Wait,
    "disk_writes": figures.DiskWrite,
    "first_tokens": figures.FirstTokens,
    "held_times": figures.HeldTimes,
    "miss_causes": figures.MissCause,
}
DOCUMENT = files("journal").joinpath("views.md").read_text()
DOCUMENTED_VIEWS = DOCUMENT[: DOCUMENT.index("# The audits")]


def documented() -> dict[str, list[str]]:
    """The columns of each view as journal/views.md lists them."""
    views: dict[str, list[str]] = {}
    name = ""
    for line in DOCUMENTED_VIEWS.splitlines():
        if line.startswith("## "):
            name = line.removeprefix("## ")
            views[name] = []
        elif line.startswith("| ") and not line.startswith("| column"):
            views[name].append(line.split("|")[1].strip())
    return views


def test_each_view_is_documented_and_typed_column_by_column(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    query = "SELECT name FROM sqlite_master WHERE type = 'view'"
    names = [name for (name,) in run_sql(journal, query)]
    columns = {
        name: [column for _, column, *_ in run_sql(journal, f"PRAGMA table_info({name})")]
        for name in names
    }
    assert columns == documented()
    assert columns == {name: list(cls.__struct_fields__) for name, cls in VIEWS.items()}
    journal.close()


@pytest.fixture
def reader(tmp_path: Path) -> JournalReader:
    """A run with a finished, a rejected and an open request."""
    journal = Journal.open(tmp_path)
    steps = Steps(journal)
    steps.start()
    steps.receive(1)
    steps.join(1)
    steps.decode({1: [11]})
    steps.decode({1: [12]})
    steps.finish(1, [13], 3)
    rejected = RequestRejected(
        request_id=request_id(2), reason="queue_full", numbers=None, num_waiting=1000
    )
    steps.commit([received(2)], [rejected])
    steps.receive(3)
    steps.commit([ServerStopping(reason="SIGTERM")])
    journal.close()
    return JournalReader.open(tmp_path)


def test_the_view_of_requests(reader: JournalReader) -> None:
    first, second, third = audit.requests(reader)
    assert (first.phase, second.phase, third.phase) == ("finished", "rejected", "waiting")
    received_at = datetime.fromisoformat(first.received_at)
    assert received_at.timestamp() == START_NS / 1e9 + 2
    assert (first.waited_ms, first.first_token_ms, first.decode_ms) == (1000, 2000, 2000)
    assert (first.total_ms, first.num_output_tokens) == (4000, 3)
    assert first.decode_tokens_per_s == 1.0
    assert (third.ended_at, third.total_ms, third.decode_tokens_per_s) == (None, None, None)


def test_the_view_of_rejections(reader: JournalReader) -> None:
    (rejection,) = audit.rejections(reader)
    assert (rejection.number, rejection.reason) == (2, "queue_full")
    assert (rejection.num_waiting, rejection.required_bytes) == (1000, None)


def test_the_view_of_runs(reader: JournalReader) -> None:
    (run,) = audit.runs(reader)
    assert (run.run_id, run.ended_by, run.end_reason) == (1, "stopped", "SIGTERM")
    assert run.python_version == "3.11.0"


def test_the_view_of_throughput(reader: JournalReader) -> None:
    minutes = list(audit.throughput(reader))
    assert sum(minute.num_received for minute in minutes) == 3
    assert sum(minute.num_output_tokens for minute in minutes) == 3
    assert minutes[0].mean_rows == 1.0
    assert minutes[0].decode_tokens_per_s == round(1e9 / 11, 2)


HELD = 3_000
"""Milliseconds from request_paused to request_resumed in `held`."""


@pytest.fixture
def held(tmp_path: Path) -> JournalReader:
    """Requests 1 and 2 share two blocks: 1 was held and went on, and both are held now. Request 2
    has lost its client, and 1 got another one.
    """
    journal = Journal.open(tmp_path)
    steps = HoldingSteps(journal)
    steps.know(started())
    steps.ready(KV_DOMAIN)
    steps.receive(1, range(39))
    steps.receive(2, range(39))
    steps.join(1, 2)
    steps.plan_blocks(1, [A, B])
    steps.save(A)
    steps.save(B)
    steps.begin_pause(1)
    steps.end_pause(1, [A, B])
    steps.resume(1, 0, 40)
    steps.begin_pause(1, "operator")
    steps.end_pause(1, [A, B])
    steps.begin_pause(2)
    steps.end_pause(2, [A])
    steps.know(sample(500))
    steps.know(gone(1), gone(2))
    steps.commit([arrival(3)], adopts(3, 1))
    journal.close()
    return JournalReader.open(tmp_path)


def test_the_view_of_pauses(held: JournalReader) -> None:
    first, second, third = audit.pauses(held)
    assert [(p.number, p.reason, p.outcome) for p in (first, second, third)] == [
        (1, "high", "resumed"),
        (1, "operator", "open"),
        (2, "high", "open"),
    ]
    assert (first.pausing_ms, first.freeing_ms, first.held_ms) == (1_000, 2_000, HELD)
    assert (first.resuming_ms, second.held_ms, second.resuming_ms) == (1_000, None, None)
    paused_at = datetime.fromisoformat(str(first.paused_at)).timestamp()
    assert paused_at - datetime.fromisoformat(first.started_at).timestamp() == 1
    assert (first.frees_bytes, first.freed_bytes, first.num_lost_tokens) == (400, 390, 0)
    row = next(audit.requests(held))
    assert (row.num_pauses, row.held_ms, row.phase) == (2, HELD, "paused")
    assert sum(minute.num_pauses for minute in audit.throughput(held)) == 3
    assert sum(minute.held_ms for minute in audit.throughput(held)) == HELD


def test_pins_are_counted_along_their_chains(held: JournalReader) -> None:
    assert [(pin.number, pin.num_blocks, pin.last_hash) for pin in audit.pins(held)] == [
        (1, 2, B),
        (2, 1, A),
    ]
    blocks = audit.pinned_blocks(held)
    assert [(each.hash, each.num_pins, each.end_tokens) for each in blocks] == [
        (A, 2, 16),
        (B, 1, 32),
    ]


def test_a_chain_is_walked_no_further_than_it_was_pinned(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    steps = HoldingSteps(journal)
    steps.start()
    block = "INSERT INTO block VALUES (?, 'd', ?, 16, 1, 0, 1, 1, 1, 0)"
    run_sql(journal, block, (A, B))
    run_sql(journal, block, (B, A))
    run_sql(journal, f"INSERT INTO pin VALUES (1, 'r', 'd', 1, '{A}', 16, 0, 1)")
    query = "SELECT hash, num_pins FROM pinned_blocks"
    assert run_sql(journal, query).fetchall() == [(A, 1)]
    run_sql(journal, "UPDATE pin SET num_blocks = 9")
    assert len(run_sql(journal, query).fetchall()) == 2, "a circle has an end"
    journal.close()


def test_the_view_of_memory(held: JournalReader) -> None:
    (reading,) = audit.memory(held)
    assert (reading.active_bytes, reading.age_ms, reading.ceiling_bytes) == (500, 3, None)
    assert (reading.active_share, reading.run_id) == (None, 1)


def test_a_reading_is_a_share_of_the_ceiling_of_its_run(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    steps = HoldingSteps(journal)
    limits = msgspec.structs.replace(LIMITS, ceiling_bytes=1_500)
    steps.know(msgspec.structs.replace(server_started(), limits=limits), sample(500))
    journal.close()
    with JournalReader.open(tmp_path) as reader:
        (reading,) = audit.memory(reader)
    assert (reading.ceiling_bytes, reading.active_share) == (1_500, 0.3333)


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        ((), None),
        ((7,), (1, 7_000, 7_000, 7_000, 7_000)),
        ((4, 1, 3, 2), (4, 2_000, 4_000, 4_000, 4_000)),
        (tuple(range(1, 101)), (100, 50_000, 90_000, 99_000, 100_000)),
    ],
)
def test_percentiles_are_times_that_occurred(
    tmp_path: Path, seconds: tuple[int, ...], expected: tuple[int, ...] | None
) -> None:
    journal = Journal.open(tmp_path)
    Steps(journal).start()
    pause = (
        "INSERT INTO pause (pause_seq, number, request_id, run_id, reason, from_phase, outcome,"
        " started_ns, paused_ns, resumed_ns, num_cached_tokens, num_output_tokens)"
        " VALUES (?, 1, 'r', 1, 'high', 'decoding', 'resumed', 0, ?, ?, 0, 0)"
    )
    for number, length in enumerate(seconds):
        run_sql(journal, pause, (number, SECOND_NS, (1 + length) * SECOND_NS))
    journal.close()
    with JournalReader.open(tmp_path) as reader:
        rows = [msgspec.structs.astuple(row)[:-1] for row in sums.held_times(reader)]
        with reader.transaction() as run:
            assert rows == [tuple(row) for row in run("SELECT * FROM held_times").fetchall()]
    assert rows == ([] if expected is None else [("high", *expected, sum(seconds) * 1_000)])


EXAMPLES = re.findall(r"```sql\n(.*?)```", DOCUMENT, flags=re.DOTALL)


@pytest.fixture
def eventful(held: JournalReader) -> JournalReader:
    """The same, and a request that was refused, and one that has finished."""
    journal = Journal.open(held.file)
    steps = HoldingSteps(journal)
    steps.know(started())
    steps.ready(KV_DOMAIN)
    rejected = RequestRejected(
        request_id=request_id(4), reason="queue_full", numbers=None, num_waiting=1000
    )
    steps.commit([received(4)], [rejected])
    steps.receive(5)
    steps.join(5)
    steps.finish(5, [11], 1)
    journal.close()
    return held


@pytest.mark.parametrize("example", EXAMPLES)
def test_examples_answer(eventful: JournalReader, example: str) -> None:
    with eventful.transaction() as run:
        assert run(example).fetchall()


def test_each_view_has_an_example() -> None:
    sections = DOCUMENTED_VIEWS.split("\n## ")[1:]
    without = [part.split()[0] for part in sections if f"FROM {part.split()[0]}" not in part]
    assert without == []


def test_views_are_read_in_batches(reader: JournalReader, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(audit.requests(reader))
    monkeypatch.setattr(audit, "BATCH_ROWS", 1)
    assert list(audit.requests(reader)) == whole
