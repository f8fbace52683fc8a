"""What the rows of a bundle were when it was exported: a digest for each table but `events`, whose
chain of digests stands by itself. Who reads a bundle asks the projections, and those are rows.

It is about the schema with which the bundle was exported. A copy that is upgraded is not asked: its
projections are made anew from the events. Neither is a bundle that was exported without this.
"""

from collections.abc import Iterator
from hashlib import sha256

import msgspec

from journal.database import Run, schema_of
from journal.tables import metadata

COLUMN = "row_digests"
"""Where the table `bundle` has it, as JSON. Earlier exports have no such column."""


class RowDigests(msgspec.Struct, frozen=True):
    """The digests by table, in hexadecimal, and the schema that the tables are of."""

    schema: str
    tables: dict[str, str]


def row_digests(run: Run) -> str:
    """The digests of a bundle that is whole, as the JSON to be kept in it."""
    names = sorted(metadata.tables.keys() - {"events"})
    tables = {name: table_digest(run, name, key_of(run, name)) for name in names}
    return msgspec.json.encode(RowDigests(schema_of(run) or "", tables)).decode()


def changed_rows(run: Run) -> Iterator[str]:
    """The tables of a bundle that are not what was exported, one line each."""
    if COLUMN not in columns_of(run, "bundle"):
        return
    kept: str | None = run(f"SELECT {COLUMN} FROM bundle").scalar()
    if kept is None:
        return  # There is no description, which is a fault of its own.
    try:
        digests = msgspec.json.decode(kept, type=RowDigests)
    except msgspec.MsgspecError as error:
        yield f"bundle: the digests of its rows cannot be read ({error})"
        return
    if digests.schema != schema_of(run):
        return
    for name, digest in digests.tables.items():
        key = key_of(run, name)
        if not key:
            yield f"bundle: table {name} is missing"
        elif table_digest(run, name, key) != digest:
            yield f"bundle: the rows of {name} are not what was exported"


def columns_of(run: Run, table: str) -> dict[str, int]:
    """The columns with their place in the primary key, which counts from 1; 0: not in it."""
    return dict(run("SELECT name, pk FROM pragma_table_info(?)", (table,)).fetchall())


def key_of(run: Run, table: str) -> list[str]:
    """The columns of the primary key, in its order; none where there is no such table."""
    places = columns_of(run, table)
    return sorted((name for name, place in places.items() if place), key=places.__getitem__)


def table_digest(run: Run, table: str, key: list[str]) -> str:
    """SHA-256 over the rows in the order of their key, each as a JSON list. Reads row by row."""
    digest, encode = sha256(), msgspec.json.Encoder().encode
    for row in run(f"SELECT * FROM {quoted(table)} ORDER BY {', '.join(map(quoted, key))}"):
        digest.update(encode(tuple(row)) + b"\n")
    return digest.hexdigest()


def quoted(name: str) -> str:
    """A name in a statement, whatever it is made of: it may come from the file itself."""
    return '"' + name.replace('"', '""') + '"'
