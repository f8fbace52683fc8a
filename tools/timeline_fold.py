"""From the events of a journal to a picture: the events are folded as the scheduler folds them, and
what changes is noted.
"""

from collections.abc import Iterable
from typing import Any

from journal import events
from journal.events import Record
from scheduler.evolve import evolve
from scheduler.request import IllegalTransition, Phase, Request
from scheduler.state import SchedulerState
from tools.timeline_bodies import add_step, body_of, decoded_body, ids_of, numbers_of
from tools.timeline_holds import Holds
from tools.timeline_kinds import GROUPS, UNDRAWN, group_of
from tools.timeline_parts import (
    PHASES,
    Away,
    Entry,
    Kind,
    Lane,
    Marks,
    Picture,
    Sample,
    Stretch,
)
from tools.timeline_window import NoPicture, Window

MAX_ENTRIES = 50_000
"""Events of one picture, decode steps of one batch counted once: what a browser shows smoothly."""

OUTCOMES = {
    "request_finished": "finished",
    "request_cancelled": "cancelled",
    "request_aborted": "aborted",
    "request_rejected": "rejected",
    "request_joined": "joined",
}
EVERYBODY = (events.StateCarried, events.ServerStarted)
"""Events that may change every open request."""


def picture_of(records: Iterable[Record], journal: str, window: Window) -> Picture:
    """Folds all records up to the window's end, and draws those that lie in it, or what goes on
    where it lies between two. Raises NoPicture when it is outside of the journal, when records are
    too many, and when one cannot be folded.
    """
    drawing = Drawing(journal, window)
    for record in records:
        if record.seq > window.last_seq or record.at_ns > window.last_ns:
            drawing.pass_over(record)
            break
        try:
            drawing.add(record)
        except (AssertionError, IllegalTransition, LookupError, ValueError) as error:
            raise NoPicture(f"{journal}: event {record.seq} cannot be folded: {error}") from error
    return drawing.finish()


