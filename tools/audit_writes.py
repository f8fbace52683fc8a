"""`fermata audit writes`: what was written to disk, for whom and why."""

from pathlib import Path

from journal import sums
from journal.sums import RequestWrites
from tools.audit import Question, Wanted, answer
from tools.audit_memory import size


def write_cells(row: RequestWrites) -> tuple[str, ...]:
    """The files of one kind for one request and reason as texts, in the order of the columns."""
    return (
        row.request_id or "-",
        row.reason,
        row.part,
        str(row.num_files),
        str(row.num_failed),
        size(row.written_bytes),
        f"{row.write_ms:.1f} ms",
    )


NUMBERS = ("files", "failed", "written", "took")
WRITES = Question(
    row=RequestWrites,
    rows=sums.request_writes,
    columns=("request", "reason", "part", *NUMBERS),
    right=frozenset(NUMBERS),
    cells=write_cells,
)


def writes(journal: Path, wanted: Wanted) -> int:
    """The bytes of saved KV by request, reason and part."""
    return answer(WRITES, journal, wanted)
