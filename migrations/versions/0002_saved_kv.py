"""Saved KV: its blocks, and of each request what it found of them. Rows of requests and runs that
events still speak of are folded anew afterwards (journal/migration.py); here the others get what
was true of them: nothing was restored, so a finished request had prefilled its whole prompt.
"""

import json
from typing import Any

from alembic import op

revision = "0002"
down_revision = "0001"

CHANGES = (
    "DROP VIEW requests",
    "DROP VIEW runs",
    "ALTER TABLE request RENAME COLUMN num_prefilled_tokens TO num_fed_tokens",
    "ALTER TABLE request ADD COLUMN num_memory_tokens INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE request ADD COLUMN num_disk_tokens INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE request ADD COLUMN num_prefilled_tokens INTEGER NOT NULL DEFAULT 0",
    "ALTER TABLE request ADD COLUMN parted_because TEXT",
    "ALTER TABLE request ADD COLUMN parted_at_tokens INTEGER",
    "ALTER TABLE request ADD COLUMN waited_ns INTEGER NOT NULL DEFAULT 0",
    """
    UPDATE request SET
        num_prefilled_tokens = CASE phase
            WHEN 'finished' THEN num_prompt_tokens
            WHEN 'decoding' THEN num_prompt_tokens - (first_token_ns IS NULL)
            WHEN 'waiting' THEN 0
            ELSE min(num_fed_tokens, num_prompt_tokens) END,
        parted_because = CASE WHEN admitted_ns IS NULL THEN NULL ELSE 'off' END,
        parted_at_tokens = CASE WHEN admitted_ns IS NULL THEN NULL ELSE 0 END
    """,
    "ALTER TABLE run ADD COLUMN kv_domain TEXT",
    "ALTER TABLE run ADD COLUMN kv_block_tokens INTEGER",
    """
    CREATE TABLE block (
        hash TEXT NOT NULL,
        domain TEXT NOT NULL,
        parent TEXT NOT NULL,
        end_tokens INTEGER NOT NULL,
        block_bytes INTEGER NOT NULL,
        state_bytes INTEGER NOT NULL,
        planned_ns INTEGER NOT NULL,
        saved_ns INTEGER,
        last_use_ns INTEGER,
        PRIMARY KEY (hash)) STRICT
    """,
    "CREATE INDEX block_planned ON block (hash) WHERE saved_ns IS NULL",
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
    CREATE VIEW cache_misses AS SELECT
        number,
        request_id,
        strftime('%Y-%m-%dT%H:%M:%fZ', received_ns / 1e9, 'unixepoch') AS received_at,
        num_prompt_tokens,
        num_memory_tokens,
        num_disk_tokens,
        num_prefilled_tokens,
        parted_at_tokens,
        parted_because,
        waited_ns / 1000000 AS waited_for_blocks_ms,
        phase
    FROM request
    WHERE num_admissions > 0
    """,
    """
    CREATE VIEW cache_hits AS SELECT
        strftime('%Y-%m-%dT%H:00Z', q.received_ns / 1e9, 'unixepoch') AS hour_at,
        q.model_fingerprint,
        max(r.model_name) AS model_name,
        count(*) AS num_requests,
        sum(q.num_prompt_tokens) AS num_prompt_tokens,
        sum(q.num_memory_tokens) AS num_memory_tokens,
        sum(q.num_disk_tokens) AS num_disk_tokens,
        sum(q.num_prefilled_tokens) AS num_prefilled_tokens,
        round(1.0 * sum(q.num_memory_tokens + q.num_disk_tokens)
            / nullif(sum(q.num_prompt_tokens), 0), 4) AS hit_rate
    FROM request q JOIN run r USING (run_id)
    WHERE q.outcome = 'finished'
    GROUP BY hour_at, q.model_fingerprint
    """,
    """
    CREATE VIEW blocks AS SELECT
        hash,
        domain,
        parent,
        end_tokens,
        block_bytes,
        state_bytes,
        strftime('%Y-%m-%dT%H:%M:%fZ', planned_ns / 1e9, 'unixepoch') AS planned_at,
        strftime('%Y-%m-%dT%H:%M:%fZ', saved_ns / 1e9, 'unixepoch') AS saved_at,
        strftime('%Y-%m-%dT%H:%M:%fZ', last_use_ns / 1e9, 'unixepoch') AS last_use_at
    FROM block
    """,
)


def upgrade() -> None:
    """Changes the tables, makes the views anew, and renames what a compacted file has carried."""
    for statement in CHANGES + VIEWS:
        op.execute(statement)
    run = op.get_bind().exec_driver_sql
    for seq, body in run("SELECT seq, body FROM carried_rows").fetchall():
        base = json.loads(body)
        base["rows"]["requests"] = [changed(row) for row in base["rows"]["requests"]]
        run("UPDATE carried_rows SET body = ? WHERE seq = ?", (json.dumps(base), seq))


def changed(row: dict[str, Any]) -> dict[str, Any]:
    """An open request as a compacted file has carried it, with the same values as in CHANGES."""
    fed, prompt = row.pop("num_prefilled_tokens"), row["num_prompt_tokens"]
    prefilled = {"decoding": prompt - (row["first_token_ns"] is None), "waiting": 0}
    admitted = row["admitted_ns"] is not None
    return row | {
        "num_fed_tokens": fed,
        "num_prefilled_tokens": prefilled.get(row["phase"], min(fed, prompt)),
        "parted_because": "off" if admitted else None,
        "parted_at_tokens": 0 if admitted else None,
    }
