"""What a picture of a journal is made of, as it is written into the file that shows it.

Times are nanoseconds after `Picture.base_ns`, so that a browser, whose whole numbers end at 2**53,
has them exactly. What there are many of is written as lists without names, in the order of the
fields.
"""

from typing import Any

import msgspec

PHASES = ("waiting", "prefilling", "decoding", "pausing", "paused", "resuming")
"""A lane names phases by their place in here."""


class Stretch(msgspec.Struct, array_like=True):
    """From when on a request is in this phase, until the next stretch or its lane's end."""

    begin_ns: int
    phase: int


class Lane(msgspec.Struct, kw_only=True):
    """A request and where it was when. `alone`: from when until when it had no client; null: to the
    end of the picture. `outcome` is empty while it is open.
    """

    request_id: str
    number: int
    num_prompt_tokens: int
    stretches: list[Stretch] = []
    alone: list[list[int | None]] = []
    end_ns: int | None = None
    outcome: str = ""


class Entry(msgspec.Struct, array_like=True):
    """An event, or decode steps of one batch that are told as one: those from `seq` to `last_seq`.

    `kind` is a place in `Picture.kinds`, `lanes` are places in `Picture.lanes`.
    """

    seq: int
    step: int
    at_ns: int
    kind: int
    lanes: list[int]
    body: dict[str, Any]
    last_seq: int
    until_ns: int


class Kind(msgspec.Struct, array_like=True):
    """A kind of event that the picture has."""

    name: str
    group: str
    source: str


class Sample(msgspec.Struct, array_like=True):
    """A reading of memory. `read_bytes` is what was measured: what the allocator had given out and
    kept. `usage_bytes` is what was compared with the marks: what is used, by the reading or by the
    sum of what is known, and what is reserved on top of that. Null: there is no ceiling.
    """

    at_ns: int
    seq: int
    usage_bytes: int
    read_bytes: int
    ceiling_bytes: int | None
    level: str


class Marks(msgspec.Struct, array_like=True):
    """From when on these marks hold, in permille of the ceiling."""

    begin_ns: int
    low_permille: int
    high_permille: int
    emergency_permille: int
    ceiling_bytes: int | None


class Away(msgspec.Struct, kw_only=True):
    """No server was there: from the last event of one run to the start of the next. `died`: it had
    not said that it stops.
    """

    begin_ns: int
    end_ns: int
    died: bool
    last_seq: int
    run_id: int


class Hold(msgspec.Struct, kw_only=True):
    """A time that a request was held: why, and the numbers of that decision where one was made.

    `seq` is the event that began it, 0 when it is before the picture. It is saved until
    `paused_ns`, and held from then until `end_ns`, when it goes on or ends, as in the view
    `pauses`; `became` is what it was then. Null: not yet.
    """

    lane: int
    seq: int
    begin_ns: int
    reason: str
    paused_ns: int | None = None
    end_ns: int | None = None
    became: str = ""
    rank: int | None = None
    num_candidates: int | None = None
    usage_bytes: int | None = None
    ceiling_bytes: int | None = None
    frees_bytes: int | None = None
    unsaved_bytes: int | None = None


class Picture(msgspec.Struct, kw_only=True):
    """All that is drawn. `base_ns` is the time of its first event, in nanoseconds since 1970, in
    digits; `end_ns` that of its last. Between two events they are those of the window, and
    `last_seq` is the one before it, `first_seq` the one behind it.
    """

    journal: str
    what: str
    model: str = ""
    base_ns: str = "0"
    end_ns: int = 0
    first_seq: int = 0
    last_seq: int = 0
    num_events: int = 0
    phases: tuple[str, ...] = PHASES
    groups: dict[str, str] = {}
    undrawn: tuple[str, ...] = ()
    kinds: list[Kind] = []
    lanes: list[Lane] = []
    entries: list[Entry] = []
    samples: list[Sample] = []
    marks: list[Marks] = []
    aways: list[Away] = []
    holds: list[Hold] = []
