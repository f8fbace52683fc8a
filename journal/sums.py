"""Audits that sum up or rank what a span of time has brought.

Each has the columns of the view of its name, which answers the same over all times, and that of
times held one more. They read the tables of the projections, which hold a row for a request, a
pause or a file, and no events.
"""

from collections.abc import Iterator
from typing import TypeVar

import msgspec

from journal.figures import CacheHits, FirstTokens, HeldTimes, MissCause
from journal.moments import seqs_within
from journal.overlap import end_of
from journal.reader import JournalReader
from journal.span import ALWAYS, EVER_NS, Span

BATCH_REQUESTS = 1_000


class RequestWrites(msgspec.Struct, frozen=True):
    """What was written of one kind for one request and one reason: `disk_writes` summed up."""

    number: int
    request_id: str | None
    reason: str
    part: str
    num_files: int
    num_failed: int
    written_bytes: int
    write_ms: float


class HeldWithin(HeldTimes, frozen=True):
    """A row of `held_times`, of what lies in a span: a pause that was not over at its end, or the
    journal's, counts until then. `num_open`: how many these are.
    """

    num_open: int


Sums = TypeVar("Sums", CacheHits, FirstTokens, HeldWithin, MissCause)

_HOUR_NS = 3_600 * 10**9
_HITS = f"""
    SELECT
        strftime('%Y-%m-%dT%H:00Z', q.received_ns / {_HOUR_NS} * 3600, 'unixepoch'),
        q.model_fingerprint, max(r.model_name), count(*), sum(q.num_prompt_tokens),
        sum(q.num_memory_tokens), sum(q.num_disk_tokens), sum(q.num_prefilled_tokens),
        round(1.0 * sum(q.num_memory_tokens + q.num_disk_tokens)
            / nullif(sum(q.num_prompt_tokens), 0), 4)
    FROM request q JOIN run r USING (run_id)
    WHERE q.outcome = 'finished' AND q.received_ns BETWEEN ? AND ?
    GROUP BY q.received_ns / {_HOUR_NS}, q.model_fingerprint
    ORDER BY q.received_ns / {_HOUR_NS}, q.model_fingerprint
"""
# Of n times in their order, the nearest rank of a percentile is the one at n * percent / 100,
# rounded up.
_PERCENTILES = """
    max(iif(place = (n * 50 + 99) / 100, ms, NULL)),
    max(iif(place = (n * 90 + 99) / 100, ms, NULL)),
    max(iif(place = (n * 99 + 99) / 100, ms, NULL)),
    max(ms)
"""
_FIRST_TOKENS = f"""
    WITH times AS (
        SELECT received_ns / {_HOUR_NS} AS hour, (first_token_ns - received_ns) / 1000000 AS ms
        FROM request WHERE first_token_ns IS NOT NULL AND received_ns BETWEEN ? AND ?),
    ranked AS (
        SELECT hour, ms, row_number() OVER (PARTITION BY hour ORDER BY ms) AS place,
            count(*) OVER (PARTITION BY hour) AS n
        FROM times)
    SELECT strftime('%Y-%m-%dT%H:00Z', hour * 3600, 'unixepoch'), n, {_PERCENTILES}
    FROM ranked GROUP BY hour ORDER BY hour
"""
_HELD_TIMES = f"""
    WITH span AS (SELECT ? AS first_ns, ? AS end_ns),
    times AS (
        SELECT reason, coalesce(resumed_ns, ended_ns, {EVER_NS}) > end_ns AS is_open,
            (min(coalesce(resumed_ns, ended_ns, {EVER_NS}), end_ns) - max(paused_ns, first_ns))
                / 1000000 AS ms
        FROM pause, span
        WHERE paused_ns <= end_ns AND coalesce(resumed_ns, ended_ns, {EVER_NS}) > first_ns),
    ranked AS (
        SELECT reason, is_open, ms, row_number() OVER (PARTITION BY reason ORDER BY ms) AS place,
            count(*) OVER (PARTITION BY reason) AS n
        FROM times)
    SELECT reason, n, {_PERCENTILES}, sum(ms), sum(is_open)
    FROM ranked GROUP BY reason ORDER BY reason
"""
_MISS_CAUSES = """
    SELECT
        parted_because, count(*), sum(num_prompt_tokens), sum(num_memory_tokens + num_disk_tokens),
        sum(num_prefilled_tokens), sum(waited_ns) / 1000000
    FROM request WHERE num_admissions > 0 AND received_ns BETWEEN ? AND ?
    GROUP BY parted_because ORDER BY sum(num_prefilled_tokens) DESC, parted_because
"""
_WRITES = """
    SELECT
        d.number, q.request_id, d.reason, d.part, sum(d.outcome = 'saved'),
        sum(d.outcome <> 'saved'), sum(d.saved_bytes),
        round(coalesce(sum(d.duration_ns), 0) / 1e6, 3)
    FROM disk_write d LEFT JOIN request q ON q.number = d.number
    WHERE d.number > ? AND d.number <= ? AND d.at_ns BETWEEN ? AND ?
    GROUP BY d.number, d.reason, d.part ORDER BY d.number, d.reason, d.part
"""


