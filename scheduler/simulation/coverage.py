"""What a simulation has met: each of the situations that it must not miss, counted as it comes."""

from collections import Counter
from collections.abc import Iterable

from journal import events
from journal.events import AnyEvent, Decision
from scheduler.request import Phase
from scheduler.state import SchedulerState

PHASES = tuple(phase.value for phase in Phase if phase.value in (
    "waiting", "prefilling", "decoding", "pausing", "paused", "resuming"
))  # fmt: skip

WANTED = (
    "pause during prefill",
    "pause during decode",
    "pause during restore",
    *(f"crash while {phase}" for phase in PHASES),
    "crash while pinning",
    "crash while starting",
    "loss of power",
    "clean stop with rows",
    "second signal",
    "another model",
    "disk full during a tail",
    "disk broken during a tail",
    "bad block at a resume",
    "bad tail at a resume",
    "eviction of what a request waits to match",
    "disconnect while waiting",
    "disconnect while computing",
    "disconnect while paused",
    "adoption of an open request",
    "adoption of a finished request",
    "adoption by key",
    "key of another question",
    "grace over",
    "solo",
    "rung: reclaim",
    "rung: tier",
    "rung: pause",
    "rung: drop",
    "rung: abort",
    "emergency with nothing to pause",
    "clock jump",
    "full journal",
    "retry",
)
"""All of them."""


class Coverage(Counter[str]):
    """How often each was met. `note` sees each event as it is committed: the state has the facts of
    its step by then, and not the decisions.
    """

    def missing(self) -> list[str]:
        """What was never met."""
        return [name for name in WANTED if not self[name]]

    def meet(self, *names: str) -> None:
        """Counts situations, which are among those wanted."""
        for name in names:
            assert name in WANTED, f"{name} is not counted"
            self[name] += 1

    def note(self, state: SchedulerState, event: AnyEvent) -> None:
        """What an event says has happened."""
        self.meet(*situations(state, event))

    def crash(self, state: SchedulerState, last: Iterable[Decision]) -> None:
        """The process dies in this state, with these decisions in its last commit."""
        self.meet(*(f"crash while {r.phase.value}" for r in state.requests.values()))
        is_saved = any(
            r.phase is Phase.PAUSING and r.saved_tokens >= 0 for r in state.requests.values()
        )
        if is_saved or any(isinstance(decision, events.ChainPinned) for decision in last):
            self.meet("crash while pinning")


def situations(state: SchedulerState, event: AnyEvent) -> list[str]:
    """The situations that an event is."""
    match event:
        case events.PauseStarted() | events.RequestPaused():
            return pause(state, event)
        case events.ClientGone():
            return client_gone(state, event)
        case events.RequestAdopted():
            where = "an open" if event.number in state.requests else "a finished"
            return ["adoption by key" if event.by == "key" else f"adoption of {where} request"]
        case events.BlocksEvicted():
            waiting = (state.requests[number] for number in state.waiting)
            wanted = {name for request in waiting for name in request.hashes}
            return ["eviction of what a request waits to match"] * (
                not wanted.isdisjoint(event.hashes)
            )
        case events.BlockCorrupt() | events.ChainRestoreFailed():
            return bad_file(state, event)
        case events.ChainSaveFailed():
            tails = {
                "disk_full": "disk full during a tail",
                "io_error": "disk broken during a tail",
            }
            return [tails[event.reason]] if event.reason in tails else []
        case _:
            return rung(event) + other(event)


def pause(state: SchedulerState, event: events.PauseStarted | events.RequestPaused) -> list[str]:
    """A row that is held, by what it was doing."""
    request = state.requests[event.number]
    rungs = ["rung: pause"] * (event.reason in ("high", "emergency", "no_room"))
    if isinstance(event, events.RequestPaused):
        return ["pause during restore"] * (request.phase is Phase.RESUMING)
    if request.restoring:
        return [*rungs, "pause during restore"]
    if request.phase is Phase.DECODING:
        return [*rungs, "pause during decode"]
    return [*rungs, "pause during prefill"]


def client_gone(state: SchedulerState, event: events.ClientGone) -> list[str]:
    """A client that leaves an open request, by what that is doing. The fact is folded already."""
    request = state.find(event.request_id)
    if request is None:
        return []
    match request.phase:
        case Phase.PAUSED | Phase.PAUSING | Phase.RESUMING:
            return ["disconnect while paused"]
        case Phase.WAITING:
            return ["disconnect while waiting"]
        case _:
            return ["disconnect while computing"]


def bad_file(
    state: SchedulerState, event: events.BlockCorrupt | events.ChainRestoreFailed
) -> list[str]:
    """A file that a restore finds to be of no use, where a held request is going on."""
    if isinstance(event, events.ChainRestoreFailed):
        return ["bad tail at a resume"]
    resuming = (r for r in state.requests.values() if r.phase is Phase.RESUMING)
    return ["bad block at a resume"] * any(event.hash in r.hashes for r in resuming)


def rung(event: AnyEvent) -> list[str]:
    """What is done against pressure beside pauses."""
    match event:
        case events.ReclaimStarted():
            return ["rung: reclaim"]
        case events.TierShrunk(reason="pressure"):
            return ["rung: tier"]
        case events.KvDropped():
            return ["rung: drop"]
        case events.RequestAborted(reason="memory"):
            return ["rung: abort"]
        case events.EmergencyDeclared(num_admitted=0):
            return ["emergency with nothing to pause"]
        case _:
            return []


def other(event: AnyEvent) -> list[str]:
    """What is told by the event alone."""
    match event:
        case events.RequestAdmitted(solo=True) | events.ResumeStarted(solo=True):
            return ["solo"]
        case events.RequestRejected(reason="key_reused"):
            return ["key of another question"]
        case events.RequestCancelled(reason="client_gone" | "nobody_attached"):
            return ["grace over"]
        case events.RequestRetried():
            return ["retry"]
        case _:
            return []
