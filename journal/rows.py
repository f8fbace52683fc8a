"""The rows of the projections, as mutable records whose fields are the columns in their order."""

from dataclasses import dataclass, field

import msgspec

from journal import events
from journal.blocks import BlockChange
from journal.events import Record


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


class OpenRows(msgspec.Struct, kw_only=True):
    """The rows that later events may change: the open requests with their pauses and pins and the
    clients that they miss, the newest run and minute, and the time of the last event.
    """

    requests: list[RequestRow]
    run: RunRow | None
    minute: MinuteRow | None
    last_at_ns: int
    pauses: list[PauseRow] = []
    pins: list[PinRow] = []
    orphans: list[OrphanRow] = []


@dataclass(slots=True)
class Changes:
    """The rows to write, by key; of orphans that is the pair of seq and number. `ended` are the
    numbers of the requests that ended; a pin that is null is gone. `blocks` is what happened to
    blocks, in order.
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


def _json(value: object) -> str:
    return msgspec.json.encode(value, order="sorted").decode()


def run_row(record: Record, event: events.ServerStarted) -> RunRow:
    """The row of a run that begins with this record."""
    return RunRow(
        run_id=record.run_id,
        first_seq=record.seq,
        started_ns=record.at_ns,
        process_id=event.process_id,
        policy_version=event.policy_version,
        code_digest=event.code_digest,
        model_name=event.model.name,
        model_fingerprint=event.model.fingerprint,
        engine_nonce=event.engine_nonce,
        platform=event.platform,
        blas=event.blas,
        sqlite_version=event.versions.get("sqlite"),
        mlx_version=event.versions.get("mlx"),
        python_version=event.versions.get("python"),
        versions=_json(event.versions),
        limits=_json(event.limits),
        configuration=_json(event.configuration),
        kv_block_tokens=event.limits.kv.block_tokens if event.limits.kv is not None else None,
    )


def run_ready(run: RunRow, record: Record, event: events.EngineReady) -> None:
    """The engine of the run can be used, and what was estimated is known."""
    run.ready_ns = record.at_ns
    run.one_row_only = int(event.one_row_only)
    run.load_duration_ns = event.load_ns
    run.model_fingerprint = event.model.fingerprint
    run.kv_domain = event.kv_domain or None


def request_row(record: Record, event: events.RequestReceived) -> RequestRow:
    """The row of a request that arrives with this record."""
    return RequestRow(
        number=event.number,
        request_id=event.request_id,
        client_request_id=event.client_request_id,
        model_fingerprint=event.model_fingerprint,
        route=event.route,
        stream=int(event.stream),
        phase="waiting",
        run_id=record.run_id,
        received_seq=record.seq,
        received_ns=record.at_ns,
        num_prompt_tokens=event.num_prompt_tokens,
        asked_max_tokens=event.max_tokens,
        has_key=int(bool(event.key_digest)),
        owner_digest=event.owner_digest,
    )


def explain(row: RequestRow, event: events.RequestRejected) -> None:
    """The numbers with which the request was refused."""
    row.num_waiting = event.num_waiting
    if event.numbers is not None:
        row.required_bytes = event.numbers.required_bytes
        row.capacity_bytes = event.numbers.capacity_bytes
        row.max_context_tokens = event.numbers.max_context_tokens


def sample_row(record: Record, event: events.MemorySampled, run: RunRow) -> SampleRow:
    """The row of a reading in this run."""
    return SampleRow(
        seq=record.seq,
        run_id=record.run_id,
        at_ns=record.at_ns,
        active_bytes=event.active_bytes,
        cached_bytes=event.cached_bytes,
        peak_bytes=event.peak_bytes,
        process_bytes=event.process_bytes,
        available_bytes=event.available_bytes,
        age_ns=event.age_ns,
        ceiling_bytes=msgspec.json.decode(run.limits)["ceiling_bytes"],
    )