def cache_hits(reader: JournalReader, span: Span = ALWAYS) -> list[CacheHits]:
    """All hours and models, the oldest first."""
    return _sums(reader, CacheHits, _HITS, span)


def first_tokens(reader: JournalReader, span: Span = ALWAYS) -> list[FirstTokens]:
    """All hours in which a request was received that has got its first token, the oldest first."""
    return _sums(reader, FirstTokens, _FIRST_TOKENS, span)


def held_times(reader: JournalReader, span: Span = ALWAYS) -> list[HeldWithin]:
    """How long requests were held in the span, by the reason of their pauses."""
    with reader.transaction() as run:
        until = Span(span.first_ns, end_of(run, span))
    return _sums(reader, HeldWithin, _HELD_TIMES, until)


def miss_causes(reader: JournalReader, span: Span = ALWAYS) -> list[MissCause]:
    """Why prompts were computed, what cost most first."""
    return _sums(reader, MissCause, _MISS_CAUSES, span)


def request_writes(reader: JournalReader, span: Span = ALWAYS) -> Iterator[RequestWrites]:
    """What was written for each request, by reason and part, in the order of arrival."""
    with reader.transaction() as run:
        query = "SELECT min(number), max(number) FROM disk_write WHERE seq > ? AND seq <= ?"
        first, last = run(query, seqs_within(run, span)).one()
    if first is None:
        return
    # There are few files of each request, so the rows of so many requests are few as well.
    for number in range(first - 1, last, BATCH_REQUESTS):
        through = min(number + BATCH_REQUESTS, last)
        with reader.transaction() as run:
            values = (number, through, span.first_ns, span.last_ns)
            rows = [RequestWrites(*row) for row in run(_WRITES, values).fetchall()]
        yield from rows


def orphan_ends(reader: JournalReader, span: Span = ALWAYS) -> dict[str, int]:
    """How often what became of a request that had no client for some of the span, by `outcome`."""
    query = (
        "SELECT outcome, count(*) FROM orphan"
        f" WHERE lost_ns <= ? AND (lost_ns >= ? OR coalesce(ended_ns, {EVER_NS}) > ?)"
        " GROUP BY outcome ORDER BY outcome"
    )
    ends = (span.last_ns, span.first_ns, span.first_ns)
    with reader.transaction() as run:
        return {row[0]: row[1] for row in run(query, ends).fetchall()}


def _sums(reader: JournalReader, cls: type[Sums], query: str, span: Span) -> list[Sums]:
    """One read: the rows are few."""
    with reader.transaction() as run:
        return [cls(*row) for row in run(query, (span.first_ns, span.last_ns)).fetchall()]
