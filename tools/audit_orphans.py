"""`fermata audit orphans`: who lost its client, and what became of that."""

from pathlib import Path

from journal import audit, sums
from journal.figures import Orphan
from journal.reader import JournalReader
from journal.span import Span
from tools.audit import Question, Wanted, answer, number


def became(row: Orphan) -> str:
    """How the time without a client ended, in words."""
    if row.outcome == "open":
        waits = "held" if row.needs_client else "runs on"
        return waits if row.until_at is None else f"{waits}, until {row.until_at}"
    if row.outcome == "adopted":
        return f"adopted by {row.adopter_id}"
    words = row.outcome if row.reason is None else f"{row.outcome}: {row.reason}"
    return words if row.adopter_id is None else f"{words}; adopted by {row.adopter_id}"


def orphan_cells(row: Orphan) -> tuple[str, ...]:
    """One time without a client as texts, in the order of the columns."""
    return (
        row.orphaned_at,
        row.request_id,
        "yes" if row.has_key else "no",
        row.orphaned_by,
        row.from_phase,
        number(row.orphaned_ms, " ms"),
        became(row),
    )


def ends_in_all(reader: JournalReader, span: Span) -> str:
    """What became of all of them."""
    ends = sums.orphan_ends(reader, span)
    if not ends:
        return "no client was lost"
    parts = ", ".join(f"{count} {outcome}" for outcome, count in ends.items())
    return f"clients that were lost: {sum(ends.values())}; of these {parts}"


ORPHANS = Question(
    row=Orphan,
    rows=audit.orphans,
    columns=("lost", "request", "key", "why", "phase", "for", "outcome"),
    right=frozenset(("for",)),
    cells=orphan_cells,
    in_all=ends_in_all,
)


def orphans(journal: Path, wanted: Wanted) -> int:
    """Each time that a request lost its client: when, why, for how long, and what became of it."""
    return answer(ORPHANS, journal, wanted)
