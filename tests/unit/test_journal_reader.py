"""A reader sees what is committed, beside the writer and without it, and cannot write."""

from pathlib import Path

import pytest

from journal.errors import JournalBroken, JournalError
from journal.journal import Journal
from journal.reader import JournalReader
from tests.journal_steps import Steps, request_id


def test_a_reader_sees_each_commit_while_the_journal_is_written(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    steps = Steps(journal)
    committed = steps.start()
    with JournalReader.open(tmp_path) as reader:
        assert list(reader.read()) == committed
        committed += steps.receive(1)
        assert list(reader.read()) == committed
        assert reader.prompt_tokens(request_id(1)) == journal.prompt_tokens(request_id(1))
        assert reader.parameters(request_id(1)) == b'{"route":"chat"}'
    journal.close()
    with JournalReader.open(tmp_path / "journal.db") as reader:
        assert list(reader.read()) == committed


def test_steps_are_grouped_into_facts_and_decisions(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    steps = Steps(journal)
    first, second = steps.start(), steps.receive(1)
    journal.close()
    with JournalReader.open(tmp_path) as reader:
        grouped = list(reader.steps())
    assert [(step.step, step.run_id) for step in grouped] == [(1, 1), (2, 1)]
    assert grouped[0].facts == first
    assert (grouped[1].facts, grouped[1].decisions) == (second[:1], second[1:])


def test_a_reader_finds_the_events_of_one_request(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    steps = Steps(journal)
    steps.start()
    received = steps.receive(1)
    steps.receive(2)
    joined = steps.join(1, 2)
    journal.close()
    with JournalReader.open(tmp_path) as reader:
        events = reader.events_of(request_id(1))
        assert events == [*received, *joined[1:3]]
        assert reader.events_of(request_id(1), after_seq=received[0].seq, limit=1) == [received[1]]
        assert reader.request("req_unknown") is None


def test_a_reader_puts_gathered_and_fresh_tokens_together(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    steps = Steps(journal)
    steps.start()
    steps.receive(1)
    steps.join(1)
    steps.decode({1: [5]}, {1: [(-0.5, ((5, -0.5), (6, -1.5)))]})
    journal.gather()
    steps.decode({1: [6, 7]}, {1: [(-0.25, ()), (-2.0, ((1, -0.125),))]})
    with JournalReader.open(tmp_path) as reader:
        ids, logprobs = reader.output_tokens(request_id(1))
    assert ids.tolist() == [5, 6, 7]
    assert logprobs == [(-0.5, ((5, -0.5), (6, -1.5))), (-0.25, ()), (-2.0, ((1, -0.125),))]
    assert journal.output_tokens(request_id(1)) == (ids, logprobs)
    journal.close()


def test_a_reader_cannot_write(tmp_path: Path) -> None:
    Journal.open(tmp_path).close()
    with (
        JournalReader.open(tmp_path) as reader,
        pytest.raises(JournalBroken, match="readonly"),
        reader.transaction() as run,
    ):
        run("DELETE FROM snapshots")


def test_a_missing_journal_is_named(tmp_path: Path) -> None:
    with pytest.raises(JournalError, match=r"journal\.db: no such journal"):
        JournalReader.open(tmp_path)