class Drawing:
    """A picture while it is made: the state so far, and where each lane is."""

    def __init__(self, journal: str, window: Window) -> None:
        self.window = window
        self.state = SchedulerState()
        self.picture = Picture(journal=journal, what=window.what, groups=GROUPS, undrawn=UNDRAWN)
        self.holds = Holds(self.picture.holds)
        self.began = False
        self.base_ns = 0
        self.least_end_ns = 0
        self.lanes: dict[int, int] = {}
        self.ids: dict[str, int] = {}
        self.kinds: dict[tuple[str, str], int] = {}
        self.decoding: Entry | None = None

    def add(self, record: Record) -> None:
        """Folds a record, and draws it where it lies in the window."""
        state, event = self.state, record.event
        if not self.began and self.window.begins_by(record.seq, record.at_ns):
            self.begin(record.seq, record.at_ns)
        if not self.began:
            evolve(state, record)
            return
        if isinstance(event, events.ServerStarted):
            self.note_away(record)
        ended = self.ending(event)
        evolve(state, record)
        at_ns = record.at_ns - self.base_ns
        self.note_requests(record, at_ns)
        if ended is not None:
            self.end(ended, at_ns, record)
        self.note_memory(record, at_ns)
        self.note_entry(record, at_ns)

    def begin(self, seq: int, base_ns: int) -> None:
        """The picture begins: who is open by now has a lane from its start."""
        self.began = True
        self.base_ns = base_ns
        self.picture.base_ns = str(base_ns)
        self.picture.first_seq = seq
        self.note_marks(0)
        for request in self.state.requests.values():
            self.look_at(request, 0, None)

    def finish(self) -> Picture:
        """The picture of what was added. Raises NoPicture when that is nothing."""
        picture, state = self.picture, self.state
        if not self.began:
            what = f"nothing of the journal lies in this window ({self.window.what})"
            raise NoPicture(f"{picture.journal}: {what}")
        picture.last_seq = state.seq
        picture.end_ns = max(state.now_ns, self.least_end_ns) - self.base_ns
        picture.num_events = state.seq - picture.first_seq + 1
        picture.model = state.model.name if state.model is not None else ""
        return picture

    def pass_over(self, record: Record) -> None:
        """The first record behind the window. Where none lies in it but some before, it shows what
        goes on between them.
        """
        window = self.window
        if self.began or not window.is_behind(self.state.seq):
            return
        self.begin(self.state.seq + 1, window.first_ns)
        self.least_end_ns = window.last_ns
        if isinstance(record.event, events.ServerStarted):
            self.note_away(record)

    # Requests

    def note_requests(self, record: Record, at_ns: int) -> None:
        """Looks at every request that the event may have changed."""
        event = record.event
        if isinstance(event, EVERYBODY):
            for request in self.state.requests.values():
                self.look_at(request, at_ns, record)
            return
        for number in self.numbers_named(event):
            request = self.state.requests.get(number)
            if request is not None:
                self.look_at(request, at_ns, record)

    def numbers_named(self, event: events.AnyEvent) -> list[int]:
        """The numbers of the open requests that the event names."""
        found = [self.state.numbers.get(request_id, 0) for request_id in ids_of(event)]
        return [*found, *numbers_of(event)]

    def look_at(self, request: Request, at_ns: int, record: Record | None) -> None:
        """Where a request is now, if that has changed."""
        index = self.lane_of(request)
        if index is None:
            return
        lane, phase = self.picture.lanes[index], PHASES.index(request.phase.value)
        if not lane.stretches or lane.stretches[-1].phase != phase:
            lane.stretches.append(Stretch(at_ns, phase))
        self.holds.look_at(request, index, at_ns, record, self.base_ns)
        note_alone(lane, at_ns, alone=request.orphaned_by is not None)

    def lane_of(self, request: Request) -> int | None:
        """The place of a request's lane, which it may get now; null: it is not shown."""
        index = self.lanes.get(request.number)
        if index is not None or self.window.request_id not in (None, request.request_id):
            return index
        lane = Lane(
            request_id=request.request_id,
            number=request.number,
            num_prompt_tokens=request.num_prompt_tokens,
        )
        index = len(self.picture.lanes)
        self.picture.lanes.append(lane)
        self.lanes[request.number] = index
        self.ids[request.request_id] = index
        return index

    def ending(self, event: events.AnyEvent) -> int | None:
        """The lane of the request that this event ends, while it can still be found."""
        if type(event).__struct_config__.tag not in OUTCOMES:
            return None
        return self.ids.get(ids_of(event)[0])

    def end(self, index: int, at_ns: int, record: Record) -> None:
        """The lane's request has ended."""
        lane = self.picture.lanes[index]
        lane.end_ns = at_ns
        lane.outcome = OUTCOMES[kind_of(record)]
        note_alone(lane, at_ns, alone=False)
        self.holds.leave(index, at_ns, lane.outcome)

    # Memory and runs

    def note_memory(self, record: Record, at_ns: int) -> None:
        """A reading as the scheduler took it, and marks when a run begins."""
        if isinstance(record.event, EVERYBODY):
            self.note_marks(at_ns)
        if not isinstance(record.event, events.MemorySampled):
            return
        memory, event = self.state.memory, record.event
        read_bytes = event.active_bytes + event.cached_bytes
        self.picture.samples.append(
            Sample(
                at_ns=at_ns,
                seq=record.seq,
                usage_bytes=memory.usage_bytes or read_bytes,
                read_bytes=read_bytes,
                ceiling_bytes=memory.ceiling_bytes,
                level=memory.level,
            )
        )

    def note_marks(self, at_ns: int) -> None:
        """The marks of the run that is there now."""
        limits = self.state.limits
        if limits is None or limits.memory is None or limits.ceiling_bytes is None:
            return
        memory = limits.memory
        marks = (memory.low_permille, memory.high_permille, memory.emergency_permille)
        self.picture.marks.append(Marks(at_ns, *marks, limits.ceiling_bytes))

    def note_away(self, record: Record) -> None:
        """A run begins: was there a time without a server before it?"""
        state = self.state
        if state.limits is None:
            return
        self.picture.aways.append(
            Away(
                begin_ns=max(0, state.now_ns - self.base_ns),
                end_ns=min(record.at_ns, self.window.last_ns) - self.base_ns,
                died=not state.stopping,
                last_seq=state.seq,
                run_id=state.run_id,
            )
        )

    # Events

    def note_entry(self, record: Record, at_ns: int) -> None:
        """The event as it is shown. Decode steps of one batch are told together."""
        event = record.event
        lanes = self.lanes_of(event)
        if self.window.request_id is not None and not lanes and speaks_of_others(event):
            return
        if isinstance(event, events.TokensDecoded):
            if self.joins(event):
                return
            entry = self.entry(record, at_ns, lanes, decoded_body(event))
            self.decoding = None if event.ended else entry
            return
        self.entry(record, at_ns, lanes, body_of(event, has_lane=bool(lanes)))

    def joins(self, event: events.TokensDecoded) -> bool:
        """Adds the step to those before it, if it is of the same batch and ends nobody."""
        entry = self.decoding
        if entry is None or event.ended or entry.body["batch"] != event.batch:
            return False
        add_step(entry.body, event)
        entry.last_seq = self.state.seq
        entry.until_ns = self.state.now_ns - self.base_ns
        return True

    def entry(self, record: Record, at_ns: int, lanes: list[int], body: dict[str, Any]) -> Entry:
        """Puts an event into the picture. Raises NoPicture when it is one too many."""
        entries = self.picture.entries
        if len(entries) >= MAX_ENTRIES:
            raise NoPicture(
                f"{self.picture.journal}: more than {MAX_ENTRIES} events lie in this window "
                f"({self.window.what}); the first of them, to seq {record.seq - 1}, would fit: "
                "narrow it with --since, --until or --request"
            )
        kind = self.kind_index(record)
        made = Entry(record.seq, record.step, at_ns, kind, lanes, body, record.seq, at_ns)
        entries.append(made)
        return made

    def lanes_of(self, event: events.AnyEvent) -> list[int]:
        """The lanes of all requests that the event is about."""
        by_id = [self.ids[name] for name in ids_of(event) if name in self.ids]
        by_number = [self.lanes[number] for number in numbers_of(event) if number in self.lanes]
        return by_id + by_number

    def kind_index(self, record: Record) -> int:
        """The place of the event's kind among those of the picture."""
        name = kind_of(record)
        kind = Kind(name, group_of(name, record.event), record.source)
        place = self.kinds.setdefault((kind.name, kind.group), len(self.kinds))
        if place == len(self.picture.kinds):
            self.picture.kinds.append(kind)
        return place


def kind_of(record: Record) -> str:
    """The kind of a record's event."""
    kind = type(record.event).__struct_config__.tag
    assert isinstance(kind, str), "every event has its kind as its tag"
    return kind


def speaks_of_others(event: events.AnyEvent) -> bool:
    """Whether an event is about requests, and so not about a server that all share."""
    return bool(ids_of(event)) or isinstance(event, events.TokensDecoded | events.BatchChanged)


def note_alone(lane: Lane, at_ns: int, *, alone: bool) -> None:
    """A request has lost its client, or found one."""
    is_open = bool(lane.alone) and lane.alone[-1][1] is None
    if alone and not is_open:
        lane.alone.append([at_ns, None])
    elif not alone and is_open:
        lane.alone[-1][1] = at_ns


assert tuple(phase.value for phase in Phase)[: len(PHASES)] == PHASES
