"""`fermata audit`: questions to a journal whose answers are rows of its views."""

import csv
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import msgspec

from journal import audit
from journal.audit import CacheMiss
from journal.errors import JournalError
from journal.reader import JournalReader
from tools.text_table import text_table

DONE, UNUSABLE = 0, 2

TABLE_ROWS = 1000
"""A table is laid out as a whole: rows beyond that are for csv and json."""

COLUMNS = ("received", "request", "prompt", "memory", "disk", "prefilled", "parted at", "because")
RIGHT = frozenset(("prompt", "memory", "disk", "prefilled", "parted at", "waited"))


def misses(journal: Path, form: str) -> int:
    """Prints a row for each request. Returns 0, or 2 for a journal that cannot be read."""
    try:
        with JournalReader.open(journal) as reader:
            write(audit.cache_misses(reader), form)
    except JournalError as error:
        print(f"fermata audit: {error}", file=sys.stderr)
        return UNUSABLE
    return DONE


def write(rows: Iterator[CacheMiss], form: str) -> None:
    """The rows as a table, as csv with a header, or as one JSON object a line."""
    if form == "json":
        for row in rows:
            print(msgspec.json.encode(row).decode())
    elif form == "csv":
        writer = csv.writer(sys.stdout, lineterminator="\n")
        writer.writerow(CacheMiss.__struct_fields__)
        writer.writerows(msgspec.structs.astuple(row) for row in rows)
    else:
        shown = [cells(row) for row in islice(rows, TABLE_ROWS)]
        print("\n".join(text_table((*COLUMNS, "waited"), shown, RIGHT)))
        if next(rows, None) is not None:
            print(f"... these are the first {TABLE_ROWS}: --format csv or json has all of them")


def cells(row: CacheMiss) -> tuple[str, ...]:
    """One request as texts, in the order of the columns."""
    return (
        row.received_at,
        row.request_id,
        str(row.num_prompt_tokens),
        str(row.num_memory_tokens),
        str(row.num_disk_tokens),
        str(row.num_prefilled_tokens),
        "-" if row.parted_at_tokens is None else str(row.parted_at_tokens),
        row.parted_because or "-",
        f"{row.waited_for_blocks_ms} ms",
    )
