"""`fermata journal info` and `fermata journal verify`."""

import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from journal.database import is_bundle
from journal.errors import JournalError
from journal.reader import JournalReader
from journal.tables import SCHEMA

if TYPE_CHECKING:
    from journal.summary import Summary

SOUND, FINDINGS, UNUSABLE = 0, 1, 2
SHOWN_SNAPSHOTS = 3


def info(path: Path, *, as_json: bool) -> int:
    """Prints what the journal holds. Returns 0, or 2 for one that cannot be read."""
    from journal.summary import summarise

    try:
        with JournalReader.open(path) as reader:
            summary = summarise(reader)
            with reader.transaction() as run:
                is_part = is_bundle(run)
    except JournalError as error:
        return _unusable("info", error)
    if as_json:
        print(msgspec.json.encode(summary).decode())
        return SOUND
    events = f"{summary.num_events} (seq {summary.first_seq} to {summary.last_seq})"
    phases = ", ".join(f"{count} {phase}" for phase, count in summary.requests.items())
    runs = f"{summary.num_runs}, {_last_run(summary, is_part=is_part)}"
    lines = {
        "file": f"{summary.file}, {_size(summary.file_bytes)}, log {_size(summary.log_bytes)}",
        "schema": f"{summary.schema}{_upgraded(summary.schema)}",
        "events": events if summary.num_events else "none",
        "from": _time(summary.first_at_ns),
        "to": _time(summary.last_at_ns),
        "runs": runs if summary.num_runs else "none",
        "requests": phases or "none",
        "tokens": f"{summary.num_prefilled_tokens} prefilled, {summary.num_output_tokens} output",
        "stored": f"tokens and parameters of {summary.num_stored_requests} requests",
        "snapshots": _snapshots(summary.snapshot_seqs),
    }
    for name, value in lines.items():
        print(f"{name:<10} {value}")
    return SOUND


def verify(path: Path) -> int:
    """Prints what is wrong, one line each, and a last line that counts them. Returns 0 when that is
    nothing, 1 when something is, 2 for a journal that cannot be read.
    """
    from journal.verify import verify as findings_of
    from tools.points import verify_newest

    num_findings = 0
    try:
        with JournalReader.open(path) as reader, reader.transaction() as run:
            schema = reader.schema
            for finding in findings_of(run):
                num_findings += 1
                print(finding)
            for finding in verify_newest(run) if num_findings == 0 else ():
                num_findings += 1
                print(finding)
    except JournalError as error:
        return _unusable("verify", error)
    print(f"{num_findings} findings{_upgraded(schema)}")
    return FINDINGS if num_findings else SOUND


def _unusable(subcommand: str, error: JournalError) -> int:
    print(f"fermata journal {subcommand}: {error}", file=sys.stderr)
    return UNUSABLE


def _last_run(summary: "Summary", *, is_part: bool) -> str:
    """How the last run ended. A bundle has its end by its digests; of other files nothing tells
    whether a log belonged to them: a backup and a shortened journal have none either.
    """
    if summary.last_run_ended_by is not None:
        return f"the last {summary.last_run_ended_by}"
    if is_part:
        return "the last is not ended where this bundle ends"
    if summary.log_bytes == 0:
        return (
            "the last is not ended and has no log, as after `journal backup` or `compact`; a copy "
            "that was made without its log lacks what came last"
        )
    return "the last is not ended"


def _upgraded(schema: str) -> str:
    """What is to be known about an earlier schema: its tables but `events` were made anew."""
    return "" if schema == SCHEMA else f", read in a copy upgraded to {SCHEMA}"


def _snapshots(seqs: list[int]) -> str:
    if len(seqs) > SHOWN_SNAPSHOTS:
        return f"{len(seqs)}, seq {seqs[0]} to {seqs[-1]}"
    return ", ".join(f"seq {seq}" for seq in seqs) or "none"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"


def _time(at_ns: int | None) -> str:
    if at_ns is None:
        return "-"
    return datetime.fromtimestamp(at_ns / 1e9, UTC).isoformat(timespec="seconds")
