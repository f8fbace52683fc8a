"""The first schema: events, the side tables of tokens and parameters, snapshots, projections."""

from alembic import op

revision = "0001"
down_revision = None

TABLES = (
    """
    CREATE TABLE events (
        seq INTEGER NOT NULL,
        run_id INTEGER NOT NULL,
        step INTEGER NOT NULL,
        source TEXT NOT NULL CHECK (source IN ('fact', 'decision')),
        kind TEXT NOT NULL,
        request_id TEXT,
        at_ns INTEGER NOT NULL,
        version INTEGER NOT NULL,
        body TEXT NOT NULL,
        PRIMARY KEY (seq)) STRICT
    """,
    "CREATE INDEX events_of_request ON events (request_id) WHERE request_id IS NOT NULL",
    """
    CREATE TABLE step_tokens (
        seq INTEGER NOT NULL,
        ids BLOB NOT NULL,
        logprobs BLOB,
        PRIMARY KEY (seq)) STRICT
    """,
    """
    CREATE TABLE token_ids (
        request_id TEXT NOT NULL,
        part TEXT NOT NULL CHECK (part IN ('prompt', 'output')),
        first_index INTEGER NOT NULL,
        ids BLOB NOT NULL,
        logprobs BLOB,
        PRIMARY KEY (request_id, part, first_index)) STRICT
    """,
    """
    CREATE TABLE request_parameters (
        request_id TEXT NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY (request_id)) STRICT
    """,
    """
    CREATE TABLE snapshots (
        seq INTEGER NOT NULL,
        state_version INTEGER NOT NULL,
        code_digest TEXT NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY (seq)) STRICT
    """,
    """
    CREATE TABLE request (
        number INTEGER NOT NULL,
        request_id TEXT NOT NULL,
        client_request_id TEXT,
        model_fingerprint TEXT NOT NULL,
        route TEXT NOT NULL,
        stream INTEGER NOT NULL,
        phase TEXT NOT NULL,
        run_id INTEGER NOT NULL,
        received_seq INTEGER NOT NULL,
        received_ns INTEGER NOT NULL,
        queued_ns INTEGER,
        admitted_ns INTEGER,
        prefill_started_ns INTEGER,
        decode_started_ns INTEGER,
        first_token_ns INTEGER,
        ended_ns INTEGER,
        ended_run_id INTEGER,
        ended_seq INTEGER,
        outcome TEXT,
        reason TEXT,
        detail TEXT,
        num_prompt_tokens INTEGER NOT NULL,
        asked_max_tokens INTEGER,
        max_tokens INTEGER,
        num_cached_tokens INTEGER,
        num_prefilled_tokens INTEGER NOT NULL,
        num_output_tokens INTEGER,
        prefill_duration_ns INTEGER NOT NULL,
        reserved_bytes INTEGER,
        num_waiting INTEGER,
        required_bytes INTEGER,
        capacity_bytes INTEGER,
        max_context_tokens INTEGER,
        num_admissions INTEGER NOT NULL,
        num_retries INTEGER NOT NULL,
        num_recoveries INTEGER NOT NULL,
        num_deaths INTEGER NOT NULL,
        PRIMARY KEY (number),
        UNIQUE (request_id)) STRICT
    """,
    "CREATE INDEX request_open ON request (number) WHERE outcome IS NULL",
    """
    CREATE TABLE run (
        run_id INTEGER NOT NULL,
        first_seq INTEGER NOT NULL,
        started_ns INTEGER NOT NULL,
        ready_ns INTEGER,
        ended_ns INTEGER,
        ended_by TEXT,
        end_reason TEXT,
        process_id INTEGER NOT NULL,
        policy_version INTEGER NOT NULL,
        code_digest TEXT NOT NULL,
        model_name TEXT NOT NULL,
        model_fingerprint TEXT NOT NULL,
        engine_nonce INTEGER NOT NULL,
        one_row_only INTEGER,
        load_duration_ns INTEGER,
        platform TEXT NOT NULL,
        blas TEXT NOT NULL,
        sqlite_version TEXT,
        mlx_version TEXT,
        python_version TEXT,
        versions TEXT NOT NULL,
        limits TEXT NOT NULL,
        configuration TEXT NOT NULL,
        PRIMARY KEY (run_id)) STRICT
    """,
    """
    CREATE TABLE minute (
        minute INTEGER NOT NULL,
        num_received INTEGER NOT NULL,
        num_rejected INTEGER NOT NULL,
        num_finished INTEGER NOT NULL,
        num_cancelled INTEGER NOT NULL,
        num_aborted INTEGER NOT NULL,
        num_admitted INTEGER NOT NULL,
        num_chunks INTEGER NOT NULL,
        num_prefilled_tokens INTEGER NOT NULL,
        prefill_duration_ns INTEGER NOT NULL,
        num_decode_steps INTEGER NOT NULL,
        num_decode_rows INTEGER NOT NULL,
        num_output_tokens INTEGER NOT NULL,
        decode_duration_ns INTEGER NOT NULL,
        through_seq INTEGER NOT NULL,
        PRIMARY KEY (minute)) STRICT
    """,
    """
    CREATE TABLE carried_rows (
        seq INTEGER NOT NULL,
        body TEXT NOT NULL,
        PRIMARY KEY (seq)) STRICT
    """,
)

