"""Output tokens: a row per step, gathered by request now and at the end, purged later."""

from pathlib import Path

import pytest

from journal.events import HoldRequested, RequestPaused
from journal.journal import Journal
from journal.memory import MemoryJournal
from journal.reader import JournalReader
from journal.tokens import Logprobs
from tests.journal_steps import SECOND_NS, Steps, request_id, run_sql

NAME = request_id(1)


def stored(journal: Journal) -> tuple[int, int]:
    """How many step rows and how many gathered rows of outputs there are."""
    parts = "SELECT count(*) FROM token_ids WHERE part = 'output'"
    num_step_rows = run_sql(journal, "SELECT count(*) FROM step_tokens").scalar()
    return num_step_rows, run_sql(journal, parts).scalar()


def decoding(journal: Journal, *numbers: int) -> Steps[Journal]:
    steps = Steps(journal)
    steps.start()
    for number in numbers:
        steps.receive(number)
    steps.join(*numbers)
    return steps


def test_step_rows_are_gathered_after_some_steps(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, gather_steps=3)
    steps = decoding(journal, 1, 2)
    seen: list[tuple[int, int]] = []
    for token in range(7):
        steps.decode({1: [token], 2: [100 + token]})
        seen.append(stored(journal))
        assert journal.output_tokens(NAME)[0].tolist() == list(range(token + 1))
    assert seen == [(1, 0), (2, 0), (0, 2), (1, 2), (2, 2), (0, 4), (1, 4)]
    assert journal.verify() == []
    journal.close()


def test_the_whole_output_is_one_row_at_the_end(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, gather_steps=2)
    steps = decoding(journal, 1, 2)
    for token in range(5):
        steps.decode({1: [token], 2: [100 + token]})
    steps.finish(1, [5], 6)
    rows = run_sql(journal, "SELECT count(*) FROM token_ids WHERE request_id = ?", (NAME,)).scalar()
    assert rows == 2, "the prompt and the output"
    assert journal.output_tokens(NAME)[0].tolist() == [0, 1, 2, 3, 4, 5]
    assert journal.verify() == []
    journal.close()


def test_step_rows_are_gathered_when_a_request_is_held(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    steps = decoding(journal, 1, 2)
    for token in range(3):
        steps.decode({1: [token], 2: [100 + token]})
    assert stored(journal) == (3, 0)
    paused = RequestPaused(
        request_id=NAME,
        number=1,
        reason="operator",
        had_row=True,
        num_cached_tokens=5,
        num_output_tokens=3,
    )
    steps.commit([HoldRequested(request_id=NAME)], [paused])
    assert stored(journal) == (0, 2)
    journal.close()
    journal = Journal.open(tmp_path)
    assert journal.output_tokens(NAME)[0].tolist() == [0, 1, 2]
    assert journal.verify() == []
    journal.close()


def test_step_rows_go_when_no_request_needs_them(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    steps = decoding(journal, 1, 2)
    steps.decode({1: [11], 2: [21]})
    steps.finish(1, [12], 2)
    assert stored(journal) == (2, 1)
    steps.finish(2, [22], 2)
    assert stored(journal) == (0, 2)
    assert journal.output_tokens(request_id(2))[0].tolist() == [21, 22]
    journal.close()


@pytest.mark.parametrize("gather_steps", [1, 2, 3, 100])
def test_output_is_whole_after_a_kill_at_any_step(tmp_path: Path, gather_steps: int) -> None:
    journal = Journal.open(tmp_path, gather_steps=gather_steps)
    steps = decoding(journal, 1, 2)
    for token in range(6):
        steps.decode({1: [token], 2: [100 + token]})
        journal.close()
        steps.journal = journal = Journal.open(tmp_path, gather_steps=gather_steps)
        assert journal.output_tokens(NAME)[0].tolist() == list(range(token + 1))
        steps.start()
        steps.batch = ()
        steps.join(1, 2)
    steps.finish(2, [7], 7)
    assert journal.output_tokens(NAME)[0].tolist() == list(range(6))
    assert journal.output_tokens(request_id(2))[0].tolist() == [*range(100, 106), 7]
    assert journal.verify() == []
    journal.close()


def test_log_probabilities_stay_with_their_tokens(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, gather_steps=2)
    steps = decoding(journal, 1, 2)
    expected: list[Logprobs] = []
    for token in range(5):
        logprobs: list[Logprobs] = [(-0.5 * token, ((token, -0.5 * token), (9, -8.0)))]
        expected += logprobs
        steps.decode({1: [token], 2: [7]}, {1: logprobs})
    with JournalReader.open(tmp_path) as reader:
        assert reader.output_tokens(NAME)[1] == expected
    assert journal.output_tokens(NAME)[1] == expected
    assert journal.output_tokens(request_id(2))[1] is None
    journal.close()


@pytest.mark.parametrize("kind", ["file", "memory"])
def test_tokens_and_parameters_go_after_the_retention(tmp_path: Path, kind: str) -> None:
    journal = Journal.open(tmp_path) if kind == "file" else MemoryJournal()
    steps = Steps(journal)
    steps.start()
    steps.receive(1)
    steps.receive(2)
    steps.join(1, 2)
    steps.decode({1: [11], 2: [21]})
    ended_ns = steps.finish(1, [12], 2)[0].at_ns
    events = list(journal.read())
    assert journal.purge(ended_ns + 9 * SECOND_NS, 10 * SECOND_NS) == 0
    assert journal.output_tokens(NAME)[0].tolist() == [11, 12]
    assert journal.purge(ended_ns + 10 * SECOND_NS, 10 * SECOND_NS) == 1
    assert journal.prompt_tokens(NAME) is None
    assert journal.parameters(NAME) is None
    assert journal.output_tokens(NAME)[0].tolist() == []
    assert journal.output_tokens(request_id(2))[0].tolist() == [21]
    assert journal.prompt_tokens(request_id(2)) is not None
    assert journal.purge(ended_ns + 10 * SECOND_NS, 10 * SECOND_NS) == 0
    assert list(journal.read()) == events, "a purge takes no event"
    if isinstance(journal, Journal):
        assert journal.verify() == []
    journal.close()


def test_purged_tokens_are_gone_from_the_file(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    steps = Steps(journal)
    steps.start()
    steps.receive(1, [0x11223344] * 64)
    steps.receive(2)
    steps.join(1, 2)
    steps.decode({1: [0x55667788] * 64, 2: [21]})
    ended_ns = steps.finish(1, [12], 65)[0].at_ns
    journal.purge(ended_ns, 0)
    journal.close()
    content = (tmp_path / "journal.db").read_bytes()
    assert 0x11223344.to_bytes(4, "little") * 2 not in content
    assert 0x55667788.to_bytes(4, "little") * 2 not in content


def test_side_rows_of_unknown_requests_go_at_the_start(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path)
    decoding(journal, 1).decode({1: [11]})
    insert = "INSERT INTO token_ids VALUES ('req_unknown', 'prompt', 0, x'01000000', NULL)"
    run_sql(journal, insert)
    run_sql(journal, "INSERT INTO request_parameters VALUES ('req_unknown', x'7b7d')")
    run_sql(journal, "INSERT INTO step_tokens VALUES (999, x'01000000', NULL)")
    assert len(journal.verify()) == 3
    journal.close()
    journal = Journal.open(tmp_path)
    assert journal.verify() == []
    assert journal.prompt_tokens("req_unknown") is None
    assert journal.output_tokens(NAME)[0].tolist() == [11]
    journal.close()
