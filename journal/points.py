"""Points in a long journal from which it is folded on: the state and the rows behind an event.

A journal may hold ten million events, and what lies before its last hour takes minutes to fold. So
some snapshots of the state stay, and beside each, in `carried_rows`, the rows of the projections
behind the same event. Like a snapshot a point is a cache: only the code that has made it uses it,
and `verify` compares it with what all events come to.
"""

from functools import cache
from hashlib import sha256
from operator import attrgetter
from pathlib import Path
from typing import NamedTuple

import msgspec

from journal import tables
from journal.database import Run
from journal.rebuild import Base

POINT_EVENTS = 100_000
"""Events between two points: three seconds of folding."""

KEPT_POINTS = 100
"""Of ten million events that is one after every POINT_EVENTS; of more they are further apart."""

EVENT_BYTES = 8
"""Of a point's state for each event since the point before, at most: a large state, which takes
long to write, is kept more rarely.
"""

POINTS_BYTES = 128 * 2**20
"""Of the states of all points. A state is mostly the index of saved blocks, some 200 bytes each;
the rows of a point are up to twice as large.
"""

ROWS_CODE = (
    "blocks.py",
    "clients.py",
    "holding.py",
    "making.py",
    "phases.py",
    "projections.py",
    "quiet.py",
    "rebuild.py",
    "rows.py",
    "writes.py",
)
"""The files on which rows, folded from the same events, depend, beside those of the events."""

# The base of a journal that was shortened lies under its first event, and is none.
_POINTS = "carried_rows WHERE seq > (SELECT min(seq) FROM events)"


# There may be a hundred thousand blocks: their text is made and stays within SQLite.
_PUT = (
    "INSERT OR REPLACE INTO carried_rows SELECT ?, ? || json_group_array(json_object("
    + ", ".join(f"'{column.name}', {column.name}" for column in tables.block.columns)
    + ")) || '}' FROM block"
)


class Point(NamedTuple):
    """The rows behind the event `seq`, and the encoded state there."""

    seq: int
    base: Base
    state: bytes


@cache
def rows_digest() -> str:
    """SHA-256 over the sources of the projections."""
    folder = Path(__file__).parent
    digest = sha256()
    for name in ROWS_CODE:
        digest.update(name.encode() + b"\0" + (folder / name).read_bytes() + b"\0")
    return digest.hexdigest()


def is_due(run: Run, seq: int, state_bytes: int) -> bool:
    """Whether a snapshot of this seq, whose state has so many bytes, should become a point."""
    query = "SELECT coalesce((SELECT max(seq) FROM carried_rows), (SELECT min(seq) FROM events), 0)"
    newest: int = run(query).scalar_one()
    return seq - newest >= max(POINT_EVENTS, state_bytes // EVENT_BYTES)


def put_point(run: Run, seq: int, base: Base) -> None:
    """Makes a point of the snapshot of this seq, which is the newest, and lets go of those that are
    too many. The blocks are those in the table, and not in `base`.
    """
    fields = {"code_digest": rows_digest(), "rows": base.rows, "counts": base.counts}
    body = msgspec.json.encode(fields).decode().removesuffix("}")
    run(_PUT, (seq, f'{body},"blocks":'))
    while _are_too_many(run):
        # The one that is missed least. The newest has no later one, so it stays.
        query = (
            "SELECT seq FROM (SELECT seq, lead(seq) OVER (ORDER BY seq)"
            f" - lag(seq, 1, 0) OVER (ORDER BY seq) AS gap FROM {_POINTS})"
            " WHERE gap IS NOT NULL ORDER BY gap, seq LIMIT 1"
        )
        (least,) = run(query).one()
        run("DELETE FROM carried_rows WHERE seq = ?", (least,))


def _are_too_many(run: Run) -> bool:
    query = (
        "SELECT count(*), coalesce(sum(length(s.body)), 0)"
        f" FROM (SELECT seq FROM {_POINTS}) LEFT JOIN snapshots s USING (seq)"
    )
    count, num_bytes = run(query).one()
    return count > KEPT_POINTS or (count > 1 and num_bytes > POINTS_BYTES)


def newest_point(run: Run, until_seq: int, state_version: int, code_digest: str) -> Point | None:
    """The newest point up to a seq that this code has made; null when there is none. Raises
    msgspec.MsgspecError for one that cannot be read.
    """
    query = (
        "SELECT p.seq, p.body, s.body AS state"
        f" FROM (SELECT seq, body FROM {_POINTS}) p JOIN snapshots s USING (seq)"
        " WHERE p.seq <= ? AND s.state_version = ? AND s.code_digest = ?"
        " AND instr(p.body, ?) > 0 ORDER BY p.seq DESC LIMIT 1"
    )
    found = run(query, (until_seq, state_version, code_digest, rows_digest())).fetchone()
    return None if found is None else Point(found[0], _decode(found[1]), found[2])


def points_of(run: Run) -> frozenset[int]:
    """The seqs of all points."""
    return frozenset(seq for (seq,) in run(f"SELECT seq FROM {_POINTS}").fetchall())


def differs(run: Run, seq: int, base: Base) -> bool:
    """Whether the point of this seq says something else than what a rebuild has come to there. One
    that other code has made is not asked.
    """
    body: str = run("SELECT body FROM carried_rows WHERE seq = ?", (seq,)).scalar_one()
    try:
        kept = _decode(body)
    except msgspec.MsgspecError:
        return True
    return kept.code_digest == rows_digest() and _content(kept) != _content(base)


def _content(base: Base) -> Base:
    """Without what says when a row was written and by which code, and not what happened, and with
    the blocks in one order.
    """
    rows = base.rows
    blocks = sorted(base.blocks, key=attrgetter("hash"))
    minute = rows.minute and msgspec.structs.replace(rows.minute, through_seq=0)
    rows = msgspec.structs.replace(rows, minute=minute)
    return msgspec.structs.replace(base, rows=rows, blocks=blocks, code_digest="")


def _decode(body: str) -> Base:
    return msgspec.json.decode(body, type=Base)
