"""`fermata audit first-tokens`, `phases`, `waits` and `throughput`: where the time went."""

from pathlib import Path

from journal import audit, sums
from journal.figures import FirstTokens, MinuteFigures
from journal.overlap import PHASES as PHASES_LASTING
from journal.overlap import WAITS as WAITS_LASTING
from journal.overlap import PhasePart, WaitPart
from tools.audit import Question, Wanted, answer, edges_text, number, then


def first_token_cells(row: FirstTokens) -> tuple[str, ...]:
    """One hour as texts, in the order of the columns."""
    times = (row.p50_ms, row.p90_ms, row.p99_ms, row.max_ms)
    return (row.hour_at, str(row.num_requests), *(f"{time} ms" for time in times))


TIMES = ("requests", "50%", "90%", "99%", "longest")
FIRST_TOKENS = Question(
    row=FirstTokens,
    rows=sums.first_tokens,
    columns=("hour", *TIMES),
    right=frozenset(TIMES),
    cells=first_token_cells,
)


def phase_cells(row: PhasePart) -> tuple[str, ...]:
    """One phase of a request as texts, in the order of the columns."""
    return (
        row.began_at,
        row.request_id,
        row.phase,
        number(row.phase_ms, " ms"),
        f"{row.within_ms} ms",
        then(row.next_phase or "-", row.is_over),
        *(str(count) for count in (row.num_waiting, row.num_rows, row.num_held)),
    )


OTHERS = ("waiting", "rows", "held")
PHASES = Question(
    row=PhasePart,
    rows=audit.phases,
    columns=("began", "request", "phase", "for", "within", "then", *OTHERS),
    right=frozenset(("for", "within", *OTHERS)),
    cells=phase_cells,
    in_all=lambda reader, span: f"phases: {edges_text(reader, PHASES_LASTING, span)}",
    goes_on=True,
)


def wait_cells(row: WaitPart) -> tuple[str, ...]:
    """One wait as texts, in the order of the columns."""
    room = "-" if row.room_from_id is None else f"{row.room_from_id} ({row.room_from_phase})"
    return (
        row.began_at,
        row.request_id,
        row.phase,
        number(row.wait_ms, " ms"),
        f"{row.within_ms} ms",
        then(row.next_phase or "-", row.is_over),
        *(str(count) for count in (row.num_waiting, row.num_rows, row.num_held)),
        room,
        row.held_first_id or "-",
        row.block_of_id or "-",
    )


WAITS = Question(
    row=WaitPart,
    rows=audit.waits,
    columns=(
        *("began", "request", "phase", "for", "within", "then", *OTHERS),
        *("room from", "held one first", "block of"),
    ),
    right=frozenset(("for", "within", *OTHERS)),
    cells=wait_cells,
    in_all=lambda reader, span: f"waits: {edges_text(reader, WAITS_LASTING, span)}",
    goes_on=True,
)


def minute_cells(row: MinuteFigures) -> tuple[str, ...]:
    """One minute as texts, in the order of the columns."""
    counts = (row.num_received, row.num_admitted, row.num_finished, row.num_pauses)
    rates = (row.prefill_tokens_per_s, row.decode_tokens_per_s, row.mean_rows)
    return (
        row.minute_at,
        *(str(count) for count in counts),
        str(row.num_prefilled_tokens),
        str(row.num_output_tokens),
        *("-" if rate is None else f"{rate:.1f}" for rate in rates),
    )


RATES = (
    *("received", "admitted", "finished", "pauses", "prefilled", "output"),
    *("prefill/s", "decode/s", "rows"),
)
THROUGHPUT = Question(
    row=MinuteFigures,
    rows=audit.throughput,
    columns=("minute", *RATES),
    right=frozenset(RATES),
    cells=minute_cells,
    goes_on=True,
)


def first_tokens(journal: Path, wanted: Wanted) -> int:
    """How long requests waited for their first token, by the hour in which they came."""
    return answer(FIRST_TOKENS, journal, wanted)


def phases(journal: Path, wanted: Wanted) -> int:
    """Each phase of each request, from when to when."""
    return answer(PHASES, journal, wanted)


def waits(journal: Path, wanted: Wanted) -> int:
    """Who waited, and for whom."""
    return answer(WAITS, journal, wanted)


def throughput(journal: Path, wanted: Wanted) -> int:
    """What each minute brought."""
    return answer(THROUGHPUT, journal, wanted)
