"""What is promised of each choice that the policy makes: who gets a row, who is held, who goes on,
and what is fed. Reckoned anew, and more simply, from the state on which it was made.
"""

from dataclasses import dataclass, field

from journal import events
from journal.events import AnyEvent, Limits, ModelFacts
from scheduler.request import Phase, Request
from scheduler.state import SchedulerState

UNDER_PRESSURE = ("high", "emergency", "no_room")

Placed = events.RequestAdmitted | events.ResumeStarted
Gone = (
    events.PauseStarted
    | events.RequestPaused
    | events.RequestRetried
    | events.RequestFinished
    | events.RequestCancelled
    | events.RequestAborted
    | events.ResumeStarted
)


@dataclass
class Choices:
    """`gone` are requests that decisions of this step have moved so far, `placed_bytes` what those
    took that got a row in it.
    """

    step: tuple[int, int] = (0, 0)
    gone: set[int] = field(default_factory=set[int])
    placed_bytes: int = 0

    def note(self, state: SchedulerState, event: AnyEvent) -> None:
        """Each event as it is committed; the facts of its step are folded, its decisions not."""
        if self.step != (state.run_id, state.step):
            self.step = (state.run_id, state.step)
            self.gone = set()
            self.placed_bytes = 0
        match event:
            case events.RequestAdmitted():
                self.has_room(state, event)
            case events.ResumeStarted():
                self.has_room(state, event)
                self.is_next(state, event)
            case events.PauseStarted() if event.reason in UNDER_PRESSURE:
                self.is_held(state, event)
            case events.PrefillChunkPlanned():
                self.chunk_has_room(state, event)
            case _:
                pass
        if isinstance(event, Gone):
            self.gone.add(event.number)

    def has_room(self, state: SchedulerState, event: Placed) -> None:
        """A row that comes to others stays below the low mark, one that is alone below the
        ceiling.
        """
        model, limits, ceiling_bytes = sizes_of(state)
        if ceiling_bytes is None or limits.memory is None:
            return
        is_alone = not (state.admitted or state.leaving or self.placed_bytes)
        permille = 1000 if is_alone else limits.memory.low_permille
        self.placed_bytes += event.reserved_bytes
        chunk_tokens = max(limits.chunk_tokens, limits.chunk_tokens_beside_rows)
        needed = model.weights_bytes + model.transient_bytes_per_token * chunk_tokens
        needed += taken_bytes(state) + self.placed_bytes
        where = f"{event.request_id} gets a row, and {needed} bytes are in use then"
        assert needed <= ceiling_bytes * permille // 1000, f"{where}: too many"

    def is_next(self, state: SchedulerState, event: events.ResumeStarted) -> None:
        """Of those that are held, who was in the engine first goes on first."""
        request = state.requests[event.number]
        for other in map(state.requests.__getitem__, state.paused):
            stands_back = other.number in self.gone or other.stays_held
            assert stands_back or rank_of(other) >= rank_of(request), (
                f"{request.request_id} goes on before {other.request_id}"
            )

    def is_held(self, state: SchedulerState, event: events.PauseStarted) -> None:
        """Two readings say so, one thing is done at a time, and it is neither the oldest row nor
        one that has only just gone on.
        """
        memory, request = state.memory, state.requests[event.number]
        who = f"{request.request_id} is held ({event.reason})"
        rows = [
            row
            for row in map(state.requests.__getitem__, state.admitted)
            if row.phase is not Phase.PAUSING and row.number not in self.gone
        ]
        if len(rows) > 1:
            assert request is not min(rows, key=rank_of), f"{who}, and is the oldest"
        else:
            assert len(state.admitted) == 1, f"{who} while others are on their way out"
            assert event.reason == "emergency", f"{who}, and is alone"
            assert not request.dropped_alone, f"{who} for the second time, and is alone"
        if event.reason == "high":
            assert memory.num_high >= 2, f"{who} after {memory.num_high} readings"
            assert not state.reliefs, f"{who} while something else is done"
            assert has_gained(state, request), f"{who}, and has only just gone on"
        if event.reason == "emergency":
            assert memory.num_emergency >= 2, f"{who} after {memory.num_emergency} readings"

    def chunk_has_room(self, state: SchedulerState, event: events.PrefillChunkPlanned) -> None:
        """What is fed beside other rows stays below the ceiling while it is computed."""
        model, _, ceiling_bytes = sizes_of(state)
        others = [number for number in state.admitted if number != event.number]
        if ceiling_bytes is None or not (others or state.leaving):
            return
        row = state.requests[event.number]
        grown_bytes = bytes_of(model, event.start + event.length)
        needed = model.weights_bytes + model.transient_bytes_per_token * event.length
        needed += taken_bytes(state) + max(0, grown_bytes - row_bytes(model, row))
        assert needed <= ceiling_bytes, f"a chunk of {event.request_id} has no room: {needed} bytes"


def sizes_of(state: SchedulerState) -> tuple[ModelFacts, Limits, int | None]:
    """What is decided by, once a server has started."""
    assert state.model is not None, "who decides knows the model"
    assert state.limits is not None, "who decides knows the limits"
    return state.model, state.limits, state.memory.ceiling_bytes


def taken_bytes(state: SchedulerState) -> int:
    """What rows have or have reserved, those that are leaving hold, and writers have in hand."""
    model, _, _ = sizes_of(state)
    rows = sum(row_bytes(model, state.requests[number]) for number in state.admitted)
    return rows + sum(state.leaving.values()) + state.index.writing_bytes


def row_bytes(model: ModelFacts, request: Request) -> int:
    """What a row has, or has reserved."""
    num_tokens = max(request.num_cached_tokens, request.room_tokens)
    return max(request.reserved_bytes, bytes_of(model, num_tokens))


def bytes_of(model: ModelFacts, num_tokens: int) -> int:
    """What so many tokens take in a row of the simulation's models, which have no windows."""
    step = model.kv_step_tokens
    return model.state_bytes + model.kv_bytes_per_token * (-(-num_tokens // step) * step)


def rank_of(request: Request) -> tuple[int, int]:
    """Who was in the engine first, and of those who never were, who was queued first."""
    return request.first_admitted_seq or request.queued_seq, request.number


def has_gained(state: SchedulerState, request: Request) -> bool:
    """Whether it has made some progress since it was held last."""
    limits = state.limits
    if request.resumed_tokens is None or limits is None or limits.memory is None:
        return True
    gained = request.num_cached_tokens - request.resumed_tokens
    return gained >= limits.memory.min_progress_tokens
