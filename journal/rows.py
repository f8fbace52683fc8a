"""The rows of the projections, as mutable records whose fields are the columns in their order."""

from dataclasses import dataclass, field

import msgspec

from journal.blocks import BlockChange


class RequestRow(msgspec.Struct, kw_only=True):
    """A row of `request`, column by column; journal/views.md says what each is. `owner_digest` is
    that of `request_received`, and in no view.
    """

    number: int
    request_id: str
    client_request_id: str | None
    model_fingerprint: str
    route: str
    stream: int
    phase: str
    run_id: int
    received_seq: int
    received_ns: int
    queued_ns: int | None = None
    admitted_ns: int | None = None
    prefill_started_ns: int | None = None
    decode_started_ns: int | None = None
    first_token_ns: int | None = None
    ended_ns: int | None = None
    ended_run_id: int | None = None
    ended_seq: int | None = None
    outcome: str | None = None
    reason: str | None = None
    detail: str | None = None
    num_prompt_tokens: int
    asked_max_tokens: int | None
    max_tokens: int | None = None
    num_cached_tokens: int | None = None
    num_fed_tokens: int = 0
    num_output_tokens: int | None = None
    prefill_duration_ns: int = 0
    reserved_bytes: int | None = None
    num_waiting: int | None = None
    required_bytes: int | None = None
    capacity_bytes: int | None = None
    max_context_tokens: int | None = None
    num_admissions: int = 0
    num_retries: int = 0
    num_recoveries: int = 0
    num_deaths: int = 0
    num_memory_tokens: int = 0
    num_disk_tokens: int = 0
    num_prefilled_tokens: int = 0
    parted_because: str | None = None
    parted_at_tokens: int | None = None
    waited_ns: int = 0
    num_pauses: int = 0
    held_ns: int = 0
    has_key: int = 0
    joined_id: str | None = None
    num_orphaned: int = 0
    orphaned_ns: int = 0
    owner_digest: str = ""


class RunRow(msgspec.Struct, kw_only=True):
    """A row of `run`: one life of the server process."""

    run_id: int
    first_seq: int
    started_ns: int
    ready_ns: int | None = None
    ended_ns: int | None = None
    ended_by: str | None = None
    end_reason: str | None = None
    process_id: int
    policy_version: int
    code_digest: str
    model_name: str
    model_fingerprint: str
    engine_nonce: int
    one_row_only: int | None = None
    load_duration_ns: int | None = None
    platform: str
    blas: str
    sqlite_version: str | None
    mlx_version: str | None
    python_version: str | None
    versions: str
    limits: str
    configuration: str
    kv_domain: str | None = None
    kv_block_tokens: int | None = None
    drained_ns: int | None = None


class MinuteRow(msgspec.Struct, kw_only=True):
    """A row of `minute`: what happened in one minute of Unix time."""

    minute: int
    num_received: int = 0
    num_rejected: int = 0
    num_finished: int = 0
    num_cancelled: int = 0
    num_aborted: int = 0
    num_admitted: int = 0
    num_chunks: int = 0
    num_prefilled_tokens: int = 0
    prefill_duration_ns: int = 0
    num_decode_steps: int = 0
    num_decode_rows: int = 0
    num_output_tokens: int = 0
    decode_duration_ns: int = 0
    through_seq: int = 0
    num_pauses: int = 0
    num_resumes: int = 0
    held_ns: int = 0
    num_joined: int = 0


class PauseRow(msgspec.Struct, kw_only=True):
    """A row of `pause`: a request was to be held, and what came of it. Its key is the seq of the
    event that began it; it is `open` until the request goes on, ends, or waits without its KV.
    """

    pause_seq: int
    number: int
    request_id: str
    run_id: int
    reason: str
    from_phase: str
    outcome: str = "open"
    started_ns: int
    saved_ns: int | None = None
    paused_ns: int | None = None
    freed_ns: int | None = None
    resume_started_ns: int | None = None
    resumed_ns: int | None = None
    ended_ns: int | None = None
    rank: int | None = None
    num_candidates: int | None = None
    frees_bytes: int | None = None
    unsaved_bytes: int | None = None
    usage_bytes: int | None = None
    ceiling_bytes: int | None = None
    freed_bytes: int | None = None
    domain: str | None = None
    tail_bytes: int | None = None
    num_blocks: int | None = None
    num_cached_tokens: int
    num_output_tokens: int
    dropped: str | None = None
    read_bytes: int | None = None
    num_restored_tokens: int | None = None
    num_lost_tokens: int | None = None
    resumed_run_id: int | None = None


class PinRow(msgspec.Struct, kw_only=True):
    """A row of `pin`: the chain that a held request keeps on disk."""

    number: int
    request_id: str
    domain: str
    num_blocks: int
    last_hash: str
    num_tokens: int
    tail_bytes: int
    pinned_ns: int


