"""Which part of a journal a picture shows."""

import re
from dataclasses import dataclass
from datetime import UTC, datetime

from journal.queries import last_position
from journal.reader import JournalReader
from tools.replay_life import find_request

UNITS_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
NS_PER_S = 1_000_000_000
MAX_SEQ = 2**63 - 1


class NoPicture(Exception):
    """There is nothing to draw, or too much. One line, with what to do."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """From which event or time, up to which, and whether one request alone, as it was given."""

    since: str | None = None
    until: str | None = None
    request: str | None = None

    def __str__(self) -> str:
        words = [
            f"{name} {value}"
            for name in ("since", "until", "request")
            if (value := getattr(self, name)) is not None
        ]
        return ", ".join(words) or "all of it"


@dataclass(frozen=True, slots=True)
class Window:
    """Events from `first_seq` and from `first_ns` on, up to and with `last_seq` and `last_ns`, and
    the request that is shown alone, if any.
    """

    what: str
    first_seq: int
    last_seq: int
    first_ns: int
    last_ns: int
    request_id: str | None = None

    def begins_by(self, seq: int, at_ns: int) -> bool:
        """Whether this event, or one before it, is the first that is shown."""
        return seq >= self.first_seq and at_ns >= self.first_ns

    def is_behind(self, seq: int) -> bool:
        """Whether a window without events is behind this one, 0 for none, and not a reversed one or
        of a request that came later.
        """
        return 0 < self.first_seq <= seq and self.first_ns <= self.last_ns


def window_of(reader: JournalReader, wanted: Wanted) -> Window:
    """What is wanted of this journal as it is now: what a server adds later is not shown. Raises
    NoPicture, and NoSuchRequest of tools/replay_life.py.
    """
    with reader.transaction() as run:
        last = last_position(run)
    if last.seq == 0:
        raise NoPicture(f"{reader.file}: the journal has no events")
    request_id = None if wanted.request is None else find_request(reader, wanted.request)
    first_seq, first_ns = bound(wanted.since, last.at_ns, (1, 0))
    last_seq, last_ns = bound(wanted.until, last.at_ns, (last.seq, last.at_ns))
    if request_id is not None:
        begin_seq, end_seq = life_of(reader, request_id)
        first_seq, last_seq = max(first_seq, begin_seq), min(last_seq, end_seq)
    return Window(str(wanted), first_seq, min(last_seq, last.seq), first_ns, last_ns, request_id)


def life_of(reader: JournalReader, request_id: str) -> tuple[int, int]:
    """The first event that names the request and the last, or the journal's while it is open."""
    row = reader.request(request_id)
    with reader.transaction() as run:
        query = "SELECT min(seq), max(seq) FROM events WHERE request_id = ?"
        begin, end = run(query, (request_id,)).one()
    return begin or 1, end if row is not None and row.outcome is not None else MAX_SEQ


def bound(text: str | None, last_ns: int, default: tuple[int, int]) -> tuple[int, int]:
    """The seq and the time that a bound names: one of them, the other is the default's. Raises
    NoPicture.
    """
    seq, at_ns = default
    if text is None:
        return seq, at_ns
    if text.isascii() and text.isdigit():
        return min(int(text), MAX_SEQ), at_ns
    return seq, moment(text, last_ns)


def moment(text: str, last_ns: int) -> int:
    """A time: ISO 8601 (UTC unless it says otherwise), or how long before the journal's last event.
    Raises NoPicture.
    """
    if found := re.fullmatch(r"(\d{1,9})([smhd])", text):
        return last_ns - int(found[1]) * UNITS_S[found[2]] * NS_PER_S
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        raise NoPicture(
            f"{text} is neither an event nor a time: write its seq, 2026-01-31T12:00, or 90m for "
            "as long before the last event"
        ) from None
    since_1970 = (at if at.tzinfo else at.replace(tzinfo=UTC)) - datetime(1970, 1, 1, tzinfo=UTC)
    whole_s = since_1970.days * 86_400 + since_1970.seconds
    return whole_s * NS_PER_S + since_1970.microseconds * 1_000
