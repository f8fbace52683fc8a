"""The journal and its in-memory twin keep what a step commits, and give it back."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from journal.errors import JournalLocked
from journal.events import RequestQueued, TokensDecoded
from journal.journal import Journal
from journal.memory import MemoryJournal
from journal.tokens import SideRows, StepTokens
from tests.journal_steps import Steps, received, request_id, server_started

AnyJournal = Journal | MemoryJournal


@pytest.fixture(params=["file", "memory"])
def journal(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[AnyJournal]:
    opened = Journal.open(tmp_path) if request.param == "file" else MemoryJournal()
    yield opened
    opened.close()


def test_commit_numbers_events_in_the_order_of_the_step(journal: AnyJournal) -> None:
    steps = Steps(journal)
    first = steps.start()
    second = steps.receive(1)
    assert [record.seq for record in first + second] == [1, 2, 3, 4]
    assert [record.source for record in second] == ["fact", "decision"]
    assert {record.run_id for record in first + second} == {1}
    assert (journal.last_seq, journal.last_step, journal.last_run_id) == (4, 2, 1)
    assert journal.last_at_ns == second[0].at_ns


def test_read_gives_back_what_was_committed(journal: AnyJournal) -> None:
    steps = Steps(journal)
    committed = steps.start() + steps.receive(1) + steps.join(1) + steps.decode({1: [5]})
    assert list(journal.read()) == committed
    assert list(journal.read(after_seq=2, until_seq=5)) == committed[2:5]


def test_the_first_commit_begins_a_run(journal: AnyJournal) -> None:
    with pytest.raises(AssertionError, match="server_started"):
        journal.commit(1, 1, [received(1)], [])
    assert list(journal.read()) == []


def test_a_step_needs_a_fact_and_goes_forward(journal: AnyJournal) -> None:
    journal.commit(5, 100, [server_started()], [])
    queued = RequestQueued(request_id=request_id(1), max_tokens=1, num_waiting=0)
    with pytest.raises(AssertionError, match="a step has a fact"):
        journal.commit(6, 100, [], [queued])
    with pytest.raises(AssertionError, match="step 5 after 5"):
        journal.commit(5, 100, [received(1)], [])
    with pytest.raises(AssertionError, match="time went back"):
        journal.commit(6, 99, [received(1)], [])


def test_prompt_and_parameters_are_kept(journal: AnyJournal) -> None:
    steps = Steps(journal)
    steps.start()
    steps.receive(1, [7, 0, 2**32 - 1])
    prompt = journal.prompt_tokens(request_id(1))
    assert prompt is not None
    assert prompt.tolist() == [7, 0, 2**32 - 1]
    assert journal.parameters(request_id(1)) == b'{"route":"chat"}'
    assert journal.prompt_tokens(request_id(2)) is None
    assert journal.parameters(request_id(2)) is None


def test_output_is_put_together_by_request(journal: AnyJournal) -> None:
    steps = Steps(journal)
    steps.start()
    steps.receive(1)
    steps.receive(2)
    steps.join(1, 2)
    steps.decode({1: [11], 2: [21, 22]})
    steps.decode({2: [23]})
    steps.finish(1, [12], 2)
    ids, logprobs = journal.output_tokens(request_id(1))
    assert ids.tolist() == [11, 12]
    assert logprobs is None
    assert journal.output_tokens(request_id(2))[0].tolist() == [21, 22, 23]


def test_tokens_must_match_the_counts(journal: AnyJournal) -> None:
    steps = Steps(journal)
    steps.start()
    steps.receive(1)
    steps.join(1)
    event = TokensDecoded(batch=1, numbers=(1,), counts=(2,), ended=(), duration_ns=1)
    side = SideRows(tokens={0: StepTokens.of([([5], None)])})
    with pytest.raises(AssertionError, match="tokens and counts differ"):
        steps.commit([event], [], side)


def test_tokens_are_for_open_requests_only(journal: AnyJournal) -> None:
    steps = Steps(journal)
    steps.start()
    steps.receive(1)
    steps.join(1)
    steps.finish(1, [5], 1)
    steps.batch = (1,)
    with pytest.raises(AssertionError, match="request 1, which has ended"):
        steps.decode({1: [6]})
    assert journal.output_tokens(request_id(1))[0].tolist() == [5]


def test_the_last_two_snapshots_are_kept(journal: AnyJournal) -> None:
    steps = Steps(journal)
    steps.start()
    steps.receive(1)
    journal.save_snapshot(1, 1, "a", b"one")
    journal.save_snapshot(2, 1, "b", b"two")
    journal.save_snapshot(3, 2, "a", b"three")
    assert journal.latest_snapshot(1, "a") is None
    assert journal.latest_snapshot(1, "b") == (2, b"two")
    assert journal.latest_snapshot(2, "a") == (3, b"three")


def test_a_second_writer_is_refused_by_name(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    with pytest.raises(JournalLocked, match=r"process \d+ writes this journal"):
        Journal.open(tmp_path)
    journal.close()
    Journal.open(tmp_path).close()


def test_a_journal_goes_on_after_it_is_opened_again(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    steps = Steps(journal)
    steps.start()
    steps.receive(1)
    journal.close()
    journal = Journal.open(tmp_path)
    assert [record.run_id for record in Steps(journal).start()] == [2, 2]
    assert journal.last_seq == 6
    journal.close()
