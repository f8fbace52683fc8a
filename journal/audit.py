"""Typed readers over the SQL views. journal/views.md explains each column."""

from collections.abc import Iterator
from typing import TypeVar

import msgspec

from journal.reader import JournalReader

BATCH_ROWS = 1_000


class RequestFigures(msgspec.Struct, frozen=True):
    """A row of the view `requests`."""

    number: int
    request_id: str
    client_request_id: str | None
    route: str
    model_fingerprint: str
    phase: str
    outcome: str | None
    reason: str | None
    detail: str | None
    received_at: str
    ended_at: str | None
    waited_ms: int | None
    prefill_ms: int
    first_token_ms: int | None
    decode_ms: int | None
    total_ms: int | None
    num_prompt_tokens: int
    num_cached_tokens: int | None
    num_memory_tokens: int
    num_disk_tokens: int
    num_prefilled_tokens: int
    num_fed_tokens: int
    num_output_tokens: int | None
    parted_because: str | None
    parted_at_tokens: int | None
    waited_for_blocks_ms: int
    asked_max_tokens: int | None
    max_tokens: int | None
    decode_tokens_per_s: float | None
    reserved_bytes: int | None
    num_waiting: int | None
    num_admissions: int
    num_retries: int
    num_recoveries: int
    num_deaths: int
    run_id: int
    ended_run_id: int | None
    received_seq: int
    ended_seq: int | None


class RunFigures(msgspec.Struct, frozen=True):
    """A row of the view `runs`."""

    run_id: int
    started_at: str
    ready_at: str | None
    ended_at: str | None
    ended_by: str | None
    end_reason: str | None
    load_ms: int | None
    model_name: str
    model_fingerprint: str
    one_row_only: int | None
    kv_domain: str | None
    kv_block_tokens: int | None
    policy_version: int
    code_digest: str
    platform: str
    blas: str
    sqlite_version: str | None
    mlx_version: str | None
    python_version: str | None
    versions: str
    limits: str
    configuration: str
    process_id: int
    engine_nonce: int
    first_seq: int


class MinuteFigures(msgspec.Struct, frozen=True):
    """A row of the view `throughput`."""

    minute_at: str
    num_received: int
    num_rejected: int
    num_admitted: int
    num_finished: int
    num_cancelled: int
    num_aborted: int
    num_chunks: int
    num_prefilled_tokens: int
    prefill_ms: int
    prefill_tokens_per_s: float | None
    num_decode_steps: int
    num_output_tokens: int
    decode_ms: int
    decode_tokens_per_s: float | None
    mean_rows: float | None


class Rejection(msgspec.Struct, frozen=True):
    """A row of the view `rejections`."""

    number: int
    request_id: str
    client_request_id: str | None
    route: str
    received_at: str
    reason: str
    num_prompt_tokens: int
    asked_max_tokens: int | None
    num_waiting: int
    required_bytes: int | None
    capacity_bytes: int | None
    max_context_tokens: int | None
    run_id: int
    ended_seq: int


class CacheMiss(msgspec.Struct, frozen=True):
    """A row of the view `cache_misses`."""

    number: int
    request_id: str
    received_at: str
    num_prompt_tokens: int
    num_memory_tokens: int
    num_disk_tokens: int
    num_prefilled_tokens: int
    parted_at_tokens: int | None
    parted_because: str | None
    waited_for_blocks_ms: int
    phase: str


class CacheHits(msgspec.Struct, frozen=True):
    """A row of the view `cache_hits`."""

    hour_at: str
    model_fingerprint: str
    model_name: str
    num_requests: int
    num_prompt_tokens: int
    num_memory_tokens: int
    num_disk_tokens: int
    num_prefilled_tokens: int
    hit_rate: float | None


class BlockFigures(msgspec.Struct, frozen=True):
    """A row of the view `blocks`."""

    hash: str
    domain: str
    parent: str
    end_tokens: int
    block_bytes: int
    state_bytes: int
    planned_at: str
    saved_at: str | None
    last_use_at: str | None


Figures = TypeVar(
    "Figures", RequestFigures, RunFigures, MinuteFigures, Rejection, CacheMiss, BlockFigures
)


def requests(reader: JournalReader) -> Iterator[RequestFigures]:
    """All requests, in the order of arrival."""
    return _rows(reader, RequestFigures, "requests", "number", 0)


def runs(reader: JournalReader) -> Iterator[RunFigures]:
    """All runs, the oldest first."""
    return _rows(reader, RunFigures, "runs", "run_id", 0)


def throughput(reader: JournalReader) -> Iterator[MinuteFigures]:
    """All minutes in which something happened, the oldest first."""
    return _rows(reader, MinuteFigures, "throughput", "minute_at", "")


def rejections(reader: JournalReader) -> Iterator[Rejection]:
    """All rejected requests, in the order of arrival."""
    return _rows(reader, Rejection, "rejections", "number", 0)


def cache_misses(reader: JournalReader) -> Iterator[CacheMiss]:
    """All requests that were admitted, in the order of arrival."""
    return _rows(reader, CacheMiss, "cache_misses", "number", 0)


def cache_hits(reader: JournalReader) -> list[CacheHits]:
    """All hours and models, the oldest first: one read, since the view is a sum over requests."""
    names = ", ".join(CacheHits.__struct_fields__)
    query = f"SELECT {names} FROM cache_hits ORDER BY hour_at, model_fingerprint"
    with reader.transaction() as run:
        return [CacheHits(*row) for row in run(query).fetchall()]


def blocks(reader: JournalReader) -> Iterator[BlockFigures]:
    """All blocks, in the order of their hashes."""
    return _rows(reader, BlockFigures, "blocks", "hash", "")


def block(reader: JournalReader, name: str) -> BlockFigures | None:
    """One block by its hash, or None when it is not there."""
    names = ", ".join(BlockFigures.__struct_fields__)
    with reader.transaction() as run:
        row = run(f"SELECT {names} FROM blocks WHERE hash = ?", (name,)).fetchone()
    return None if row is None else BlockFigures(*row)


def _rows(
    reader: JournalReader, cls: type[Figures], view: str, key: str, after: int | str
) -> Iterator[Figures]:
    """The rows of a view in batches, each in a transaction of its own."""
    names = ", ".join(cls.__struct_fields__)
    query = f"SELECT {names} FROM {view} WHERE {key} > ? ORDER BY {key} LIMIT ?"
    while True:
        with reader.transaction() as run:
            rows = run(query, (after, BATCH_ROWS)).fetchall()
        if not rows:
            return
        batch = [cls(*row) for row in rows]
        yield from batch
        after = getattr(batch[-1], key)
