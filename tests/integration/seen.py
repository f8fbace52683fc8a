"""Whether files stay as they are."""

import sqlite3
from contextlib import closing
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple


class Seen(NamedTuple):
    """A file as it is."""

    digest: str
    num_bytes: int
    changed_ns: int


def seen(folder: Path) -> dict[str, Seen]:
    """Each file of a folder, and when the folder itself was changed last."""
    found = {
        path.name: Seen(sha256(path.read_bytes()).hexdigest(), *stamp(path))
        for path in sorted(folder.iterdir())
    }
    return found | {"": Seen("", *stamp(folder))}


def stamp(path: Path) -> tuple[int, int]:
    """Its size, and when it was changed last."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def alter(file: Path, *statements: str) -> None:
    """Lets something else stand in a database, without a log beside it."""
    with closing(sqlite3.connect(file, isolation_level=None)) as database:
        for statement in statements:
            database.execute(statement)


def scratch(file: Path, name: str) -> None:
    """Damages a table or an index where nothing that is asked first lies."""
    with closing(sqlite3.connect(file)) as database:
        query = "SELECT rootpage FROM sqlite_master WHERE name = ?"
        (root,) = database.execute(query, (name,)).fetchone()
        (unit_bytes,) = database.execute("PRAGMA page_size").fetchone()
    with file.open("r+b") as handle:
        handle.seek((root - 1) * unit_bytes)
        handle.write(bytes(unit_bytes))
