"""What was happening at a moment: the run, memory, each open request in its phase, and what was
decided before and after.
"""

from collections.abc import Iterator

import msgspec

from journal.database import Run
from journal.moments import bounds, last_before
from journal.reader import JournalReader
from journal.span import time_text

NUM_DECISIONS = 10
"""Before the moment, and after it."""

MAX_EVENTS = 5_000
"""How far away a decision is looked for."""

NS_PER_MS = 1_000_000


class Happening(msgspec.Struct, frozen=True):
    """Something of what was the case at a moment, or happened around it. `what` is run, memory,
    request or decision; `seq` the event since which it is so, and `age_ms` how long before the
    moment that was (below 0: after it).
    """

    what: str
    seq: int
    at: str
    age_ms: int
    request_id: str | None
    name: str
    detail: str


def happenings(reader: JournalReader, at_ns: int) -> list[Happening]:
    """All of it, in one view of the file. Empty when the moment is before the first event."""
    with reader.transaction() as run:
        ends = bounds(run)
        if ends is None:
            return []
        seq = last_before(run, *ends, at_ns + 1)
        if seq < ends[0]:
            return []
        return [
            *_run(run, seq, at_ns),
            *_memory(run, seq, at_ns),
            *_requests(run, seq, at_ns),
            *_decisions(run, seq, at_ns),
        ]


def _happening(
    moment_ns: int, what: str, row: tuple[int, int, str | None, str], detail: str
) -> Happening:
    """`row` is the seq, the time, the request and the name."""
    seq, at_ns, request_id, name = row
    age_ms = (moment_ns - at_ns) // NS_PER_MS
    return Happening(what, seq, time_text(at_ns), age_ms, request_id, name, detail)


def _run(run: Run, seq: int, at_ns: int) -> Iterator[Happening]:
    query = (
        "SELECT first_seq, started_ns, run_id, ended_ns, ended_by, model_name FROM run"
        " WHERE run_id = (SELECT run_id FROM events WHERE seq = ?)"
    )
    for first_seq, started_ns, run_id, ended_ns, ended_by, model_name in run(query, (seq,)):
        over = ended_ns is not None and ended_ns <= at_ns
        name = f"run {run_id}"
        detail = f"{model_name}, {ended_by}" if over else model_name
        yield _happening(at_ns, "run", (first_seq, started_ns, None, name), detail)


def _memory(run: Run, seq: int, at_ns: int) -> Iterator[Happening]:
    query = (
        "SELECT seq, at_ns, active_bytes, cached_bytes, ceiling_bytes, available_bytes"
        " FROM memory_sample WHERE seq <= ? ORDER BY seq DESC LIMIT 1"
    )
    for sample_seq, sampled_ns, active, cached, ceiling, available in run(query, (seq,)):
        share = "no ceiling" if not ceiling else f"{active / ceiling:.1%} of {ceiling}"
        detail = f"{active} bytes active ({share}), {cached} cached, {available} available"
        yield _happening(at_ns, "memory", (sample_seq, sampled_ns, None, "reading"), detail)


def _requests(run: Run, seq: int, at_ns: int) -> Iterator[Happening]:
    query = (
        "SELECT p.seq, p.began_ns, q.request_id, p.phase, q.num_prompt_tokens, p.ended_ns,"
        " p.next_phase FROM phase p JOIN request q USING (number)"
        " WHERE p.seq <= ? AND coalesce(p.ended_seq, ? + 1) > ? ORDER BY p.number"
    )
    for *row, num_prompt_tokens, ended_ns, next_phase in run(query, (seq, seq, seq)):
        until = "still" if ended_ns is None else f"until {time_text(ended_ns)}, then {next_phase}"
        detail = f"{until}; prompt of {num_prompt_tokens} tokens"
        yield _happening(at_ns, "request", tuple(row), detail)


def _decisions(run: Run, seq: int, at_ns: int) -> Iterator[Happening]:
    query = (
        "SELECT seq, at_ns, request_id, kind, body FROM events"
        " WHERE source = 'decision' AND seq > ? AND seq <= ? ORDER BY seq {} LIMIT ?"
    )
    before = run(query.format("DESC"), (seq - MAX_EVENTS, seq, NUM_DECISIONS)).fetchall()
    after = run(query.format("ASC"), (seq, seq + MAX_EVENTS, NUM_DECISIONS)).fetchall()
    for *row, body in (*reversed(before), *after):
        yield _happening(at_ns, "decision", tuple(row), body)
