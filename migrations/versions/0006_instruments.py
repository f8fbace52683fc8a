"""What audits ask over everything: the phases of each request in time, and the files that were
written for it. What was recorded of that before is folded from its events.
"""

from alembic import op

revision = "0006"
down_revision = "0005"

CHANGES = (
    """
    CREATE TABLE phase (
        seq INTEGER NOT NULL,
        number INTEGER NOT NULL,
        run_id INTEGER NOT NULL,
        phase TEXT NOT NULL,
        began_ns INTEGER NOT NULL,
        num_waiting INTEGER NOT NULL,
        num_rows INTEGER NOT NULL,
        num_held INTEGER NOT NULL,
        num_deferrals INTEGER NOT NULL,
        computed_by INTEGER,
        ended_seq INTEGER,
        ended_ns INTEGER,
        next_phase TEXT,
        gave_row_back INTEGER NOT NULL,
        PRIMARY KEY (seq, number)) STRICT
    """,
    "CREATE INDEX phase_of ON phase (number, seq)",
    "CREATE INDEX phase_open ON phase (number) WHERE ended_seq IS NULL",
    "CREATE INDEX phase_gave_row_back ON phase (ended_seq) WHERE gave_row_back = 1",
    "CREATE INDEX phase_resuming ON phase (seq) WHERE phase = 'resuming'",
    """
    CREATE TABLE disk_plan (
        hash TEXT NOT NULL,
        part TEXT NOT NULL,
        number INTEGER NOT NULL,
        reason TEXT NOT NULL,
        PRIMARY KEY (hash, part)) STRICT
    """,
    """
    CREATE TABLE disk_write (
        seq INTEGER NOT NULL,
        run_id INTEGER NOT NULL,
        at_ns INTEGER NOT NULL,
        number INTEGER NOT NULL,
        part TEXT NOT NULL,
        reason TEXT NOT NULL,
        outcome TEXT NOT NULL,
        saved_bytes INTEGER NOT NULL,
        duration_ns INTEGER,
        PRIMARY KEY (seq)) STRICT
    """,
    "CREATE INDEX disk_write_of ON disk_write (number)",
)

