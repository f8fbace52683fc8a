"""Deciding a journal again: the recorded facts go in, what comes out must be what was recorded.

It is teacher-forced: after each step the recorded decisions are folded, not those that came out, so
each divergence stands alone.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter

from journal.events import Decision, Record, StateCarried
from scheduler.evolve import fold
from scheduler.policy import POLICY_VERSION, decide
from scheduler.request import IllegalTransition
from scheduler.state import SchedulerState
from scheduler.views import ServerView, view_server


@dataclass(frozen=True, slots=True)
class Divergence:
    """A step whose facts lead to other decisions now. `problem` is set when the record cannot even
    be folded, and the replay ends there.

    `at_ns` is the step's time, `code_digest` that of the core which decided then, and `led_by` the
    state that was decided on: all facts of the step are in it, and none of its decisions. It is
    null when a fact could not be folded.
    """

    run_id: int
    step: int
    policy_version: int
    expected: tuple[Decision, ...]
    recorded: tuple[Decision, ...]
    problem: str = ""
    at_ns: int = 0
    code_digest: str = ""
    led_by: ServerView | None = None

    @property
    def of_other_policy(self) -> bool:
        """Whether the run decided by another policy than ours, so that a difference is no fault."""
        return self.policy_version != POLICY_VERSION


@dataclass(slots=True)
class Replay:
    """Deciding a journal again; iterate over `divergences` to run it. Counts are those so far, as
    are the versions of the policies that decided it, and `state` is what the records came to by
    then.
    """

    records: Iterable[Record]
    num_steps: int = 0
    num_decisions: int = 0
    policy_versions: set[int] = field(default_factory=set[int])
    state: SchedulerState = field(default_factory=SchedulerState)

    def divergences(self) -> Iterator[Divergence]:
        """Every step that comes out differently, in order."""
        state = self.state
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
        led_by: ServerView | None = None
        problem = problem_of(lambda: fold(state, records[:num_facts]))
        if not problem:
            self.policy_versions.add(state.policy_version)
            expected = tuple(decide(state))
            if expected != recorded:
                led_by = view_server(state, state.now_ns)
            problem = problem_of(lambda: fold(state, records[num_facts:]))
        if expected == recorded and not problem:
            return None
        return Divergence(
            run_id=records[0].run_id,
            step=step,
            policy_version=state.policy_version,
            expected=expected,
            recorded=recorded,
            problem=problem,
            at_ns=records[0].at_ns,
            code_digest=state.code_digest,
            led_by=led_by,
        )


def problem_of(folding: Callable[[], None]) -> str:
    """Why records cannot be folded; empty when they can."""
    try:
        folding()
    except (AssertionError, IllegalTransition, LookupError, ValueError) as error:
        return f"the record cannot be folded: {error!r}"
    return ""
