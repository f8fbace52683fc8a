"""Held requests: their pauses, what they pin, and readings of memory. No request was held before,
so the new columns begin at zero; a pause never ends outside of its own journal.
"""

from alembic import op

revision = "0003"
down_revision = "0002"

CHANGES = (
    "DROP VIEW requests",
    "DROP VIEW throughput",
    "ALTER TABLE request ADD COLUMN num_pauses INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE request ADD COLUMN held_ns INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE minute ADD COLUMN num_pauses INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE minute ADD COLUMN num_resumes INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE minute ADD COLUMN held_ns INTEGER NOT NULL DEFAULT 0",
    """
    CREATE TABLE pause (
        pause_seq INTEGER NOT NULL,
        number INTEGER NOT NULL,
        request_id TEXT NOT NULL,
        run_id INTEGER NOT NULL,
        reason TEXT NOT NULL,
        from_phase TEXT NOT NULL,
        outcome TEXT NOT NULL,
        started_ns INTEGER NOT NULL,
        saved_ns INTEGER,
        paused_ns INTEGER,
        freed_ns INTEGER,
        resume_started_ns INTEGER,
        resumed_ns INTEGER,
        ended_ns INTEGER,
        rank INTEGER,
        num_candidates INTEGER,
        frees_bytes INTEGER,
        unsaved_bytes INTEGER,
        usage_bytes INTEGER,
        ceiling_bytes INTEGER,
        freed_bytes INTEGER,
        domain TEXT,
        tail_bytes INTEGER,
        num_blocks INTEGER,
        num_cached_tokens INTEGER NOT NULL,
        num_output_tokens INTEGER NOT NULL,
        dropped TEXT,
        read_bytes INTEGER,
        num_restored_tokens INTEGER,
        num_lost_tokens INTEGER,
        resumed_run_id INTEGER,
        PRIMARY KEY (pause_seq)) STRICT
    """,
    "CREATE INDEX pause_open ON pause (pause_seq) WHERE outcome = 'open'",
    """
    CREATE TABLE pin (
        number INTEGER NOT NULL,
        request_id TEXT NOT NULL,
        domain TEXT NOT NULL,
        num_blocks INTEGER NOT NULL,
        last_hash TEXT NOT NULL,
        num_tokens INTEGER NOT NULL,
        tail_bytes INTEGER NOT NULL,
        pinned_ns INTEGER NOT NULL,
        PRIMARY KEY (number)) STRICT
    """,
    """
    CREATE TABLE memory_sample (
        seq INTEGER NOT NULL,
        run_id INTEGER NOT NULL,
        at_ns INTEGER NOT NULL,
        active_bytes INTEGER NOT NULL,
        cached_bytes INTEGER NOT NULL,
        peak_bytes INTEGER NOT NULL,
        process_bytes INTEGER NOT NULL,
        available_bytes INTEGER NOT NULL,
        age_ns INTEGER NOT NULL,
        ceiling_bytes INTEGER,
        PRIMARY KEY (seq)) STRICT
    """,
)

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
        num_memory_tokens,
        num_disk_tokens,
        num_prefilled_tokens,
        num_fed_tokens,
        num_output_tokens,
        parted_because,
        parted_at_tokens,
        waited_ns / 1000000 AS waited_for_blocks_ms,
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
        ended_seq,
        num_pauses,
        held_ns / 1000000 AS held_ms
    FROM request
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
        round(1.0 * num_decode_rows / nullif(num_decode_steps, 0), 2) AS mean_rows,
        num_pauses,
        num_resumes,
        held_ns / 1000000 AS held_ms
    FROM minute
    """,
    """
    CREATE VIEW pauses AS SELECT
        pause_seq,
        number,
        request_id,
        run_id,
        reason,
        from_phase,
        outcome,
        dropped,
        strftime('%Y-%m-%dT%H:%M:%fZ', started_ns / 1e9, 'unixepoch') AS started_at,
        strftime('%Y-%m-%dT%H:%M:%fZ', saved_ns / 1e9, 'unixepoch') AS saved_at,
        strftime('%Y-%m-%dT%H:%M:%fZ', paused_ns / 1e9, 'unixepoch') AS paused_at,
        strftime('%Y-%m-%dT%H:%M:%fZ', freed_ns / 1e9, 'unixepoch') AS freed_at,
        strftime('%Y-%m-%dT%H:%M:%fZ', resume_started_ns / 1e9, 'unixepoch') AS resume_started_at,
        strftime('%Y-%m-%dT%H:%M:%fZ', resumed_ns / 1e9, 'unixepoch') AS resumed_at,
        strftime('%Y-%m-%dT%H:%M:%fZ', ended_ns / 1e9, 'unixepoch') AS ended_at,
        (paused_ns - started_ns) / 1000000 AS pausing_ms,
        (freed_ns - started_ns) / 1000000 AS freeing_ms,
        (coalesce(resumed_ns, ended_ns) - paused_ns) / 1000000 AS held_ms,
        (resumed_ns - resume_started_ns) / 1000000 AS resuming_ms,
        rank,
        num_candidates,
        usage_bytes,
        ceiling_bytes,
        frees_bytes,
        unsaved_bytes,
        freed_bytes,
        tail_bytes,
        num_blocks,
        read_bytes,
        num_cached_tokens,
        num_output_tokens,
        num_restored_tokens,
        num_lost_tokens,
        resumed_run_id
    FROM pause
    """,
    """
    CREATE VIEW pins AS SELECT
        number,
        request_id,
        domain,
        num_blocks,
        last_hash,
        num_tokens,
        tail_bytes,
        strftime('%Y-%m-%dT%H:%M:%fZ', pinned_ns / 1e9, 'unixepoch') AS pinned_at
    FROM pin
    """,
    # From the last block of each pinned chain to its first, at most as many as were pinned.
    """
    CREATE VIEW pinned_blocks AS
    WITH RECURSIVE chain (number, hash, domain, parent, end_tokens, num_left) AS (
        SELECT p.number, b.hash, b.domain, b.parent, b.end_tokens, p.num_blocks - 1
        FROM pin p JOIN block b ON b.hash = p.last_hash
        UNION
        SELECT c.number, b.hash, b.domain, b.parent, b.end_tokens, c.num_left - 1
        FROM chain c JOIN block b ON b.hash = c.parent WHERE c.num_left > 0)
    SELECT hash, domain, end_tokens, count(*) AS num_pins
    FROM chain GROUP BY hash
    """,
    """
    CREATE VIEW memory AS SELECT
        seq,
        run_id,
        strftime('%Y-%m-%dT%H:%M:%fZ', at_ns / 1e9, 'unixepoch') AS sampled_at,
        active_bytes,
        cached_bytes,
        peak_bytes,
        process_bytes,
        available_bytes,
        age_ns / 1000000 AS age_ms,
        ceiling_bytes,
        round(1.0 * active_bytes / nullif(ceiling_bytes, 0), 4) AS active_share
    FROM memory_sample
    """,
)


def upgrade() -> None:
    """Changes the tables and adds those that are new, then makes the views."""
    for statement in CHANGES + VIEWS:
        op.execute(statement)
