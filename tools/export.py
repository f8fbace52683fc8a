"""`fermata journal export`: part of a journal as a bundle that can be sent to somebody."""

import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec

from journal.bundle import Window, export, refuse_changed
from journal.errors import JournalError
from journal.events import Record
from journal.moments import bounds, end_of_step, last_before, whole_step
from journal.points import Point, newest_point
from journal.reader import JournalReader
from scheduler.evolve import evolve
from scheduler.recovery import code_digest, decode_state
from scheduler.state import STATE_VERSION, SchedulerState
from tools.replay_life import NoSuchRequest, find_request
from tools.times import NoTime, moment

DONE, UNUSABLE = 0, 2


class NoWindow(Exception):
    """What was asked for is no part of the journal. One line."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which part: from a time, to a time, or the life of one request; and whether with tokens."""

    since: str | None = None
    until: str | None = None
    request: str | None = None
    with_tokens: bool = False


def run(path: Path, file: Path, wanted: Wanted) -> int:
    """Writes the bundle and says what is in it. Returns 0, or 2 when the journal cannot be read,
    nothing of it lies in the window, or the bundle cannot be written.
    """
    try:
        with JournalReader.open(path) as reader:
            refuse_changed(reader)
            window = window_of(reader, wanted)
            state, point = state_before(reader, window)
            tokens = wanted.with_tokens
            bundle = export(reader, file, window, Before(state), point, with_tokens=tokens)
    except (JournalError, NoWindow, NoTime, NoSuchRequest) as error:
        print(f"fermata journal export: {error}", file=sys.stderr)
        return UNUSABLE
    steps = f"steps {bundle.first_step} to {bundle.last_step}"
    size = f"{bundle.num_bytes / 1e6:.1f} MB"
    tokens = "without prompts and answers"
    if wanted.with_tokens:
        count = f"{bundle.num_prompts} of {bundle.num_requests} requests"
        tokens = f"with prompts and answers of {count}"
    print(f"{bundle.file}: {bundle.num_events} events, {steps}, {size}, {tokens}")
    return DONE


def window_of(reader: JournalReader, wanted: Wanted) -> Window:
    """The window in whole steps. Raises NoWindow, NoTime, NoSuchRequest."""
    with reader.transaction() as run:
        ends = bounds(run)
        if ends is None:
            raise NoWindow("the journal has no events")
        first, last = ends
        last_ns: int = run("SELECT at_ns FROM events WHERE seq = ?", (last,)).scalar_one()
        words: list[str] = []
        through, until = first - 1, last
        if wanted.request is not None:
            request_id = find_request(reader, wanted.request)
            words = [f"request {request_id}"]
            query = "SELECT min(seq), max(seq) FROM events WHERE request_id = ?"
            begin, end = run(query, (request_id,)).one()
            through, until = first - 1 if begin is None else begin - 1, end or last
        if wanted.since is not None:
            words.append(f"since {wanted.since}")
            through = max(through, last_before(run, first, last, moment(wanted.since, last_ns)))
        if wanted.until is not None:
            words.append(f"until {wanted.until}")
            until = min(until, last_before(run, first, last, moment(wanted.until, last_ns) + 1))
        if until <= through:
            raise NoWindow(f"nothing of the journal lies in this window ({', '.join(words)})")
        through = first - 1 if through < first else end_of_step(run, through)
        return Window(
            through_seq=0 if through < first else through,
            until_seq=whole_step(run, until),
            what=", ".join(words) or "all of it",
        )


def state_before(reader: JournalReader, window: Window) -> tuple[SchedulerState, Point | None]:
    """From where what lies before the window is folded: the newest point, or the journal's
    beginning, where there is none. Raises JournalError for a point that cannot be read.
    """
    try:
        with reader.transaction() as run:
            point = newest_point(run, window.through_seq, STATE_VERSION, code_digest())
        return SchedulerState() if point is None else decode_state(point.state), point
    except msgspec.MsgspecError as error:
        raise JournalError(
            f"{reader.file}: what is kept of an earlier state cannot be read ({error}); `fermata "
            "journal verify` says more"
        ) from error


class Before:
    """The state of the scheduler before the window, folded as the export reads its events."""

    def __init__(self, state: SchedulerState) -> None:
        self.state = state

    def fold(self, record: Record) -> None:
        """One event more."""
        evolve(self.state, record)

    def carried(self) -> tuple[int, dict[str, object]]:
        """The state as it is now, as builtins, with its version."""
        return STATE_VERSION, msgspec.to_builtins(self.state, str_keys=True)
