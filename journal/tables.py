"""The tables of the journal, as SQLAlchemy Core sees them.

migrations/ makes them; a test compares the two. The columns of the projections are explained in
journal/views.md, where the views over them are described.
"""

from sqlalchemy import (
    CheckConstraint,
    Column,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    text,
)

SCHEMA = "0006"
"""The newest revision in migrations/versions."""

metadata = MetaData()

events = Table(
    "events",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("run_id", Integer, nullable=False),
    Column("step", Integer, nullable=False),
    Column("source", Text, CheckConstraint("source IN ('fact', 'decision')"), nullable=False),
    Column("kind", Text, nullable=False),
    Column("request_id", Text),
    Column("at_ns", Integer, nullable=False),
    Column("version", Integer, nullable=False),
    Column("body", Text, nullable=False),
    # The events of one request. Decode steps name no request, so they pay nothing for it.
    Index("events_of_request", "request_id", sqlite_where=text("request_id IS NOT NULL")),
    sqlite_strict=True,
)

step_tokens = Table(
    "step_tokens",
    metadata,
    # The seq of the tokens_decoded whose tokens these are.
    Column("seq", Integer, primary_key=True),
    Column("ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary),
    sqlite_strict=True,
)

token_ids = Table(
    "token_ids",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("part", Text, CheckConstraint("part IN ('prompt', 'output')"), primary_key=True),
    # The index of the first token within its part: an output grows by rows until its end.
    Column("first_index", Integer, primary_key=True),
    Column("ids", LargeBinary, nullable=False),
    Column("logprobs", LargeBinary),
    sqlite_strict=True,
)

request_parameters = Table(
    "request_parameters",
    metadata,
    Column("request_id", Text, primary_key=True),
    Column("body", LargeBinary, nullable=False),
    sqlite_strict=True,
)

snapshots = Table(
    "snapshots",
    metadata,
    Column("seq", Integer, primary_key=True),
    Column("state_version", Integer, nullable=False),
    Column("code_digest", Text, nullable=False),
    Column("body", LargeBinary, nullable=False),
    sqlite_strict=True,
)

request = Table(
    "request",
    metadata,
    Column("number", Integer, primary_key=True),
    Column("request_id", Text, nullable=False, unique=True),
    Column("client_request_id", Text),
    Column("model_fingerprint", Text, nullable=False),
    Column("route", Text, nullable=False),
    Column("stream", Integer, nullable=False),
    Column("phase", Text, nullable=False),
    Column("run_id", Integer, nullable=False),
    Column("received_seq", Integer, nullable=False),
    Column("received_ns", Integer, nullable=False),
    Column("queued_ns", Integer),
    Column("admitted_ns", Integer),
    Column("prefill_started_ns", Integer),
    Column("decode_started_ns", Integer),
    Column("first_token_ns", Integer),
    Column("ended_ns", Integer),
    Column("ended_run_id", Integer),
    Column("ended_seq", Integer),
    Column("outcome", Text),
    Column("reason", Text),
    Column("detail", Text),
    Column("num_prompt_tokens", Integer, nullable=False),
    Column("asked_max_tokens", Integer),
    Column("max_tokens", Integer),
    Column("num_cached_tokens", Integer),
    Column("num_fed_tokens", Integer, nullable=False),
    Column("num_output_tokens", Integer),
    Column("prefill_duration_ns", Integer, nullable=False),
    Column("reserved_bytes", Integer),
    Column("num_waiting", Integer),
    Column("required_bytes", Integer),
    Column("capacity_bytes", Integer),
    Column("max_context_tokens", Integer),
    Column("num_admissions", Integer, nullable=False),
    Column("num_retries", Integer, nullable=False),
    Column("num_recoveries", Integer, nullable=False),
    Column("num_deaths", Integer, nullable=False),
    Column("num_memory_tokens", Integer, nullable=False, server_default="0"),
    Column("num_disk_tokens", Integer, nullable=False, server_default="0"),
    Column("num_prefilled_tokens", Integer, nullable=False, server_default="0"),
    Column("parted_because", Text),
    Column("parted_at_tokens", Integer),
    Column("waited_ns", Integer, nullable=False, server_default="0"),
    Column("num_pauses", Integer, nullable=False, server_default="0"),
    Column("held_ns", Integer, nullable=False, server_default="0"),
    Column("has_key", Integer, nullable=False, server_default="0"),
    Column("joined_id", Text),
    Column("num_orphaned", Integer, nullable=False, server_default="0"),
    Column("orphaned_ns", Integer, nullable=False, server_default="0"),
    # Who may see it, also when its first event is gone. It is in no view.
    Column("owner_digest", Text, nullable=False, server_default=""),
    # A start reads the open requests only, whatever the number of those that ended.
    Index("request_open", "number", sqlite_where=text("outcome IS NULL")),
    sqlite_strict=True,
)

run = Table(
    "run",
    metadata,
    Column("run_id", Integer, primary_key=True),
    Column("first_seq", Integer, nullable=False),
    Column("started_ns", Integer, nullable=False),
    Column("ready_ns", Integer),
    Column("ended_ns", Integer),
    Column("ended_by", Text),
    Column("end_reason", Text),
    Column("process_id", Integer, nullable=False),
    Column("policy_version", Integer, nullable=False),
    Column("code_digest", Text, nullable=False),
    Column("model_name", Text, nullable=False),
    Column("model_fingerprint", Text, nullable=False),
    Column("engine_nonce", Integer, nullable=False),
    Column("one_row_only", Integer),
    Column("load_duration_ns", Integer),
    Column("platform", Text, nullable=False),
    Column("blas", Text, nullable=False),
    Column("sqlite_version", Text),
    Column("mlx_version", Text),
    Column("python_version", Text),
    Column("versions", Text, nullable=False),
    Column("limits", Text, nullable=False),
    Column("configuration", Text, nullable=False),
    Column("kv_domain", Text),
    Column("kv_block_tokens", Integer),
    Column("drained_ns", Integer),
    sqlite_strict=True,
)

block = Table(
    "block",
    metadata,
    Column("hash", Text, primary_key=True),
    Column("domain", Text, nullable=False),
    Column("parent", Text, nullable=False),
    Column("end_tokens", Integer, nullable=False),
    Column("block_bytes", Integer, nullable=False),
    Column("state_bytes", Integer, nullable=False),
    Column("planned_ns", Integer, nullable=False),
    Column("saved_ns", Integer),
    Column("last_use_ns", Integer),
    Column("writing_parts", Integer, nullable=False, server_default="0"),
    # A start removes what the run before has left half written, whatever the number of blocks.
    Index("block_planned", "hash", sqlite_where=text("saved_ns IS NULL")),
    Index("block_writing", "hash", sqlite_where=text("writing_parts <> 0")),
    sqlite_strict=True,
)

minute = Table(
    "minute",
    metadata,
    Column("minute", Integer, primary_key=True),
    Column("num_received", Integer, nullable=False),
    Column("num_rejected", Integer, nullable=False),
    Column("num_finished", Integer, nullable=False),
    Column("num_cancelled", Integer, nullable=False),
    Column("num_aborted", Integer, nullable=False),
    Column("num_admitted", Integer, nullable=False),
    Column("num_chunks", Integer, nullable=False),
    Column("num_prefilled_tokens", Integer, nullable=False),
    Column("prefill_duration_ns", Integer, nullable=False),
    Column("num_decode_steps", Integer, nullable=False),
    Column("num_decode_rows", Integer, nullable=False),
    Column("num_output_tokens", Integer, nullable=False),
    Column("decode_duration_ns", Integer, nullable=False),
    # Events behind it (decode steps) are counted in memory only, and again after a crash.
    Column("through_seq", Integer, nullable=False),
    Column("num_pauses", Integer, nullable=False, server_default="0"),
    Column("num_resumes", Integer, nullable=False, server_default="0"),
    Column("held_ns", Integer, nullable=False, server_default="0"),
    Column("num_joined", Integer, nullable=False, server_default="0"),
    sqlite_strict=True,
)

pause = Table(
    "pause",
    metadata,
    # The seq of the event that began it.
    Column("pause_seq", Integer, primary_key=True),
    Column("number", Integer, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("run_id", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    Column("from_phase", Text, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("started_ns", Integer, nullable=False),
    Column("saved_ns", Integer),
    Column("paused_ns", Integer),
    Column("freed_ns", Integer),
    Column("resume_started_ns", Integer),
    Column("resumed_ns", Integer),
    Column("ended_ns", Integer),
    Column("rank", Integer),
    Column("num_candidates", Integer),
    Column("frees_bytes", Integer),
    Column("unsaved_bytes", Integer),
    Column("usage_bytes", Integer),
    Column("ceiling_bytes", Integer),
    Column("freed_bytes", Integer),
    Column("domain", Text),
    Column("tail_bytes", Integer),
    Column("num_blocks", Integer),
    Column("num_cached_tokens", Integer, nullable=False),
    Column("num_output_tokens", Integer, nullable=False),
    Column("dropped", Text),
    Column("read_bytes", Integer),
    Column("num_restored_tokens", Integer),
    Column("num_lost_tokens", Integer),
    Column("resumed_run_id", Integer),
    # A start reads the open ones only.
    Index("pause_open", "pause_seq", sqlite_where=text("outcome = 'open'")),
    sqlite_strict=True,
)

pin = Table(
    "pin",
    metadata,
    # That of the request.
    Column("number", Integer, primary_key=True),
    Column("request_id", Text, nullable=False),
    Column("domain", Text, nullable=False),
    Column("num_blocks", Integer, nullable=False),
    Column("last_hash", Text, nullable=False),
    Column("num_tokens", Integer, nullable=False),
    Column("tail_bytes", Integer, nullable=False),
    Column("pinned_ns", Integer, nullable=False),
    sqlite_strict=True,
)

orphan = Table(
    "orphan",
    metadata,
    # The seq of the event with which the request lost its client: a start, for many of them.
    Column("lost_seq", Integer, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("request_id", Text, nullable=False),
    Column("run_id", Integer, nullable=False),
    Column("orphaned_by", Text, nullable=False),
    Column("from_phase", Text, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("lost_ns", Integer, nullable=False),
    Column("until_ns", Integer),
    Column("needs_client", Integer, nullable=False),
    Column("ended_ns", Integer),
    # A start reads the open ones only.
    Index("orphan_open", "number", sqlite_where=text("outcome = 'open'")),
    sqlite_strict=True,
)

adoption = Table(
    "adoption",
    metadata,
    # The seq of its request_adopted.
    Column("seq", Integer, primary_key=True),
    Column("at_ns", Integer, nullable=False),
    Column("run_id", Integer, nullable=False),
    Column("number", Integer, nullable=False),
    Column("request_id", Text, nullable=False),
    Column("adopter_number", Integer, nullable=False),
    Column("adopter_id", Text, nullable=False),
    Column("joined_by", Text, nullable=False),
    Column("phase", Text, nullable=False),
    Column("orphaned_by", Text),
    Column("orphaned_ns", Integer, nullable=False),
    Column("num_output_tokens", Integer, nullable=False),
    # The view of requests counts those of each.
    Index("adoption_of", "number"),
    sqlite_strict=True,
)

phase = Table(
    "phase",
    metadata,
    # The seq of the event with which it began: a start, for many of them.
    Column("seq", Integer, primary_key=True),
    Column("number", Integer, primary_key=True),
    Column("run_id", Integer, nullable=False),
    Column("phase", Text, nullable=False),
    Column("began_ns", Integer, nullable=False),
    Column("num_waiting", Integer, nullable=False),
    Column("num_rows", Integer, nullable=False),
    Column("num_held", Integer, nullable=False),
    Column("num_deferrals", Integer, nullable=False),
    Column("computed_by", Integer),
    Column("ended_seq", Integer),
    Column("ended_ns", Integer),
    Column("next_phase", Text),
    Column("gave_row_back", Integer, nullable=False),
    Index("phase_of", "number", "seq"),
    # A start reads the open ones only.
    Index("phase_open", "number", sqlite_where=text("ended_seq IS NULL")),
    # Who made room for the one that waited, and which held request went before it.
    Index("phase_gave_row_back", "ended_seq", sqlite_where=text("gave_row_back = 1")),
    Index("phase_resuming", "seq", sqlite_where=text("phase = 'resuming'")),
    sqlite_strict=True,
)

disk_plan = Table(
    "disk_plan",
    metadata,
    Column("hash", Text, primary_key=True),
    Column("part", Text, primary_key=True),
    Column("number", Integer, nullable=False),
    Column("reason", Text, nullable=False),
    sqlite_strict=True,
)

disk_write = Table(
    "disk_write",
    metadata,
    # The seq of the event that says what came of it: the row goes when a compaction takes that.
    Column("seq", Integer, primary_key=True),
    Column("run_id", Integer, nullable=False),
    Column("at_ns", Integer, nullable=False),
    Column("number", Integer, nullable=False),
    Column("part", Text, nullable=False),
    Column("reason", Text, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("saved_bytes", Integer, nullable=False),
    Column("duration_ns", Integer),
    Index("disk_write_of", "number"),
    sqlite_strict=True,
)

memory_sample = Table(
    "memory_sample",
    metadata,
    # The seq of its memory_sampled: the row goes when a compaction takes that event.
    Column("seq", Integer, primary_key=True),
    Column("run_id", Integer, nullable=False),
    Column("at_ns", Integer, nullable=False),
    Column("active_bytes", Integer, nullable=False),
    Column("cached_bytes", Integer, nullable=False),
    Column("peak_bytes", Integer, nullable=False),
    Column("process_bytes", Integer, nullable=False),
    Column("available_bytes", Integer, nullable=False),
    Column("age_ns", Integer, nullable=False),
    # That with which the run began.
    Column("ceiling_bytes", Integer),
    sqlite_strict=True,
)

carried_rows = Table(
    "carried_rows",
    metadata,
    # The seq of the state_carried that this file begins with, or that of a point behind it.
    Column("seq", Integer, primary_key=True),
    # The open rows of the projections as they were there: a rebuild starts from them.
    Column("body", Text, nullable=False),
    sqlite_strict=True,
)
