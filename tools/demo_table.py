"""What the journal says of the demo's requests and runs, as lines for people."""

from collections.abc import Mapping, Sequence
from datetime import datetime

from journal.audit import Pause
from journal.rows import RequestRow, RunRow
from scheduler.memory import size_text
from tools.demo_checks import Output
from tools.demo_client import Answer
from tools.demo_journal import Account
from tools.text_table import text_table

COLUMNS = (
    "request",
    "queued",
    "restored",
    "prefilled",
    "decoded",
    "recovered",
    "first token",
    "ended",
    "by",
)
RIGHT = frozenset(COLUMNS) - {"request", "by"}


PAUSE_COLUMNS = (
    "held",
    "because",
    "in",
    "at",
    "tokens",
    "output",
    "given back",
    "written",
    "read back",
    "saved in",
    "held for",
    "filled in",
    "lost",
    "ended",
)
PAUSE_LEFT = frozenset({"held", "because", "in", "ended"})


def state_line(answer: Answer, row: RequestRow, output: Output, pause: Pause | None) -> str:
    """One request at the moment of the kill. `pause` is its newest, while it is open."""
    known = f"{row.num_fed_tokens} of {row.num_prompt_tokens} prompt tokens prefilled"
    if output.token_ids:
        known = f"{len(output.token_ids)} tokens recorded, {len(answer.tokens)} delivered"
    if row.phase == "paused" and pause is not None:
        known += (
            f"; held ({pause.reason}) with {pause.num_cached_tokens} tokens on disk,"
            f" {bytes_text(pause.freed_bytes)} given back"
        )
    return f"  {answer.name} is {row.phase}: {known}"


def pause_lines(names: Mapping[str, str], pauses: Sequence[Pause], start_ns: int) -> list[str]:
    """The pauses of the requests with these names, by their ids, in the order of their begin."""
    rows = [pause_cells(names[p.request_id], p, start_ns) for p in pauses if p.request_id in names]
    return text_table(PAUSE_COLUMNS, rows, frozenset(PAUSE_COLUMNS) - PAUSE_LEFT)


def pause_cells(name: str, pause: Pause, start_ns: int) -> tuple[str, ...]:
    """One pause: bytes that the allocator got back, that had still to be written and that were
    read again; and how long saving, holding and filling took.
    """
    return (
        name,
        pause.reason,
        pause.from_phase,
        seconds(nanoseconds(pause.started_at), start_ns),
        str(pause.num_cached_tokens),
        str(pause.num_output_tokens),
        bytes_text(pause.freed_bytes),
        bytes_text(pause.unsaved_bytes),
        bytes_text(pause.read_bytes),
        duration(pause.freeing_ms),
        duration(pause.held_ms),
        duration(pause.resuming_ms),
        "-" if pause.num_lost_tokens is None else str(pause.num_lost_tokens),
        end_text(pause),
    )


def end_text(pause: Pause) -> str:
    """How the pause ended, and where the server was killed in between."""
    over_kill = pause.resumed_run_id is not None and pause.resumed_run_id != pause.run_id
    return f"{pause.outcome}, after the kill" if over_kill else pause.outcome


def bytes_text(num_bytes: int | None) -> str:
    """A size; what was not measured is none."""
    return "-" if num_bytes is None else size_text(num_bytes)


def duration(num_ms: int | None) -> str:
    """Milliseconds for people; what has not come about is none."""
    if num_ms is None:
        return "-"
    return f"{num_ms} ms" if num_ms < 1000 else f"{num_ms / 1000:.1f} s"


def nanoseconds(at: str) -> int:
    """A time of the journal's views, as its tables have it."""
    return round(datetime.fromisoformat(at).timestamp() * 1e9)


def request_lines(
    names: Sequence[str], before: Sequence[Account], after: Sequence[Account], start_ns: int
) -> list[str]:
    """The table: what of each request was restored and fed, and what it gave, before the kill and
    after it. Times are in seconds since the demo's start.
    """
    rows = [
        request_cells(name, then, now, start_ns)
        for name, then, now in zip(names, before, after, strict=True)
    ]
    return text_table(COLUMNS, rows, RIGHT)


def request_cells(name: str, then: Account, now: Account, start_ns: int) -> tuple[str, ...]:
    """One row of the table: the sums are before the kill + after it."""
    row = now.row
    return (
        name,
        seconds(row.queued_ns, start_ns),
        parts(then.num_restored_tokens, now.num_restored_tokens),
        parts(then.row.num_fed_tokens, row.num_fed_tokens),
        parts(then.num_output_tokens, now.num_output_tokens),
        f"{row.num_recoveries} x",
        seconds(row.first_token_ns, start_ns),
        seconds(row.ended_ns, start_ns),
        f"{row.outcome}, {row.reason}",
    )


def parts(then: int, now: int) -> str:
    """A count before the kill, and what was added after it."""
    return f"{then} + {now - then}"


def run_lines(runs: Sequence[RunRow], start_ns: int) -> list[str]:
    """The lives of the server, on the same clock."""
    return [
        f"run {run.run_id}: process {run.process_id},"
        f" first step {seconds(run.started_ns, start_ns)},"
        f" ready {seconds(run.ready_ns, start_ns)}, ended {seconds(run.ended_ns, start_ns)}"
        f" by {run.ended_by}"
        for run in runs
    ]


def seconds(at_ns: int | None, start_ns: int) -> str:
    """A time as seconds since the demo's start."""
    return "never" if at_ns is None else f"{(at_ns - start_ns) / 1e9:.1f} s"
