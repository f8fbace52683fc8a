"""Typed readers over the SQL views. journal/views.md explains each column."""

from collections.abc import Iterator
from typing import TypeVar

from journal.figures import (
    Adoption,
    BlockFigures,
    CacheHits,
    CacheMiss,
    HeldTimes,
    MinuteFigures,
    Orphan,
    Pause,
    Pin,
    PinnedBlock,
    Reading,
    Rejection,
    RequestFigures,
    RunFigures,
)
from journal.reader import JournalReader

BATCH_ROWS = 1_000

Figures = TypeVar(
    "Figures",
    RequestFigures,
    RunFigures,
    MinuteFigures,
    Rejection,
    CacheMiss,
    BlockFigures,
    Pause,
    Pin,
    Orphan,
    Adoption,
    Reading,
)


def requests(reader: JournalReader) -> Iterator[RequestFigures]:
    """All requests, in the order of arrival."""
    return _rows(reader, RequestFigures, "requests", "number", (0,))


def runs(reader: JournalReader) -> Iterator[RunFigures]:
    """All runs, the oldest first."""
    return _rows(reader, RunFigures, "runs", "run_id", (0,))


def throughput(reader: JournalReader) -> Iterator[MinuteFigures]:
    """All minutes in which something happened, the oldest first."""
    return _rows(reader, MinuteFigures, "throughput", "minute_at", ("",))


def rejections(reader: JournalReader) -> Iterator[Rejection]:
    """All rejected requests, in the order of arrival."""
    return _rows(reader, Rejection, "rejections", "number", (0,))


def cache_misses(reader: JournalReader) -> Iterator[CacheMiss]:
    """All requests that were admitted, in the order of arrival."""
    return _rows(reader, CacheMiss, "cache_misses", "number", (0,))


def cache_hits(reader: JournalReader) -> list[CacheHits]:
    """All hours and models, the oldest first: one read, since the view is a sum over requests."""
    names = ", ".join(CacheHits.__struct_fields__)
    query = f"SELECT {names} FROM cache_hits ORDER BY hour_at, model_fingerprint"
    with reader.transaction() as run:
        return [CacheHits(*row) for row in run(query).fetchall()]


def blocks(reader: JournalReader) -> Iterator[BlockFigures]:
    """All blocks, in the order of their hashes."""
    return _rows(reader, BlockFigures, "blocks", "hash", ("",))


def block(reader: JournalReader, name: str) -> BlockFigures | None:
    """One block by its hash, or None when it is not there."""
    names = ", ".join(BlockFigures.__struct_fields__)
    with reader.transaction() as run:
        row = run(f"SELECT {names} FROM blocks WHERE hash = ?", (name,)).fetchone()
    return None if row is None else BlockFigures(*row)


def pauses(reader: JournalReader) -> Iterator[Pause]:
    """All pauses, in the order in which they began."""
    return _rows(reader, Pause, "pauses", "pause_seq", (0,))


def held_times(reader: JournalReader) -> HeldTimes:
    """Percentiles of the time that requests were held, by the nearest rank."""
    over = "FROM pauses WHERE held_ms IS NOT NULL"
    with reader.transaction() as run:
        count: int = run(f"SELECT count(*) {over}").scalar_one()
        query = f"SELECT held_ms {over} ORDER BY held_ms LIMIT 1 OFFSET ?"
        ranks = [-(-count * percent // 100) - 1 for percent in (50, 90, 99, 100)]
        times = [run(query, (max(0, rank),)).scalar() for rank in ranks]
    return HeldTimes(count, *times)


def pins(reader: JournalReader) -> Iterator[Pin]:
    """What is pinned now, by the number of the request."""
    return _rows(reader, Pin, "pins", "number", (0,))


def pinned_blocks(reader: JournalReader) -> list[PinnedBlock]:
    """The blocks that are pinned now, by their hash: one read, since each walks the chains."""
    names = ", ".join(PinnedBlock.__struct_fields__)
    with reader.transaction() as run:
        rows = run(f"SELECT {names} FROM pinned_blocks ORDER BY hash").fetchall()
    return [PinnedBlock(*row) for row in rows]


def orphans(reader: JournalReader) -> Iterator[Orphan]:
    """Each time that a request lost its client, in the order of these times."""
    return _rows(reader, Orphan, "orphans", "lost_seq, number", (0, 0))


def orphan_ends(reader: JournalReader) -> dict[str, int]:
    """How often what became of a request that had lost its client, by `outcome`."""
    query = "SELECT outcome, count(*) FROM orphans GROUP BY outcome ORDER BY outcome"
    with reader.transaction() as run:
        return {row[0]: row[1] for row in run(query).fetchall()}


def adoptions(reader: JournalReader) -> Iterator[Adoption]:
    """Each adoption, the oldest first."""
    return _rows(reader, Adoption, "adoptions", "seq", (0,))


def memory(reader: JournalReader) -> Iterator[Reading]:
    """All readings whose events are still there, the oldest first."""
    return _rows(reader, Reading, "memory", "seq", (0,))


def _rows(
    reader: JournalReader, cls: type[Figures], view: str, key: str, after: tuple[int | str, ...]
) -> Iterator[Figures]:
    """The rows of a view in batches, each in a transaction of its own. `key` names the columns
    that order them, and `after` has values of these before all that occur.
    """
    names = ", ".join(cls.__struct_fields__)
    marks = ", ".join("?" for _ in after)
    query = f"SELECT {names} FROM {view} WHERE ({key}) > ({marks}) ORDER BY {key} LIMIT ?"
    while True:
        with reader.transaction() as run:
            rows = run(query, (*after, BATCH_ROWS)).fetchall()
        if not rows:
            return
        batch = [cls(*row) for row in rows]
        yield from batch
        after = tuple(getattr(batch[-1], name) for name in key.split(", "))