class OrphanRow(msgspec.Struct, kw_only=True):
    """A row of `orphan`: a request lost its client, and what came of it. It is `open` until the
    request has a client again, or ends. Of the time for which it is waited `until_ns` is the end,
    null where it runs on without limit; `needs_client`: it does not go on before.
    """

    lost_seq: int
    number: int
    request_id: str
    run_id: int
    orphaned_by: str
    from_phase: str
    outcome: str = "open"
    lost_ns: int
    until_ns: int | None = None
    needs_client: int = 0
    ended_ns: int | None = None


class AdoptionRow(msgspec.Struct, kw_only=True):
    """A row of `adoption`: a request that was sent again has taken the place of a lost client. Its
    key is the seq of the event.
    """

    seq: int
    at_ns: int
    run_id: int
    number: int
    request_id: str
    adopter_number: int
    adopter_id: str
    joined_by: str
    phase: str
    orphaned_by: str | None
    orphaned_ns: int
    num_output_tokens: int


class SampleRow(msgspec.Struct, kw_only=True):
    """A row of `memory_sample`: one reading."""

    seq: int
    run_id: int
    at_ns: int
    active_bytes: int
    cached_bytes: int
    peak_bytes: int
    process_bytes: int
    available_bytes: int
    age_ns: int
    ceiling_bytes: int | None


class PhaseRow(msgspec.Struct, kw_only=True):
    """A row of `phase`: a request was in one phase, from the event `seq` to the event `ended_seq`.
    As it began, so many others waited, had a row in the engine, and were held. `computed_by` is the
    number of the request for whose block it waited last, if it did.
    """

    seq: int
    number: int
    run_id: int
    phase: str
    began_ns: int
    num_waiting: int
    num_rows: int
    num_held: int
    num_deferrals: int = 0
    computed_by: int | None = None
    ended_seq: int | None = None
    ended_ns: int | None = None
    next_phase: str | None = None
    gave_row_back: int = 0


class DiskWriteRow(msgspec.Struct, kw_only=True):
    """A row of `disk_write`: a file of saved KV was written, or came to nothing. `number` is that
    of the request whose KV it is, and 0 where its plan is not known.
    """

    seq: int
    run_id: int
    at_ns: int
    number: int
    part: str
    reason: str
    outcome: str
    saved_bytes: int = 0
    duration_ns: int | None = None


class DiskPlanRow(msgspec.Struct, frozen=True, kw_only=True):
    """A row of `disk_plan`: a file of a block is on its way to disk, for which request and why."""

    hash: str
    part: str
    number: int
    reason: str


class OpenRows(msgspec.Struct, kw_only=True):
    """The rows that later events may change: the open requests with their phases, pauses and pins
    and the clients that they miss, what is on its way to disk, the newest run and minute, and the
    time of the last event.
    """

    requests: list[RequestRow]
    run: RunRow | None
    minute: MinuteRow | None
    last_at_ns: int
    pauses: list[PauseRow] = []
    pins: list[PinRow] = []
    orphans: list[OrphanRow] = []
    phases: list[PhaseRow] = []
    plans: list[DiskPlanRow] = []


@dataclass(slots=True)
class Changes:
    """The rows to write, by key; of orphans and phases that is the pair of seq and number. `ended`
    are the numbers of the requests that ended; a pin that is null is gone, and so is a plan, by
    hash and part. `blocks` is what happened to blocks, in order.
    """

    requests: dict[int, RequestRow] = field(default_factory=dict[int, RequestRow])
    runs: dict[int, RunRow] = field(default_factory=dict[int, RunRow])
    minutes: dict[int, MinuteRow] = field(default_factory=dict[int, MinuteRow])
    ended: list[int] = field(default_factory=list[int])
    blocks: list[BlockChange] = field(default_factory=list[BlockChange])
    pauses: dict[int, PauseRow] = field(default_factory=dict[int, PauseRow])
    pins: dict[int, PinRow | None] = field(default_factory=dict[int, "PinRow | None"])
    samples: dict[int, SampleRow] = field(default_factory=dict[int, SampleRow])
    orphans: dict[tuple[int, int], OrphanRow] = field(
        default_factory=dict[tuple[int, int], OrphanRow]
    )
    adoptions: dict[int, AdoptionRow] = field(default_factory=dict[int, AdoptionRow])
    phases: dict[tuple[int, int], PhaseRow] = field(default_factory=dict[tuple[int, int], PhaseRow])
    writes: dict[int, DiskWriteRow] = field(default_factory=dict[int, DiskWriteRow])
    plans: dict[tuple[str, str], DiskPlanRow | None] = field(
        default_factory=dict[tuple[str, str], "DiskPlanRow | None"]
    )
