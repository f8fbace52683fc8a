"""The rows of the SQL views, one class for each. journal/views.md explains each column."""

import msgspec


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
    has_key: int
    joined_id: str | None
    joined_by: str | None
    orphaned_by: str | None
    orphaned_at: str | None
    num_orphaned: int
    orphaned_ms: int
    num_adoptions: int


class RunFigures(msgspec.Struct, frozen=True):
    """A row of the view `runs`."""

    run_id: int
    started_at: str
    ready_at: str | None
    ended_at: str | None
    drained_at: str | None
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
    num_joined: int
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


class Orphan(msgspec.Struct, frozen=True):
    """A row of the view `orphans`."""

    lost_seq: int
    number: int
    request_id: str
    client_request_id: str | None
    has_key: int
    run_id: int
    orphaned_by: str
    from_phase: str
    phase: str
    orphaned_at: str
    until_at: str | None
    needs_client: int
    outcome: str
    reason: str | None
    adopter_id: str | None
    ended_at: str | None
    orphaned_ms: int | None


class Adoption(msgspec.Struct, frozen=True):
    """A row of the view `adoptions`."""

    seq: int
    adopted_at: str
    run_id: int
    number: int
    request_id: str
    client_request_id: str | None
    adopter_number: int
    adopter_id: str
    adopter_client_request_id: str | None
    joined_by: str
    phase: str
    orphaned_by: str | None
    orphaned_ms: int
    num_output_tokens: int


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


class Phase(msgspec.Struct, frozen=True):
    """A row of the view `phases`."""

    seq: int
    number: int
    request_id: str
    run_id: int
    phase: str
    began_at: str
    ended_at: str | None
    phase_ms: int | None
    next_phase: str | None
    num_waiting: int
    num_rows: int
    num_held: int
    ended_seq: int | None


class Wait(msgspec.Struct, frozen=True):
    """A row of the view `waits`."""

    seq: int
    number: int
    request_id: str
    phase: str
    began_at: str
    ended_at: str | None
    wait_ms: int | None
    next_phase: str | None
    num_waiting: int
    num_rows: int
    num_held: int
    num_deferrals: int
    block_of_id: str | None
    room_from_id: str | None
    room_from_phase: str | None
    held_first_id: str | None


class DiskWrite(msgspec.Struct, frozen=True):
    """A row of the view `disk_writes`."""

    seq: int
    run_id: int
    written_at: str
    number: int | None
    request_id: str | None
    part: str
    reason: str
    outcome: str
    saved_bytes: int
    write_ms: float | None


class FirstTokens(msgspec.Struct, frozen=True):
    """A row of the view `first_tokens`."""

    hour_at: str
    num_requests: int
    p50_ms: int
    p90_ms: int
    p99_ms: int
    max_ms: int


class HeldTimes(msgspec.Struct, frozen=True):
    """A row of the view `held_times`: of each percentile the smallest time that so many percent of
    the pauses did not exceed.
    """

    reason: str
    num_pauses: int
    p50_ms: int
    p90_ms: int
    p99_ms: int
    max_ms: int
    held_ms: int


class MissCause(msgspec.Struct, frozen=True):
    """A row of the view `miss_causes`."""

    parted_because: str | None
    num_requests: int
    num_prompt_tokens: int
    num_found_tokens: int
    num_prefilled_tokens: int
    waited_for_blocks_ms: int
