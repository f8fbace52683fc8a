"""A compacted journal begins with the carried state and keeps what came after it, and all rows."""

from pathlib import Path

import pytest

from journal.errors import JournalBroken
from journal.events import StateCarried
from journal.files import replacement_of
from journal.journal import Journal
from journal.reader import JournalReader
from tests.journal_steps import SECOND_NS, START_NS, Steps, request_id

STATE: dict[str, object] = {"requests": {"2": {"phase": "waiting"}}, "seq": 0}


def busy_journal(folder: Path) -> Steps[Journal]:
    """Two requests decode, one of them ends, and a third arrives."""
    steps = Steps(Journal.open(folder))
    steps.start()
    steps.receive(1)
    steps.receive(2)
    steps.join(1, 2)
    steps.decode({1: [11], 2: [21]})
    steps.finish(1, [12], 2)
    steps.decode({2: [22, 23]})
    steps.receive(3)
    return steps


def finish_compaction(journal: Journal) -> None:
    while not journal.advance_compaction():
        pass


def last_seq_of_step(journal: Journal, step: int) -> int:
    return [record.seq for record in journal.read() if record.step == step][-1]


def test_later_events_keep_their_place_behind_the_carried_state(tmp_path: Path) -> None:
    steps = busy_journal(tmp_path)
    journal = steps.journal
    before = list(journal.read())
    through_seq = last_seq_of_step(journal, 5)
    journal.begin_compaction(through_seq, 1, STATE)
    finish_compaction(journal)
    after = list(journal.read())
    replaced = before[through_seq - 1]
    assert after[1:] == before[through_seq:]
    assert after[0].event == StateCarried(state_version=1, through_seq=through_seq, state=STATE)
    assert after[0].source == "fact"
    assert (after[0].seq, after[0].step, after[0].run_id, after[0].at_ns) == (
        replaced.seq,
        replaced.step,
        replaced.run_id,
        replaced.at_ns,
    )
    assert journal.verify() == []
    journal.close()


def test_tokens_parameters_and_rows_survive(tmp_path: Path) -> None:
    steps = busy_journal(tmp_path)
    journal = steps.journal
    with JournalReader.open(tmp_path) as reader:
        rows = [reader.request(request_id(number)) for number in (1, 2, 3)]
    journal.begin_compaction(last_seq_of_step(journal, 4), 1, STATE)
    finish_compaction(journal)
    with JournalReader.open(tmp_path) as reader:
        assert [reader.request(request_id(number)) for number in (1, 2, 3)] == rows
    assert journal.output_tokens(request_id(1))[0].tolist() == [11, 12]
    assert journal.output_tokens(request_id(2))[0].tolist() == [21, 22, 23]
    assert journal.prompt_tokens(request_id(3)) is not None
    assert journal.parameters(request_id(3)) == b'{"route":"chat"}'
    journal.close()


def test_the_journal_goes_on_in_the_new_file(tmp_path: Path) -> None:
    steps = busy_journal(tmp_path)
    journal = steps.journal
    journal.begin_compaction(last_seq_of_step(journal, 3), 1, STATE)
    finish_compaction(journal)
    last = steps.finish(2, [24], 4)
    assert journal.verify() == []
    journal.close()
    journal = Journal.open(tmp_path)
    assert journal.last_seq == last[-1].seq
    assert journal.output_tokens(request_id(2))[0].tolist() == [21, 22, 23, 24]
    assert journal.verify() == []
    journal.close()


def test_commits_between_two_portions_are_in_it(tmp_path: Path) -> None:
    steps = busy_journal(tmp_path)
    journal = steps.journal
    journal.begin_compaction(last_seq_of_step(journal, 3), 1, STATE)
    assert not journal.advance_compaction()
    committed = steps.decode({2: [24]})
    finish_compaction(journal)
    assert list(journal.read())[-1:] == committed
    assert journal.output_tokens(request_id(2))[0].tolist() == [21, 22, 23, 24]
    journal.close()


def test_it_can_be_compacted_twice(tmp_path: Path) -> None:
    steps = busy_journal(tmp_path)
    journal = steps.journal
    for step in (3, 6):
        journal.begin_compaction(last_seq_of_step(journal, step), 1, STATE)
        finish_compaction(journal)
        assert journal.verify() == []
    assert journal.output_tokens(request_id(2))[0].tolist() == [21, 22, 23]
    journal.close()


def test_everything_may_go_into_the_carried_state(tmp_path: Path) -> None:
    steps = busy_journal(tmp_path)
    journal = steps.journal
    journal.begin_compaction(journal.last_seq, 1, STATE)
    finish_compaction(journal)
    assert len(list(journal.read())) == 1
    steps.decode({2: [24]})
    assert journal.verify() == []
    journal.close()


