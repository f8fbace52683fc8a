"""What a bundle begins with, and a journal that was shortened: the state by then, in place of the
events before it.
"""

from journal.events import StateCarried
from scheduler.request import Request
from scheduler.runs import state_carried
from scheduler.state import STATE_VERSION, SchedulerState


class NothingRecorded(Exception):
    """The journal has nothing from which a what-if could start. One line."""


def state_of(event: StateCarried) -> SchedulerState:
    """The carried state. Raises NothingRecorded for that of a release whose state was another."""
    if event.state_version != STATE_VERSION:
        raise NothingRecorded(
            f"begins with a state of version {event.state_version}, and this release knows"
            f" {STATE_VERSION}: ask the release that wrote it"
        )
    state = SchedulerState()
    state_carried(state, event)
    return state


def open_requests(state: SchedulerState) -> list[Request]:
    """The requests of the served model that were open, in the order in which they would get a row:
    those in the engine, the held ones, the queue. What waits for another model is left out.
    """
    first = [*state.admitted, *state.pausing, *state.paused, *state.waiting]
    ordered = dict.fromkeys([*first, *state.requests])
    found = [state.requests[number] for number in ordered if number in state.requests]
    return [request for request in found if request.held_reason != "other_model"]
