"""What the journal says of the demo's requests and runs, as lines for people."""

from collections.abc import Sequence

from journal.rows import RequestRow, RunRow
from tools.demo_checks import Output
from tools.demo_client import Answer
from tools.text_table import text_table

COLUMNS = (
    "request",
    "queued",
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
    names: Sequence[str],
    before: Sequence[tuple[RequestRow, Output]],
    after: Sequence[tuple[RequestRow, Output]],
) -> list[str]:
    """The table: what each request was fed and gave before the kill and after it. Times are in
    seconds from the first request on.
    """
    first_ns = min(row.received_ns for row, _ in after)
    rows = [
        request_cells(name, then, now, first_ns)
        for name, then, now in zip(names, before, after, strict=True)
    ]
    return text_table(COLUMNS, rows, RIGHT)


def request_cells(
    name: str, before: tuple[RequestRow, Output], after: tuple[RequestRow, Output], first_ns: int
) -> tuple[str, ...]:
    """One row of the table: the sums are before the kill + after it."""
    (then, recorded), (now, final) = before, after
    fed, put_out = then.num_fed_tokens, len(recorded.token_ids)
    return (
        name,
        seconds(now.queued_ns, first_ns),
        f"{fed} + {now.num_fed_tokens - fed}",
        f"{put_out} + {len(final.token_ids) - put_out}",
        f"{now.num_recoveries} x",
        seconds(now.first_token_ns, first_ns),
        seconds(now.ended_ns, first_ns),
        f"{now.outcome}, {now.reason}",
    )


def run_lines(runs: Sequence[RunRow], first_ns: int) -> list[str]:
    """The lives of the server, on the clock of the requests."""
    return [
        f"run {run.run_id}: process {run.process_id}, started {seconds(run.started_ns, first_ns)},"
        f" ready {seconds(run.ready_ns, first_ns)}, ended {seconds(run.ended_ns, first_ns)}"
        f" by {run.ended_by}"
        for run in runs
    ]


def seconds(at_ns: int | None, first_ns: int) -> str:
    """A time as seconds since the first request."""
    return "never" if at_ns is None else f"{(at_ns - first_ns) / 1e9:.1f} s"
