"""`fermata audit`: questions to a journal whose answers are rows of its views."""

import csv
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from journal import audit
from journal.errors import JournalError
from journal.figures import CacheMiss, Orphan, Pause, Reading
from journal.reader import JournalReader
from tools.text_table import text_table

DONE, UNUSABLE = 0, 2

TABLE_ROWS = 1000
"""A table is laid out as a whole: rows beyond that are for csv and json."""

Answer = TypeVar("Answer", CacheMiss, Pause, Reading, Orphan)


@dataclass(frozen=True)
class Question(Generic[Answer]):
    """The rows that answer it, and how a table shows them: `cells` are the texts of one row by
    column, and `in_all` what stands below the table.
    """

    row: type[Answer]
    rows: Callable[[JournalReader], Iterator[Answer]]
    columns: Sequence[str]
    right: frozenset[str]
    cells: Callable[[Answer], tuple[str, ...]]
    in_all: Callable[[JournalReader], str] | None = None


def answer(question: Question[Answer], journal: Path, form: str) -> int:
    """Prints the rows. Returns 0, or 2 for a journal that cannot be read."""
    try:
        with JournalReader.open(journal) as reader:
            write(question, reader, form)
    except JournalError as error:
        print(f"fermata audit: {error}", file=sys.stderr)
        return UNUSABLE
    return DONE


def write(question: Question[Answer], reader: JournalReader, form: str) -> None:
    """The rows as a table, as csv with a header, or as one JSON object a line."""
    rows = question.rows(reader)
    if form == "json":
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
            print(question.in_all(reader))


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


def misses(journal: Path, form: str) -> int:
    """What each prompt found in saved KV, and why it found no more."""
    return answer(MISSES, journal, form)
