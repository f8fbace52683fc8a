"""What is promised at every moment of a simulation, beside the invariants of the state: checked
against what a simulation knows, and the scheduler does not.
"""

from dataclasses import dataclass, field

from journal import events
from journal.events import AnyEvent
from scheduler.request import Phase, Request
from scheduler.simulation.choices import Choices
from scheduler.simulation.disk import SimulatedDisk
from scheduler.simulation.doors import Doors
from scheduler.state import SchedulerState

End = events.RequestFinished | events.RequestAborted | events.RequestCancelled

STANDING = (Phase.WAITING, Phase.PAUSING, Phase.PAUSED)
"""Where a request does not go on."""


@dataclass
class Promises:
    """`keyed` are the requests that came with a key, `pinned` those whose chain is pinned,
    `cancelled` those that somebody wanted to end, `ended` those that have ended.
    """

    doors: Doors
    disk: SimulatedDisk
    keyed: set[str] = field(default_factory=set[str])
    pinned: set[str] = field(default_factory=set[str])
    cancelled: set[str] = field(default_factory=set[str])
    ended: set[str] = field(default_factory=set[str])
    choices: Choices = field(default_factory=Choices)

    def note(self, state: SchedulerState, event: AnyEvent) -> None:
        """Each event as it is committed; the facts of its step are folded, its decisions not."""
        self.choices.note(state, event)
        match event:
            case events.RequestReceived() if event.key_digest:
                self.keyed.add(event.request_id)
            case events.CancelRequested():
                self.cancelled.add(event.request_id)
            case events.ChainPinned() if event.num_blocks or event.tail_bytes:
                self.pinned.add(event.request_id)
            case events.ChainUnpinned() | events.KvDropped():
                self.pinned.discard(event.request_id)
            case events.RequestResumed():
                self.goes_on(event)
            case events.RequestAdopted():
                self.is_adopted(state, event)
            case events.BlocksEvicted():
                blocks = [state.index.blocks.get(name) for name in event.hashes]
                there = [block for block in blocks if block is not None]
                assert not any(block.pins for block in there), "a pinned block goes"
                assert not any(block.leases for block in there), "a block that is in use goes"
            case events.RequestFinished() | events.RequestAborted() | events.RequestCancelled():
                assert event.request_id not in self.ended, f"{event.request_id} ends twice"
                self.ended.add(event.request_id)
                adds_up(state, event)
            case _:
                pass

    def goes_on(self, event: events.RequestResumed) -> None:
        """From exactly where it was, unless its files are not what they were."""
        is_whole = event.request_id in self.pinned and not self.disk.was_damaged
        lost = event.num_lost_tokens
        assert not (is_whole and lost), f"{event.request_id} lost {lost} tokens of a pinned chain"

    def is_adopted(self, state: SchedulerState, event: events.RequestAdopted) -> None:
        """Only what nobody wanted to end, and, without a key, what nobody reads. What has finished
        is kept for so long.
        """
        request_id = event.request_id
        assert request_id not in self.cancelled, f"{request_id} was cancelled, and is adopted"
        if event.by == "content":
            assert request_id not in self.keyed, f"{request_id} has a key, and is adopted without"
            assert not self.num_clients(request_id), f"{request_id} is read, and is adopted"
        finished = state.remembered.get(request_id)
        is_kept = finished is None or finished.until_ns > state.now_ns
        assert is_kept, f"{request_id} is adopted, and its time was over"

    def num_clients(self, request_id: str) -> int:
        """How many connections follow an open request."""
        assert self.doors.loop is not None, "a step was taken"
        stream = self.doors.loop.hub.open.get(request_id)
        return 0 if stream is None else stream.num_clients

    def check(self, state: SchedulerState) -> None:
        """After each step: who is believed to have a client has one, and who needs one stands."""
        assert self.doors.loop is not None, "a step was taken"
        wishes = self.doors.loop.sensors.wishes.values()
        for request in state.requests.values():
            where = f"{request.request_id} ({request.phase.value})"
            told = events.ClientGone(request_id=request.request_id) in wishes
            has_client = request.orphaned_by is None and request.cancel_reason is None
            if has_client and not told:
                assert self.num_clients(request.request_id), f"{where} has no client"
            assert not request.needs_client or stands(request), f"{where} goes on without a client"
        for number in state.admitted if state.drained else ():
            phase = state.requests[number].phase
            assert phase is Phase.PAUSING, f"{number} is {phase.value} after the end of a drain"

    def lose_power(self, ended: set[str]) -> None:
        """The machine was switched off: these ends are left, and nothing else is known."""
        self.ended = ended
        self.pinned.clear()
        self.cancelled.clear()


def adds_up(state: SchedulerState, event: End) -> None:
    """A prompt is what came from memory, from disk and by prefill; of one that has not finished it
    is that at most.
    """
    parts = (event.num_memory_tokens, event.num_disk_tokens, event.num_prefilled_tokens)
    whole = state.get(event.request_id).num_prompt_tokens
    is_all = sum(parts) == whole or not isinstance(event, events.RequestFinished)
    where = f"{event.request_id} ends with {parts} of its prompt of {whole} tokens"
    assert min(parts) >= 0, where
    assert sum(parts) <= whole, where
    assert is_all, where


def stands(request: Request) -> bool:
    """Whether a request does not go on."""
    return request.phase in STANDING
