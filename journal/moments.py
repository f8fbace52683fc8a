"""Where a moment lies among the events of a journal."""

from journal.database import Run
from journal.span import Span

MINUTE_NS = 60 * 10**9


def time_of(run: Run, seq: int) -> int:
    """When an event was that is there, in nanoseconds since 1970."""
    at_ns: int = run("SELECT at_ns FROM events WHERE seq = ?", (seq,)).scalar_one()
    return at_ns


def last_before(run: Run, first: int, last: int, at_ns: int) -> int:
    """The last seq before a time, by bisection: time does not go back. `first - 1` for none."""
    low, high = first - 1, last
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if time_of(run, middle) < at_ns else (low, middle - 1)
    return low


def end_of_step(run: Run, seq: int) -> int:
    """The last seq up to `seq` that ends a step."""
    query = (
        "SELECT max(seq) FROM events WHERE seq <= ? AND step <"
        " (SELECT step FROM events WHERE seq = ?)"
    )
    end: int | None = run(query, (seq, seq + 1)).scalar()
    return seq if end is None else end


def whole_step(run: Run, seq: int) -> int:
    """The last seq of the step to which this one belongs."""
    # It looks no further than the next step: max() would begin at the journal's end.
    query = (
        "SELECT seq - 1 FROM events WHERE seq > ? AND step >"
        " (SELECT step FROM events WHERE seq = ?) ORDER BY seq LIMIT 1"
    )
    last: int | None = run(query, (seq, seq)).scalar()
    return run("SELECT max(seq) FROM events").scalar_one() if last is None else last


def bounds(run: Run) -> tuple[int, int] | None:
    """The first and the last seq; null for a journal without events."""
    # Each on its own is a look at one end; in one query they would be a scan.
    query = "SELECT (SELECT min(seq) FROM events), (SELECT max(seq) FROM events)"
    first, last = run(query).one()
    return None if first is None else (first, last)


def seqs_within(run: Run, span: Span) -> tuple[int, int]:
    """Between which two seqs lie those of a span, the first of them not included. Rows of what was
    before the first event have smaller ones.
    """
    ends = bounds(run)
    if ends is None:
        return 0, 0
    before = last_before(run, *ends, span.first_ns)
    last = last_before(run, *ends, span.last_ns + 1)
    return 0 if before < ends[0] else before, last


def is_within(run: Run, span: Span) -> bool:
    """Whether anything happened in the span. Of what was before the first event, in a journal that
    was shortened, only the minutes are known.
    """
    ends = bounds(run)
    if ends is None or span.first_ns > span.last_ns:
        return False
    first, last = ends
    if last_before(run, first, last, span.first_ns) < last_before(
        run, first, last, span.last_ns + 1
    ):
        return True
    first_ns = time_of(run, first)
    until_ns = min(span.last_ns, first_ns)
    query = "SELECT count(*) FROM minute WHERE minute BETWEEN ? AND ? AND minute < ?"
    minutes = (span.first_ns // MINUTE_NS, until_ns // MINUTE_NS, first_ns // MINUTE_NS)
    return bool(run(query, minutes).scalar())


def is_known(run: Run, span: Span) -> bool:
    """Whether the journal tells of some of the span: what lasts goes on also where nothing happens.
    It does from its first event to its last, and from the first minute before in a shortened one.
    """
    ends = bounds(run)
    if ends is None or span.first_ns > span.last_ns:
        return False
    first_ns, last_ns = (time_of(run, seq) for seq in ends)
    query = "SELECT min(minute) FROM minute WHERE minute < ?"
    minute: int | None = run(query, (first_ns // MINUTE_NS,)).scalar()
    begin_ns = first_ns if minute is None else minute * MINUTE_NS
    return span.first_ns <= last_ns and span.last_ns >= begin_ns
