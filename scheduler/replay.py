"""Deciding a journal again: the recorded facts go in, what comes out must be what was recorded.

It is teacher-forced: after each step the recorded decisions are folded, not those that came out, so
each divergence stands alone.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from operator import attrgetter

from journal.events import Decision, Record, StateCarried
from scheduler.evolve import fold
from scheduler.policy import POLICY_VERSION, decide
from scheduler.request import IllegalTransition
from scheduler.state import SchedulerState


@dataclass(frozen=True, slots=True)
class Divergence:
    """A step whose facts lead to other decisions now. `problem` is set when the record cannot even
    be folded, and the replay ends there.
    """

    run_id: int
    step: int
    policy_version: int
    expected: tuple[Decision, ...]
    recorded: tuple[Decision, ...]
    problem: str = ""

    @property
    def of_other_policy(self) -> bool:
        """Whether the run decided by another policy than ours, so that a difference is no fault."""
        return self.policy_version != POLICY_VERSION


@dataclass(slots=True)
class Replay:
    """Deciding a journal again; iterate over `divergences` to run it. Counts are those so far."""

    records: Iterable[Record]
    num_steps: int = 0
    num_decisions: int = 0

    def divergences(self) -> Iterator[Divergence]:
        """Every step that comes out differently, in order."""
        state = SchedulerState()
        for step, group in groupby(self.records, key=attrgetter("step")):
            records = list(group)
            if isinstance(records[0].event, StateCarried):
                fold(state, records)  # what went before the journal's beginning: no step of it
                continue
            self.num_steps += 1
            divergence = self.replay_step(state, step, records)
            if divergence is not None:
                yield divergence
                if divergence.problem:
                    return

    def replay_step(
        self, state: SchedulerState, step: int, records: list[Record]
    ) -> Divergence | None:
        """Decides one step again and folds what was recorded."""
        num_facts = sum(record.source == "fact" for record in records)
        recorded: tuple[Decision, ...] = tuple([record.event for record in records[num_facts:]])  # pyright: ignore[reportAssignmentType]
        self.num_decisions += len(recorded)
        expected: tuple[Decision, ...] = ()
        problem = ""
        try:
            fold(state, records[:num_facts])
            expected = tuple(decide(state))
            fold(state, records[num_facts:])
        except (AssertionError, IllegalTransition, LookupError, ValueError) as error:
            problem = f"the record cannot be folded: {error!r}"
        if expected == recorded and not problem:
            return None
        run_id = records[0].run_id
        return Divergence(run_id, step, state.policy_version, expected, recorded, problem)
