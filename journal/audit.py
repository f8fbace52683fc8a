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
    num_pauses: int
    held_ms: int


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
    num_pauses: int
    num_resumes: int
    held_ms: int


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


class Pause(msgspec.Struct, frozen=True):
    """A row of the view `pauses`."""

    pause_seq: int
    number: int
    request_id: str
    run_id: int
    reason: str
    from_phase: str
    outcome: str
    dropped: str | None
    started_at: str
    saved_at: str | None
    paused_at: str | None
    freed_at: str | None
    resume_started_at: str | None
    resumed_at: str | None
    ended_at: str | None
    pausing_ms: int | None
    freeing_ms: int | None
    held_ms: int | None
    resuming_ms: int | None
    rank: int | None
    num_candidates: int | None
    usage_bytes: int | None
    ceiling_bytes: int | None
    frees_bytes: int | None
    unsaved_bytes: int | None
    freed_bytes: int | None
    tail_bytes: int | None
    num_blocks: int | None
    read_bytes: int | None
    num_cached_tokens: int
    num_output_tokens: int
    num_restored_tokens: int | None
    num_lost_tokens: int | None
    resumed_run_id: int | None


class Pin(msgspec.Struct, frozen=True):
    """A row of the view `pins`."""

    number: int
    request_id: str
    domain: str
    num_blocks: int
    last_hash: str
    num_tokens: int
    tail_bytes: int
    pinned_at: str


class PinnedBlock(msgspec.Struct, frozen=True):
    """A row of the view `pinned_blocks`."""

    hash: str
    domain: str
    end_tokens: int
    num_pins: int


class Reading(msgspec.Struct, frozen=True):
    """A row of the view `memory`."""

    seq: int
    run_id: int
    sampled_at: str
    active_bytes: int
    cached_bytes: int
    peak_bytes: int
    process_bytes: int
    available_bytes: int
    age_ms: int
    ceiling_bytes: int | None
    active_share: float | None


class HeldTimes(msgspec.Struct, frozen=True):
    """How long requests were held, over the pauses that are over: of each percentile the smallest
    time that so many percent of them did not exceed. Without any they are null.
    """

    num_pauses: int
    p50_ms: int | None
    p90_ms: int | None
    p99_ms: int | None
    max_ms: int | None


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
    Reading,
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


def pauses(reader: JournalReader) -> Iterator[Pause]:
    """All pauses, in the order in which they began."""
    return _rows(reader, Pause, "pauses", "pause_seq", 0)


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
    return _rows(reader, Pin, "pins", "number", 0)


def pinned_blocks(reader: JournalReader) -> list[PinnedBlock]:
    """The blocks that are pinned now, by their hash: one read, since each walks the chains."""
    names = ", ".join(PinnedBlock.__struct_fields__)
    with reader.transaction() as run:
        rows = run(f"SELECT {names} FROM pinned_blocks ORDER BY hash").fetchall()
    return [PinnedBlock(*row) for row in rows]


def memory(reader: JournalReader) -> Iterator[Reading]:
    """All readings whose events are still there, the oldest first."""
    return _rows(reader, Reading, "memory", "seq", 0)


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
