"""Who was held, when and why: put together from what the events make of each request."""

from journal import events
from journal.events import Record
from scheduler.request import Phase, Request
from tools.timeline_parts import Hold

HELD = (Phase.PAUSING, Phase.PAUSED, Phase.RESUMING)
"""From the decision to hold it until it goes on: one that is held again before its row was filled
has one hold, as it has one row of the view `pauses`.
"""


class Holds:
    """The holds of a picture, in the order in which they began. `open` are those that are not over,
    by lane.
    """

    def __init__(self, found: list[Hold]) -> None:
        self.found = found
        self.open: dict[int, Hold] = {}

    def look_at(
        self, request: Request, lane: int, at_ns: int, record: Record | None, base_ns: int
    ) -> None:
        """Where the request is after an event; `record` is null for what was before the picture."""
        if request.phase not in HELD:
            self.leave(lane, at_ns, request.phase.value)
            return
        hold = self.open.get(lane)
        if hold is None:
            hold = self.begin(request, lane, at_ns, record)
            if was_before(record) and request.phase is not Phase.PAUSING:
                hold.begin_ns = request.paused_ns - base_ns
                hold.paused_ns = hold.begin_ns
        if request.phase is Phase.PAUSED and hold.paused_ns is None:
            hold.paused_ns = at_ns

    def begin(self, request: Request, lane: int, at_ns: int, record: Record | None) -> Hold:
        """A hold begins: by a pause of its row, or at once where it had none."""
        hold = Hold(
            lane=lane,
            seq=0 if record is None or was_before(record) else record.seq,
            begin_ns=at_ns,
            reason=request.pause_reason or "",
        )
        if record is not None and isinstance(record.event, events.PauseStarted):
            give_numbers(hold, record.event)
        self.open[lane] = hold
        self.found.append(hold)
        return hold

    def leave(self, lane: int, at_ns: int, became: str) -> None:
        """The request is not held any more, if it was."""
        hold = self.open.pop(lane, None)
        if hold is not None:
            hold.end_ns = at_ns
            hold.became = became


def was_before(record: Record | None) -> bool:
    """Whether what is so now began before the picture: its first record does not say when."""
    return record is None or isinstance(record.event, events.StateCarried)


def give_numbers(hold: Hold, event: events.PauseStarted) -> None:
    """What the decision was made on."""
    hold.rank = event.rank
    hold.num_candidates = event.num_candidates
    hold.usage_bytes = event.usage_bytes
    hold.ceiling_bytes = event.ceiling_bytes
    hold.frees_bytes = event.frees_bytes
    hold.unsaved_bytes = event.unsaved_bytes
