"""Requests without a client: when they lost it and what came of that, who took whose place, and
arrivals that joined an earlier one. What was recorded of that before is folded from its events.
"""

from alembic import op

revision = "0005"
down_revision = "0004"

CHANGES = (
    "DROP VIEW requests",
    "DROP VIEW throughput",
    "DROP VIEW runs",
    "ALTER TABLE request ADD COLUMN has_key INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE request ADD COLUMN joined_id TEXT",
    "ALTER TABLE request ADD COLUMN num_orphaned INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE request ADD COLUMN orphaned_ns INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE request ADD COLUMN owner_digest TEXT NOT NULL DEFAULT ''",
    "ALTER TABLE run ADD COLUMN drained_ns INTEGER",
    "ALTER TABLE minute ADD COLUMN num_joined INTEGER NOT NULL DEFAULT 0",
    """
    CREATE TABLE orphan (
        lost_seq INTEGER NOT NULL,
        number INTEGER NOT NULL,
        request_id TEXT NOT NULL,
        run_id INTEGER NOT NULL,
        orphaned_by TEXT NOT NULL,
        from_phase TEXT NOT NULL,
        outcome TEXT NOT NULL,
        lost_ns INTEGER NOT NULL,
        until_ns INTEGER,
        needs_client INTEGER NOT NULL,
        ended_ns INTEGER,
        PRIMARY KEY (lost_seq, number)) STRICT
    """,
    "CREATE INDEX orphan_open ON orphan (number) WHERE outcome = 'open'",
    """
    CREATE TABLE adoption (
        seq INTEGER NOT NULL,
        at_ns INTEGER NOT NULL,
        run_id INTEGER NOT NULL,
        number INTEGER NOT NULL,
        request_id TEXT NOT NULL,
        adopter_number INTEGER NOT NULL,
        adopter_id TEXT NOT NULL,
        joined_by TEXT NOT NULL,
        phase TEXT NOT NULL,
        orphaned_by TEXT,
        orphaned_ns INTEGER NOT NULL,
        num_output_tokens INTEGER NOT NULL,
        PRIMARY KEY (seq)) STRICT
    """,
    "CREATE INDEX adoption_of ON adoption (number)",
)

