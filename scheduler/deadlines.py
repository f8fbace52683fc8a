"""When time itself must act: what the sensor of time is told by the state."""

from collections.abc import Iterator

from scheduler.adopting import MAX_LOST
from scheduler.draft import Draft
from scheduler.eviction import leave_disk
from scheduler.pausing import advance_pauses
from scheduler.request import Phase
from scheduler.resuming import waited_until_ns, waits_for_others
from scheduler.saving import kv_of
from scheduler.state import SchedulerState


def deadline_ns(state: SchedulerState) -> int | None:
    """The next time at which a decision is due though nothing happens, or nothing."""
    return min(deadlines(state), default=None)


def deadlines(state: SchedulerState) -> Iterator[int]:
    """All of them: now, while a bounded decision left blocks that must go; when a wait for blocks
    ends; when the oldest request is too old; when nobody has come for one without a client, or
    there are too many of these; while rows are left that a stop holds; when a wait for other
    programs ends.
    """
    kv = kv_of(state)
    if kv is not None:
        if state.index.bad or leave_disk(state, kv) or can_advance(state):
            yield state.now_ns
        yield from (until for until in deferrals(state) if until > state.now_ns)
    if state.limits is not None and state.limits.max_age_ns and state.requests:
        oldest = next(iter(state.requests.values()))
        yield oldest.received_ns + state.limits.max_age_ns
    for untils in (state.lost, state.found):
        if untils:
            yield next(iter(untils.values()))
    if len(state.lost) > MAX_LOST:
        yield state.now_ns
    if state.drained and any(state.requests[n].phase is not Phase.PAUSING for n in state.admitted):
        yield state.now_ns
    number = waits_for_others(state)
    if number is not None:
        yield waited_until_ns(state, state.requests[number])


def can_advance(state: SchedulerState) -> bool:
    """Whether a pause could go a stage on: what it waited for went without a fact."""
    if not state.pausing:
        return False
    draft = Draft()
    advance_pauses(state, draft)
    return bool(draft.decisions)


def deferrals(state: SchedulerState) -> Iterator[int]:
    """Until when requests at the head of the queue are deferred. Behind the first that is not,
    nobody can get in before it does.
    """
    for number in state.waiting:
        until_ns = state.requests[number].deferred_until_ns
        if until_ns == 0:
            return
        yield until_ns
