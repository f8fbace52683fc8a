"""`fermata audit pauses`, `held` and `memory`: who was held, how long, and what memory was like."""

from pathlib import Path

from journal import audit, sums
from journal.figures import Reading
from journal.overlap import PAUSES as LASTING
from journal.overlap import PausePart
from journal.reader import JournalReader
from journal.span import Span
from journal.sums import HeldWithin
from scheduler.memory import size_text
from tools.audit import Question, Wanted, answer, edges_text, number, then


def size(num_bytes: int | None) -> str:
    """Bytes as people read them; a measurement may be below zero."""
    if num_bytes is None:
        return "-"
    return f"-{size_text(-num_bytes)}" if num_bytes < 0 else size_text(num_bytes)


def pause_cells(row: PausePart) -> tuple[str, ...]:
    """One pause as texts, in the order of the columns."""
    place = "-" if not row.rank else f"{row.rank} of {row.num_candidates}"
    return (
        row.started_at,
        row.request_id,
        row.reason,
        row.from_phase,
        place,
        size(row.usage_bytes),
        size(row.frees_bytes),
        size(row.unsaved_bytes),
        size(row.freed_bytes),
        row.dropped or "kept",
        number(row.freeing_ms, " ms"),
        number(row.held_ms, " ms"),
        f"{row.within_ms} ms",
        number(row.resuming_ms, " ms"),
        number(row.num_lost_tokens),
        then(row.outcome, row.is_over),
    )


def times_in_all(reader: JournalReader, span: Span) -> str:
    """How long requests were held, by the reason, and how many pauses the span cuts."""
    lines = [
        f"{row.reason}: {row.num_pauses} held, of these {row.num_open} not over; for"
        f" {row.p50_ms} ms (half of them at most), {row.p90_ms} ms (90%), {row.p99_ms} ms (99%),"
        f" {row.max_ms} ms (all)"
        for row in sums.held_times(reader, span)
    ]
    return "\n".join([*(lines or ["nobody was held"]), pauses_cut(reader, span)])


def pauses_cut(reader: JournalReader, span: Span) -> str:
    """How many pauses reach over an end of the span."""
    return f"pauses: {edges_text(reader, LASTING, span)}"


def held_cells(row: HeldWithin) -> tuple[str, ...]:
    """The times of one reason as texts, in the order of the columns."""
    times = (row.p50_ms, row.p90_ms, row.p99_ms, row.max_ms, row.held_ms)
    counts = (str(row.num_pauses), str(row.num_open))
    return (row.reason, *counts, *(f"{time} ms" for time in times))


HELD_NUMBERS = ("pauses", "not over", "50%", "90%", "99%", "longest", "in all")
HELD = Question(
    row=HeldWithin,
    rows=sums.held_times,
    columns=("reason", *HELD_NUMBERS),
    right=frozenset(HELD_NUMBERS),
    cells=held_cells,
    in_all=pauses_cut,
    goes_on=True,
)


SIZES = ("used+reserved", "frees", "unsaved", "freed")
PAUSE_NUMBERS = (*SIZES, "until freed", "held", "within", "resuming", "lost")
PAUSES = Question(
    row=PausePart,
    rows=audit.pauses,
    columns=(
        *("started", "request", "reason", "phase", "place", *SIZES, "KV"),
        *("until freed", "held", "within", "resuming", "lost", "outcome"),
    ),
    right=frozenset(PAUSE_NUMBERS),
    cells=pause_cells,
    in_all=times_in_all,
    goes_on=True,
)


def reading_cells(row: Reading) -> tuple[str, ...]:
    """One reading as texts, in the order of the columns."""
    return (
        row.sampled_at,
        str(row.run_id),
        size(row.active_bytes),
        size(row.cached_bytes),
        size(row.peak_bytes),
        size(row.ceiling_bytes),
        "-" if row.active_share is None else f"{row.active_share:.1%}",
        size(row.process_bytes),
        size(row.available_bytes),
        number(row.age_ms, " ms"),
    )


READING_NUMBERS = ("run", "active", "cached", "peak", "ceiling", "share", "process", "available")
MEMORY = Question(
    row=Reading,
    rows=audit.memory,
    columns=("sampled", *READING_NUMBERS, "age"),
    right=frozenset((*READING_NUMBERS, "age")),
    cells=reading_cells,
)


def pauses(journal: Path, wanted: Wanted) -> int:
    """Each pause with its reason, bytes and times, and percentiles of the time held."""
    return answer(PAUSES, journal, wanted)


def memory(journal: Path, wanted: Wanted) -> int:
    """Each reading of memory that the scheduler has seen."""
    return answer(MEMORY, journal, wanted)


def held(journal: Path, wanted: Wanted) -> int:
    """How long requests were held, by the reason, with percentiles."""
    return answer(HELD, journal, wanted)
