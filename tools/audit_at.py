"""`fermata audit at`: what was happening at a moment."""

from collections.abc import Iterable
from functools import partial
from pathlib import Path

from journal.happening import AfterTheEnd, Happening, happenings
from journal.queries import last_position
from journal.reader import JournalReader
from journal.span import Span
from tools.audit import NothingThere, Question, Wanted, answer
from tools.times import moment

DETAIL_CHARACTERS = 120
"""Of a detail in a table; csv and json have all of it."""


def cells(row: Happening) -> tuple[str, ...]:
    """One thing as texts, in the order of the columns."""
    detail = row.detail
    if len(detail) > DETAIL_CHARACTERS:
        detail = f"{detail[:DETAIL_CHARACTERS]}..."
    age = f"{row.age_ms} ms"
    return (row.what, str(row.seq), row.at, age, row.request_id or "-", row.name, detail)


def rows_at(text: str | None, reader: JournalReader, _: Span) -> Iterable[Happening]:
    """What there was at this time, by default that of the last event. Raises NoTime, and
    NothingThere before the first event and after the last.
    """
    with reader.transaction() as run:
        last_ns = last_position(run).at_ns
    try:
        found = happenings(reader, last_ns if text is None else moment(text, last_ns))
    except AfterTheEnd as error:
        raise NothingThere(str(error)) from None
    if not found:
        where = "" if text is None else f" as early as {text}"
        raise NothingThere(f"the journal has no events{where}")
    return found


def at(journal: Path, time: str | None, form: str) -> int:
    """The run, memory, the open requests in their phases, and the decisions around a moment."""
    question = Question(
        row=Happening,
        rows=partial(rows_at, time),
        columns=("what", "seq", "since", "before", "request", "is", "detail"),
        right=frozenset(("seq", "before")),
        cells=cells,
    )
    return answer(question, journal, Wanted(form=form))