VIEWS = (
    """
    CREATE VIEW requests AS SELECT
        q.number,
        q.request_id,
        q.client_request_id,
        q.route,
        q.model_fingerprint,
        q.phase,
        q.outcome,
        q.reason,
        q.detail,
        strftime('%Y-%m-%dT%H:%M:%fZ', q.received_ns / 1e9, 'unixepoch') AS received_at,
        strftime('%Y-%m-%dT%H:%M:%fZ', q.ended_ns / 1e9, 'unixepoch') AS ended_at,
        (q.admitted_ns - q.received_ns) / 1000000 AS waited_ms,
        q.prefill_duration_ns / 1000000 AS prefill_ms,
        (q.first_token_ns - q.received_ns) / 1000000 AS first_token_ms,
        (q.ended_ns - q.first_token_ns) / 1000000 AS decode_ms,
        (q.ended_ns - q.received_ns) / 1000000 AS total_ms,
        q.num_prompt_tokens,
        q.num_cached_tokens,
        q.num_memory_tokens,
        q.num_disk_tokens,
        q.num_prefilled_tokens,
        q.num_fed_tokens,
        q.num_output_tokens,
        q.parted_because,
        q.parted_at_tokens,
        q.waited_ns / 1000000 AS waited_for_blocks_ms,
        q.asked_max_tokens,
        q.max_tokens,
        round(1e9 * (q.num_output_tokens - 1) / nullif(q.ended_ns - q.first_token_ns, 0), 2)
            AS decode_tokens_per_s,
        q.reserved_bytes,
        q.num_waiting,
        q.num_admissions,
        q.num_retries,
        q.num_recoveries,
        q.num_deaths,
        q.run_id,
        q.ended_run_id,
        q.received_seq,
        q.ended_seq,
        q.num_pauses,
        q.held_ns / 1000000 AS held_ms,
        q.has_key,
        q.joined_id,
        iif(q.joined_id IS NULL, NULL, q.reason) AS joined_by,
        o.orphaned_by,
        strftime('%Y-%m-%dT%H:%M:%fZ', o.lost_ns / 1e9, 'unixepoch') AS orphaned_at,
        q.num_orphaned,
        q.orphaned_ns / 1000000 AS orphaned_ms,
        (SELECT count(*) FROM adoption a WHERE a.number = q.number) AS num_adoptions
    FROM request q LEFT JOIN orphan o ON o.number = q.number AND o.outcome = 'open'
    """,
    """
    CREATE VIEW runs AS SELECT
        run_id,
        strftime('%Y-%m-%dT%H:%M:%fZ', started_ns / 1e9, 'unixepoch') AS started_at,
        strftime('%Y-%m-%dT%H:%M:%fZ', ready_ns / 1e9, 'unixepoch') AS ready_at,
        strftime('%Y-%m-%dT%H:%M:%fZ', ended_ns / 1e9, 'unixepoch') AS ended_at,
        strftime('%Y-%m-%dT%H:%M:%fZ', drained_ns / 1e9, 'unixepoch') AS drained_at,
        ended_by,
        end_reason,
        load_duration_ns / 1000000 AS load_ms,
        model_name,
        model_fingerprint,
        one_row_only,
        kv_domain,
        kv_block_tokens,
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
        num_joined,
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
        round(1.0 * num_decode_rows / nullif(num_decode_steps, 0), 2) AS mean_rows,
        num_pauses,
        num_resumes,
        held_ns / 1000000 AS held_ms
    FROM minute
    """,
    # An attached request has its own client back; what has finished may be asked for later.
    """
    CREATE VIEW orphans AS SELECT
        o.lost_seq,
        o.number,
        o.request_id,
        q.client_request_id,
        q.has_key,
        o.run_id,
        o.orphaned_by,
        o.from_phase,
        q.phase,
        strftime('%Y-%m-%dT%H:%M:%fZ', o.lost_ns / 1e9, 'unixepoch') AS orphaned_at,
        strftime('%Y-%m-%dT%H:%M:%fZ', o.until_ns / 1e9, 'unixepoch') AS until_at,
        o.needs_client,
        o.outcome,
        iif(o.outcome = q.outcome, q.reason, NULL) AS reason,
        iif(o.outcome IN ('adopted', 'finished'), (
            SELECT a.adopter_id FROM adoption a
            WHERE a.number = o.number AND a.seq > o.lost_seq ORDER BY a.seq LIMIT 1
        ), NULL) AS adopter_id,
        strftime('%Y-%m-%dT%H:%M:%fZ', o.ended_ns / 1e9, 'unixepoch') AS ended_at,
        (o.ended_ns - o.lost_ns) / 1000000 AS orphaned_ms
    FROM orphan o JOIN request q USING (number)
    """,
    """
    CREATE VIEW adoptions AS SELECT
        a.seq,
        strftime('%Y-%m-%dT%H:%M:%fZ', a.at_ns / 1e9, 'unixepoch') AS adopted_at,
        a.run_id,
        a.number,
        a.request_id,
        q.client_request_id,
        a.adopter_number,
        a.adopter_id,
        r.client_request_id AS adopter_client_request_id,
        a.joined_by,
        a.phase,
        a.orphaned_by,
        a.orphaned_ns / 1000000 AS orphaned_ms,
        a.num_output_tokens
    FROM adoption a
        JOIN request q ON q.number = a.number
        JOIN request r ON r.number = a.adopter_number
    """,
)


def upgrade() -> None:
    """Changes the tables and adds those that are new, then makes the views."""
    for statement in CHANGES + VIEWS:
        op.execute(statement)