TRIGGERS = (
    """
    CREATE TRIGGER events_never_change BEFORE UPDATE ON events
    BEGIN SELECT raise(ABORT, 'events are append-only: no update'); END
    """,
    """
    CREATE TRIGGER events_never_go BEFORE DELETE ON events
    BEGIN SELECT raise(ABORT, 'events are append-only: no delete'); END
    """,
    # Also refuses INSERT OR REPLACE of a stored seq, which fires no delete trigger.
    """
    CREATE TRIGGER events_have_no_gap BEFORE INSERT ON events
    WHEN NEW.seq <> (SELECT max(seq) + 1 FROM events)
    BEGIN SELECT raise(ABORT, 'events are append-only: seq must be the next'); END
    """,
)

# The public SQL surface, explained in journal/views.md. Times are UTC as text, durations are in
# milliseconds or in the unit that the name ends in.
VIEWS = (
    """
    CREATE VIEW requests AS SELECT
        number,
        request_id,
        client_request_id,
        route,
        model_fingerprint,
        phase,
        outcome,
        reason,
        detail,
        strftime('%Y-%m-%dT%H:%M:%fZ', received_ns / 1e9, 'unixepoch') AS received_at,
        strftime('%Y-%m-%dT%H:%M:%fZ', ended_ns / 1e9, 'unixepoch') AS ended_at,
        (admitted_ns - received_ns) / 1000000 AS waited_ms,
        prefill_duration_ns / 1000000 AS prefill_ms,
        (first_token_ns - received_ns) / 1000000 AS first_token_ms,
        (ended_ns - first_token_ns) / 1000000 AS decode_ms,
        (ended_ns - received_ns) / 1000000 AS total_ms,
        num_prompt_tokens,
        num_cached_tokens,
        num_prefilled_tokens,
        num_output_tokens,
        asked_max_tokens,
        max_tokens,
        round(1e9 * (num_output_tokens - 1) / nullif(ended_ns - first_token_ns, 0), 2)
            AS decode_tokens_per_s,
        reserved_bytes,
        num_waiting,
        num_admissions,
        num_retries,
        num_recoveries,
        num_deaths,
        run_id,
        ended_run_id,
        received_seq,
        ended_seq
    FROM request
    """,
    """
    CREATE VIEW runs AS SELECT
        run_id,
        strftime('%Y-%m-%dT%H:%M:%fZ', started_ns / 1e9, 'unixepoch') AS started_at,
        strftime('%Y-%m-%dT%H:%M:%fZ', ready_ns / 1e9, 'unixepoch') AS ready_at,
        strftime('%Y-%m-%dT%H:%M:%fZ', ended_ns / 1e9, 'unixepoch') AS ended_at,
        ended_by,
        end_reason,
        load_duration_ns / 1000000 AS load_ms,
        model_name,
        model_fingerprint,
        one_row_only,
        policy_version,
        code_digest,
        platform,
        blas,
        sqlite_version,
        mlx_version,
        python_version,
        versions,
        limits,
        configuration,
        process_id,
        engine_nonce,
        first_seq
    FROM run
    """,
    """
    CREATE VIEW throughput AS SELECT
        strftime('%Y-%m-%dT%H:%MZ', minute * 60, 'unixepoch') AS minute_at,
        num_received,
        num_rejected,
        num_admitted,
        num_finished,
        num_cancelled,
        num_aborted,
        num_chunks,
        num_prefilled_tokens,
        prefill_duration_ns / 1000000 AS prefill_ms,
        round(1e9 * num_prefilled_tokens / nullif(prefill_duration_ns, 0), 2)
            AS prefill_tokens_per_s,
        num_decode_steps,
        num_output_tokens,
        decode_duration_ns / 1000000 AS decode_ms,
        round(1e9 * num_output_tokens / nullif(decode_duration_ns, 0), 2) AS decode_tokens_per_s,
        round(1.0 * num_decode_rows / nullif(num_decode_steps, 0), 2) AS mean_rows
    FROM minute
    """,
    """
    CREATE VIEW rejections AS SELECT
        number,
        request_id,
        client_request_id,
        route,
        strftime('%Y-%m-%dT%H:%M:%fZ', received_ns / 1e9, 'unixepoch') AS received_at,
        reason,
        num_prompt_tokens,
        asked_max_tokens,
        num_waiting,
        required_bytes,
        capacity_bytes,
        max_context_tokens,
        run_id,
        ended_seq
    FROM request WHERE outcome = 'rejected'
    """,
)


def upgrade() -> None:
    """Makes the tables, then triggers and views over them."""
    for statement in TABLES + TRIGGERS + VIEWS:
        op.execute(statement)
