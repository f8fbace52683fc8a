"""The SQL views are what the document and the typed readers say they are."""

from datetime import datetime
from importlib.resources import files
from pathlib import Path

import pytest

from journal import audit
from journal.events import RequestRejected, ServerStopping
from journal.journal import Journal
from journal.reader import JournalReader
from tests.journal_steps import START_NS, Steps, received, request_id, run_sql

VIEWS = {
    "requests": audit.RequestFigures,
    "runs": audit.RunFigures,
    "throughput": audit.MinuteFigures,
    "rejections": audit.Rejection,
    "cache_misses": audit.CacheMiss,
    "cache_hits": audit.CacheHits,
    "blocks": audit.BlockFigures,
    "pauses": audit.Pause,
    "pins": audit.Pin,
    "pinned_blocks": audit.PinnedBlock,
    "memory": audit.Reading,
}


def documented() -> dict[str, list[str]]:
    """The columns of each view as journal/views.md lists them."""
    views: dict[str, list[str]] = {}
    name = ""
    for line in files("journal").joinpath("views.md").read_text().splitlines():
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


def test_views_are_read_in_batches(reader: JournalReader, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = list(audit.requests(reader))
    monkeypatch.setattr(audit, "BATCH_ROWS", 1)
    assert list(audit.requests(reader)) == whole
