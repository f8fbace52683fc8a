"""`fermata audit orphans`: who lost its client, and what became of that."""

from pathlib import Path

from journal import audit, sums
from journal.overlap import ORPHANS as LASTING
from journal.overlap import OrphanPart
from journal.reader import JournalReader
from journal.span import Span
from tools.audit import Question, Wanted, answer, edges_text, number


def became(row: OrphanPart) -> str:
    """How the time without a client ended, in words."""
    if row.outcome == "open":
        waits = "held" if row.needs_client else "runs on"
        return waits if row.until_at is None else f"{waits}, until {row.until_at}"
    if row.outcome == "adopted":
        return f"adopted by {row.adopter_id}"
    words = row.outcome if row.reason is None else f"{row.outcome}: {row.reason}"
    return words if row.adopter_id is None else f"{words}; adopted by {row.adopter_id}"


def orphan_cells(row: OrphanPart) -> tuple[str, ...]:
    """One time without a client as texts, in the order of the columns."""
    return (
        row.orphaned_at,
        row.request_id,
        "yes" if row.has_key else "no",
        row.orphaned_by,
        row.from_phase,
        number(row.orphaned_ms, " ms"),
        f"{row.within_ms} ms",
        became(row) if row.is_over or row.outcome == "open" else f"not over; then {became(row)}",
    )


def ends_in_all(reader: JournalReader, span: Span) -> str:
    """What became of all of them."""
    ends = sums.orphan_ends(reader, span)
    if not ends:
        return "no client was lost"
    parts = ", ".join(f"{count} {outcome}" for outcome, count in ends.items())
    cut = edges_text(reader, LASTING, span)
    return f"times without a client: {sum(ends.values())}; of these {parts}; {cut}"


ORPHANS = Question(
    row=OrphanPart,
    rows=audit.orphans,
    columns=("lost", "request", "key", "why", "phase", "for", "within", "outcome"),
    right=frozenset(("for", "within")),
    cells=orphan_cells,
    in_all=ends_in_all,
    goes_on=True,
)


def orphans(journal: Path, wanted: Wanted) -> int:
    """Each time that a request lost its client: when, why, for how long, and what became of it."""
    return answer(ORPHANS, journal, wanted)
