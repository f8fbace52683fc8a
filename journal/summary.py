"""What a journal holds, in a few numbers that cost no scan of its events."""

import msgspec

from journal.reader import JournalReader


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """`first_seq` is over 1 in a compacted journal. Times are nanoseconds of Unix time, null in an
    empty one. `requests` counts them by phase; `num_step_rows` are decode steps whose tokens
    are not gathered. `schema` is that of the file, also when it is read in an upgraded copy.
    """

    file: str
    file_bytes: int
    log_bytes: int
    schema: str
    first_seq: int | None
    last_seq: int | None
    num_events: int
    num_runs: int
    last_run_id: int | None
    last_run_ended_by: str | None
    first_at_ns: int | None
    last_at_ns: int | None
    requests: dict[str, int]
    num_prefilled_tokens: int
    num_output_tokens: int
    num_stored_requests: int
    num_step_rows: int
    snapshot_seqs: list[int]


def summarise(reader: JournalReader) -> Summary:
    """Reads the summary in one transaction."""
    log = reader.file.with_name(f"{reader.file.name}-wal")
    with reader.transaction() as run:
        first = run("SELECT seq, at_ns FROM events ORDER BY seq LIMIT 1").fetchone()
        last = run("SELECT seq, at_ns FROM events ORDER BY seq DESC LIMIT 1").fetchone()
        newest_run = run("SELECT run_id, ended_by FROM run ORDER BY run_id DESC LIMIT 1").fetchone()
        phases = run("SELECT phase, count(*) FROM request GROUP BY phase ORDER BY phase")
        tokens = "SELECT sum(num_prefilled_tokens), sum(num_output_tokens) FROM minute"
        num_prefilled_tokens, num_output_tokens = run(tokens).one()
        return Summary(
            file=str(reader.file),
            file_bytes=reader.file.stat().st_size,
            log_bytes=log.stat().st_size if log.exists() else 0,
            schema=reader.schema,
            first_seq=first[0] if first else None,
            last_seq=last[0] if last else None,
            num_events=last[0] - first[0] + 1 if first and last else 0,
            num_runs=run("SELECT count(*) FROM run").scalar_one(),
            last_run_id=newest_run[0] if newest_run else None,
            last_run_ended_by=newest_run[1] if newest_run else None,
            first_at_ns=first[1] if first else None,
            last_at_ns=last[1] if last else None,
            requests={row[0]: row[1] for row in phases},
            num_prefilled_tokens=num_prefilled_tokens or 0,
            num_output_tokens=num_output_tokens or 0,
            num_stored_requests=run("SELECT count(*) FROM request_parameters").scalar_one(),
            num_step_rows=run("SELECT count(*) FROM step_tokens").scalar_one(),
            snapshot_seqs=[seq for (seq,) in run("SELECT seq FROM snapshots ORDER BY seq")],
        )