VIEWS = (
    """
    CREATE VIEW phases AS SELECT
        p.seq,
        p.number,
        q.request_id,
        p.run_id,
        p.phase,
        strftime('%Y-%m-%dT%H:%M:%fZ', p.began_ns / 1e9, 'unixepoch') AS began_at,
        strftime('%Y-%m-%dT%H:%M:%fZ', p.ended_ns / 1e9, 'unixepoch') AS ended_at,
        (p.ended_ns - p.began_ns) / 1000000 AS phase_ms,
        p.next_phase,
        p.num_waiting,
        p.num_rows,
        p.num_held,
        p.ended_seq
    FROM phase p JOIN request q USING (number)
    """,
    # Of those that made room the last counts: it is the one that let the waiting one in.
    """
    CREATE VIEW waits AS SELECT
        w.seq,
        w.number,
        q.request_id,
        w.phase,
        strftime('%Y-%m-%dT%H:%M:%fZ', w.began_ns / 1e9, 'unixepoch') AS began_at,
        strftime('%Y-%m-%dT%H:%M:%fZ', w.ended_ns / 1e9, 'unixepoch') AS ended_at,
        (w.ended_ns - w.began_ns) / 1000000 AS wait_ms,
        w.next_phase,
        w.num_waiting,
        w.num_rows,
        w.num_held,
        w.num_deferrals,
        b.request_id AS block_of_id,
        mq.request_id AS room_from_id,
        m.next_phase AS room_from_phase,
        hq.request_id AS held_first_id
    FROM phase w JOIN request q USING (number)
        LEFT JOIN request b ON b.number = w.computed_by
        LEFT JOIN phase m ON m.rowid = (
            SELECT x.rowid FROM phase x
            WHERE x.gave_row_back = 1 AND x.ended_seq > w.seq AND x.number <> w.number
                AND x.ended_seq <= coalesce(w.ended_seq, 9223372036854775807)
            ORDER BY x.ended_seq DESC LIMIT 1)
        LEFT JOIN request mq ON mq.number = m.number
        LEFT JOIN phase h ON h.rowid = (
            SELECT x.rowid FROM phase x
            WHERE x.phase = 'resuming' AND x.seq > w.seq AND x.number <> w.number
                AND x.seq < coalesce(w.ended_seq, 9223372036854775807)
            ORDER BY x.seq DESC LIMIT 1)
        LEFT JOIN request hq ON hq.number = h.number
    WHERE w.phase IN ('waiting', 'paused')
    """,
    """
    CREATE VIEW disk_writes AS SELECT
        d.seq,
        d.run_id,
        strftime('%Y-%m-%dT%H:%M:%fZ', d.at_ns / 1e9, 'unixepoch') AS written_at,
        nullif(d.number, 0) AS number,
        q.request_id,
        d.part,
        d.reason,
        d.outcome,
        d.saved_bytes,
        round(d.duration_ns / 1e6, 3) AS write_ms
    FROM disk_write d LEFT JOIN request q ON q.number = d.number
    """,
    """
    CREATE VIEW first_tokens AS
    WITH ranked AS (
        SELECT
            received_ns / 3600000000000 AS hour,
            (first_token_ns - received_ns) / 1000000 AS ms,
            row_number() OVER (PARTITION BY received_ns / 3600000000000
                ORDER BY first_token_ns - received_ns) AS place,
            count(*) OVER (PARTITION BY received_ns / 3600000000000) AS num_requests
        FROM request WHERE first_token_ns IS NOT NULL)
    SELECT
        strftime('%Y-%m-%dT%H:00Z', hour * 3600, 'unixepoch') AS hour_at,
        num_requests,
        max(iif(place = (num_requests * 50 + 99) / 100, ms, NULL)) AS p50_ms,
        max(iif(place = (num_requests * 90 + 99) / 100, ms, NULL)) AS p90_ms,
        max(iif(place = (num_requests * 99 + 99) / 100, ms, NULL)) AS p99_ms,
        max(ms) AS max_ms
    FROM ranked GROUP BY hour
    """,
    """
    CREATE VIEW held_times AS
    WITH held AS (
        SELECT
            reason,
            (coalesce(resumed_ns, ended_ns) - paused_ns) / 1000000 AS ms,
            row_number() OVER (PARTITION BY reason
                ORDER BY coalesce(resumed_ns, ended_ns) - paused_ns) AS place,
            count(*) OVER (PARTITION BY reason) AS num_pauses
        FROM pause WHERE coalesce(resumed_ns, ended_ns) - paused_ns IS NOT NULL)
    SELECT
        reason,
        num_pauses,
        max(iif(place = (num_pauses * 50 + 99) / 100, ms, NULL)) AS p50_ms,
        max(iif(place = (num_pauses * 90 + 99) / 100, ms, NULL)) AS p90_ms,
        max(iif(place = (num_pauses * 99 + 99) / 100, ms, NULL)) AS p99_ms,
        max(ms) AS max_ms,
        sum(ms) AS held_ms
    FROM held GROUP BY reason
    """,
    """
    CREATE VIEW miss_causes AS SELECT
        parted_because,
        count(*) AS num_requests,
        sum(num_prompt_tokens) AS num_prompt_tokens,
        sum(num_memory_tokens + num_disk_tokens) AS num_found_tokens,
        sum(num_prefilled_tokens) AS num_prefilled_tokens,
        sum(waited_ns) / 1000000 AS waited_for_blocks_ms
    FROM request WHERE num_admissions > 0 GROUP BY parted_because
    """,
)


def upgrade() -> None:
    """Adds the tables, then makes the views."""
    for statement in CHANGES + VIEWS:
        op.execute(statement)
