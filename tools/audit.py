"""`fermata audit`: questions to a journal whose answers are rows of its views."""

import csv
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from journal import audit, sums
from journal.bundle import refuse_changed
from journal.errors import JournalError
from journal.figures import CacheHits, CacheMiss, MissCause
from journal.moments import is_known, is_within
from journal.overlap import Lasting, edges
from journal.queries import last_position
from journal.reader import JournalReader
from journal.span import ALWAYS, Span
from tools.text_table import text_table
from tools.times import NoTime, moment

DONE, UNUSABLE = 0, 2

TABLE_ROWS = 1000
"""A table is laid out as a whole: rows beyond that are for csv and json."""

Answer = TypeVar("Answer", bound=msgspec.Struct)


class NothingThere(Exception):
    """Nothing of the journal lies in the span that was asked for. One line."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """The span of time, as it was given, and whether a table, csv, json or jsonl is written."""

    since: str | None = None
    until: str | None = None
    form: str = "table"


@dataclass(frozen=True)
class Question(Generic[Answer]):
    """The rows that answer it, and how a table shows them: `cells` are the texts of one row by
    column, and `in_all` what stands below the table. `goes_on`: the rows last, so that they may lie
    in a span in which nothing happens.
    """

    row: type[Answer]
    rows: Callable[[JournalReader, Span], Iterable[Answer]]
    columns: Sequence[str]
    right: frozenset[str]
    cells: Callable[[Answer], tuple[str, ...]]
    in_all: Callable[[JournalReader, Span], str] | None = None
    goes_on: bool = False


def answer(question: Question[Answer], journal: Path, wanted: Wanted) -> int:
    """Prints the rows. Returns 0, or 2 for a journal that cannot be read, what is no time, and a
    span in which nothing lies.
    """
    try:
        with JournalReader.open(journal) as reader:
            refuse_changed(reader)
            span = span_of(reader, wanted, goes_on=question.goes_on)
            write(question, reader, span, wanted.form)
    except (JournalError, NoTime, NothingThere) as error:
        print(f"fermata audit: {error}", file=sys.stderr)
        return UNUSABLE
    return DONE


def span_of(reader: JournalReader, wanted: Wanted, *, goes_on: bool) -> Span:
    """The span in nanoseconds, which must have events, or be known to a question of what goes on.
    Raises NoTime, NothingThere.
    """
    if wanted.since is None and wanted.until is None:
        return ALWAYS
    with reader.transaction() as run:
        last_ns = last_position(run).at_ns
        since, until = wanted.since, wanted.until
        first = ALWAYS.first_ns if since is None else moment(since, last_ns)
        last = ALWAYS.last_ns if until is None else moment(until, last_ns)
        span = Span(max(first, ALWAYS.first_ns), min(last, ALWAYS.last_ns))
        is_there = is_known if goes_on else is_within
        if not is_there(run, span):
            raise NothingThere(f"nothing of the journal lies in this window ({words_of(wanted)})")
    return span


def words_of(wanted: Wanted) -> str:
    """The span in words."""
    parts = (("since", wanted.since), ("until", wanted.until))
    return ", ".join(f"{name} {text}" for name, text in parts if text is not None)


def write(question: Question[Answer], reader: JournalReader, span: Span, form: str) -> None:
    """The rows as a table, as csv with a header, as one JSON array, or as JSON objects in lines."""
    rows = iter(question.rows(reader, span))
    if form == "json":
        write_array(rows)
    elif form == "jsonl":
        for row in rows:
            print(msgspec.json.encode(row).decode())
    elif form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(question.row.__struct_fields__)
        writer.writerows(msgspec.structs.astuple(row) for row in rows)
    else:
        shown = [question.cells(row) for row in islice(rows, TABLE_ROWS)]
        print("\n".join(text_table(question.columns, shown, question.right)))
        if next(rows, None) is not None:
            print(f"... these are the first {TABLE_ROWS}: --format csv or json has all of them")
        if question.in_all is not None:
            print(question.in_all(reader, span))


def write_array(rows: Iterable[msgspec.Struct]) -> None:
    """One JSON array, a row on each line, written as the rows come."""
    before = "["
    for row in rows:
        print(before, msgspec.json.encode(row).decode(), sep="", end="")
        before = ",\n "
    print("[]" if before == "[" else "]")


def edges_text(reader: JournalReader, kind: Lasting, span: Span) -> str:
    """How many rows reach over the begin of the span and over its end, in words."""
    found = edges(reader, kind, span)
    at_end = "at the end of the journal" if span == ALWAYS else "at the end of this window"
    not_over = f"{found.num_not_over} not over {at_end}"
    if span == ALWAYS:
        return not_over
    return f"{found.num_before} began before this window, {not_over}"


def then(became: str, is_over: int) -> str:
    """What came after a row that lasts, in a cell."""
    return became if is_over else "not over"


def number(value: int | None, unit: str = "") -> str:
    """A number in a cell; what has not happened is a dash."""
    return "-" if value is None else f"{value}{unit}"


def miss_cells(row: CacheMiss) -> tuple[str, ...]:
    """One request as texts, in the order of the columns."""
    return (
        row.received_at,
        row.request_id,
        str(row.num_prompt_tokens),
        str(row.num_memory_tokens),
        str(row.num_disk_tokens),
        str(row.num_prefilled_tokens),
        number(row.parted_at_tokens),
        row.parted_because or "-",
        number(row.waited_for_blocks_ms, " ms"),
    )


NUMBERS = ("prompt", "memory", "disk", "prefilled", "parted at")
MISSES = Question(
    row=CacheMiss,
    rows=audit.cache_misses,
    columns=("received", "request", *NUMBERS, "because", "waited"),
    right=frozenset((*NUMBERS, "waited")),
    cells=miss_cells,
)


def hit_cells(row: CacheHits) -> tuple[str, ...]:
    """One hour and model as texts, in the order of the columns."""
    return (
        row.hour_at,
        row.model_name,
        str(row.num_requests),
        str(row.num_prompt_tokens),
        str(row.num_memory_tokens),
        str(row.num_disk_tokens),
        str(row.num_prefilled_tokens),
        "-" if row.hit_rate is None else f"{row.hit_rate:.1%}",
    )


HIT_NUMBERS = ("requests", "prompt", "memory", "disk", "prefilled", "hits")
HITS = Question(
    row=CacheHits,
    rows=sums.cache_hits,
    columns=("hour", "model", *HIT_NUMBERS),
    right=frozenset(HIT_NUMBERS),
    cells=hit_cells,
)


def cause_cells(row: MissCause) -> tuple[str, ...]:
    """One cause as texts, in the order of the columns."""
    return (
        row.parted_because or "-",
        str(row.num_requests),
        str(row.num_prompt_tokens),
        str(row.num_found_tokens),
        str(row.num_prefilled_tokens),
        number(row.waited_for_blocks_ms, " ms"),
    )


CAUSE_NUMBERS = ("requests", "prompt", "found", "prefilled", "waited")
CAUSES = Question(
    row=MissCause,
    rows=sums.miss_causes,
    columns=("because", *CAUSE_NUMBERS),
    right=frozenset(CAUSE_NUMBERS),
    cells=cause_cells,
)


def misses(journal: Path, wanted: Wanted) -> int:
    """What each prompt found in saved KV, and why it found no more."""
    return answer(MISSES, journal, wanted)


def hits(journal: Path, wanted: Wanted) -> int:
    """How much of the prompts was found in saved KV, by hour and model."""
    return answer(HITS, journal, wanted)


def causes(journal: Path, wanted: Wanted) -> int:
    """Why prompts were computed, and how much for each cause."""
    return answer(CAUSES, journal, wanted)
