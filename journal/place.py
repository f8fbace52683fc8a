"""Where a step's events go: the seqs, and what the loop guarantees about their order."""

from collections.abc import Sequence
from dataclasses import dataclass

from journal.events import Decision, Fact, Record, ServerStarted


@dataclass(frozen=True, slots=True)
class Position:
    """The newest event of a journal; all 0 when there is none."""

    seq: int = 0
    step: int = 0
    at_ns: int = 0
    run_id: int = 0


class Positioned:
    """What a journal says of its newest event; `last` moves with each commit."""

    last: Position

    @property
    def last_seq(self) -> int:
        """The seq of the newest event, 0 in an empty journal."""
        return self.last.seq

    @property
    def last_step(self) -> int:
        """The step of the newest event, 0 in an empty journal."""
        return self.last.step

    @property
    def last_at_ns(self) -> int:
        """The time of the newest event, 0 in an empty journal."""
        return self.last.at_ns

    @property
    def last_run_id(self) -> int:
        """The run of the newest event, 0 in an empty journal."""
        return self.last.run_id


def place(
    last: Position,
    step: int,
    at_ns: int,
    facts: Sequence[Fact],
    decisions: Sequence[Decision],
) -> list[Record]:
    """The records of the next step. A run begins with server_started as the first fact."""
    assert facts, "a step has a fact"
    assert step > last.step, f"step {step} after {last.step}"
    assert at_ns >= last.at_ns, f"time went back: {at_ns} after {last.at_ns}"
    run_id = last.run_id + int(isinstance(facts[0], ServerStarted))
    seq = last.seq
    records: list[Record] = []
    for event in facts:
        seq += 1
        records.append(Record(seq, run_id, step, "fact", at_ns, event))
    for event in decisions:
        seq += 1
        records.append(Record(seq, run_id, step, "decision", at_ns, event))
    return records
