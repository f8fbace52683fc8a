"""What the journal says of the demo's requests and runs, as lines for people."""

from collections.abc import Sequence

from journal.rows import RequestRow, RunRow
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


def state_line(answer: Answer, row: RequestRow, output: Output) -> str:
    """One request at the moment of the kill."""
    known = f"{row.num_fed_tokens} of {row.num_prompt_tokens} prompt tokens prefilled"
    if row.phase == "decoding":
        known = f"{len(output.token_ids)} tokens recorded, {len(answer.tokens)} delivered"
    return f"  {answer.name} is {row.phase}: {known}"


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