def test_it_waits_while_somebody_reads(tmp_path: Path) -> None:
    steps = busy_journal(tmp_path)
    journal = steps.journal
    before = list(journal.read())
    journal.begin_compaction(last_seq_of_step(journal, 4), 1, STATE)
    with JournalReader.open(tmp_path) as reader, reader.transaction() as run:
        assert run("SELECT count(*) FROM events").scalar() == len(before)
        assert not journal.advance_compaction()
        assert not journal.advance_compaction()
        before += steps.decode({2: [24]})
    assert list(journal.read()) == before
    finish_compaction(journal)
    assert isinstance(next(journal.read()).event, StateCarried)
    assert journal.output_tokens(request_id(2))[0].tolist() == [21, 22, 23, 24]
    journal.close()


def test_half_a_successor_is_removed_at_the_next_start(tmp_path: Path) -> None:
    steps = busy_journal(tmp_path)
    journal = steps.journal
    before = list(journal.read())
    journal.close()
    leftover = replacement_of(journal.file)
    leftover.write_bytes(b"half a file")
    journal = Journal.open(tmp_path)
    assert not leftover.exists()
    assert list(journal.read()) == before
    journal.close()


def test_a_failed_successor_leaves_the_journal_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = busy_journal(tmp_path)
    journal = steps.journal
    before = list(journal.read())

    def fail(_path: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("journal.compaction.flush", fail)
    journal.begin_compaction(last_seq_of_step(journal, 4), 1, STATE)
    with pytest.raises(JournalBroken, match="Input/output error"):
        finish_compaction(journal)
    assert not replacement_of(journal.file).exists()
    before += steps.decode({2: [24]})
    assert list(journal.read()) == before
    assert journal.verify() == []
    journal.close()


def test_the_point_is_the_end_of_a_step_before_the_kept_time(tmp_path: Path) -> None:
    steps = busy_journal(tmp_path)
    journal = steps.journal
    # The first step is at START_NS + 1 s, and each takes one second.
    now_ns = START_NS + 100 * SECOND_NS
    point = journal.compaction_point(now_ns, now_ns - START_NS - 5 * SECOND_NS, 10**12)
    assert point == last_seq_of_step(journal, 4)
    assert journal.compaction_point(now_ns, 99 * SECOND_NS, 10**12) is None
    assert journal.compaction_point(now_ns, 1000 * SECOND_NS, 10**12) is None
    journal.close()


def test_a_large_file_is_shortened_in_proportion(tmp_path: Path) -> None:
    steps = busy_journal(tmp_path)
    journal = steps.journal
    for _ in range(3_000):
        steps.decode({2: [24]})
    size = journal.file.stat().st_size + 2**20
    assert journal.compaction_point(journal.last_at_ns, journal.last_at_ns, size) is None
    point = journal.compaction_point(journal.last_at_ns, journal.last_at_ns, 450_000)
    assert point is not None
    assert 0 < point < journal.last_seq
    journal.begin_compaction(point, 1, STATE)
    finish_compaction(journal)
    assert journal.file.stat().st_size < 450_000
    assert journal.compaction_point(journal.last_at_ns, journal.last_at_ns, 450_000) is None
    journal.close()


def test_a_step_is_never_cut(tmp_path: Path) -> None:
    steps = busy_journal(tmp_path)
    journal = steps.journal
    for number in range(4, 200):
        steps.receive(number)
    last_seqs = {record.step: record.seq for record in journal.read()}
    points = {
        journal.compaction_point(journal.last_at_ns, journal.last_at_ns, keep_bytes)
        for keep_bytes in range(100_000, 180_000, 10_000)
    }
    assert len(points) > 4
    assert points <= set(last_seqs.values())
    journal.close()


def test_snapshots_of_what_is_kept_stay(tmp_path: Path) -> None:
    steps = busy_journal(tmp_path)
    journal = steps.journal
    through_seq = last_seq_of_step(journal, 5)
    journal.save_snapshot(through_seq - 1, 1, "before", b"old")
    journal.save_snapshot(through_seq, 1, "there", b"new")
    journal.begin_compaction(through_seq, 1, STATE)
    finish_compaction(journal)
    assert journal.latest_snapshot(1, "before") is None
    assert journal.latest_snapshot(1, "there") == (through_seq, b"new")
    journal.close()


def test_no_history_is_given_up_for_stored_tokens(tmp_path: Path) -> None:
    steps = busy_journal(tmp_path)
    journal = steps.journal
    steps.receive(4, range(200_000))
    assert journal.compaction_point(journal.last_at_ns, journal.last_at_ns, 100_000) is None
    journal.close()
