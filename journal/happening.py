"""What was happening at a moment: the run, memory, each open request in its phase, and what was
decided before and after. Where no server ran at that time, it is said first, and what it left is
told as of its last event.
"""

from collections import Counter
from collections.abc import Iterator
from typing import Any, cast

import msgspec

from journal.database import Run
from journal.moments import bounds, last_before
from journal.reader import JournalReader
from journal.span import time_text

NUM_DECISIONS = 10
"""Before the moment, and after it."""

MAX_EVENTS = 5_000
"""How far away a decision is looked for."""

EVERYDAY = (
    "block_save_planned",
    "prefill_chunk_planned",
    "prefill_chunk_committed",
    "batch_changed",
)
"""Decisions that follow from others and are made at every step: these are only counted, and so is
that blocks leave memory for newer ones, unless it is under pressure.
"""

SAID = ("number", "domain")
"""Fields of a decision that its row says anyway, or that only programs compare."""

NS_PER_MS = 1_000_000
NO_SERVER = "no server runs"


class Happening(msgspec.Struct, frozen=True):
    """Something of what was the case at a moment, or happened around it. `what` is run, memory,
    request, decision, or everyday: how many everyday decisions of one kind lie among those that
    are shown, the first of them at `seq`. `seq` is the event since which it is so, and `age_ms` how
    long before the moment that was (below 0: after it).
    """

    what: str
    seq: int
    at: str
    age_ms: int
    request_id: str | None
    name: str
    detail: str


class AfterTheEnd(Exception):
    """The moment is after the journal's last event, so that nothing is known of it. One line."""


def happenings(reader: JournalReader, at_ns: int) -> list[Happening]:
    """All of it, in one view of the file. Empty when the moment is before the first event. Raises
    AfterTheEnd.
    """
    with reader.transaction() as run:
        ends = bounds(run)
        if ends is None:
            return []
        last_ns = _time_of(run, ends[1])
        if at_ns >= last_ns + NS_PER_MS:  # the views round times to milliseconds
            end = time_text(last_ns)
            raise AfterTheEnd(f"the journal ends at {end}: of later it knows nothing")
        seq = last_before(run, *ends, at_ns + 1)
        if seq < ends[0]:
            return []
        found = list(_run(run, seq, at_ns))
        as_of = f"as of {time_text(_time_of(run, seq))}: " if found[0].name == NO_SERVER else ""
        return [
            *found,
            *_memory(run, seq, at_ns, as_of),
            *_requests(run, seq, at_ns, as_of),
            *_decisions(run, seq, at_ns),
        ]


def _time_of(run: Run, seq: int) -> int:
    at_ns: int = run("SELECT at_ns FROM events WHERE seq = ?", (seq,)).scalar_one()
    return at_ns


def _happening(
    moment_ns: int, what: str, row: tuple[int, int, str | None, str], detail: str
) -> Happening:
    """`row` is the seq, the time, the request and the name."""
    seq, at_ns, request_id, name = row
    age_ms = (moment_ns - at_ns) // NS_PER_MS
    return Happening(what, seq, time_text(at_ns), age_ms, request_id, name, detail)


def _run(run: Run, seq: int, at_ns: int) -> Iterator[Happening]:
    query = (
        "SELECT first_seq, started_ns, run_id, ended_by, model_name FROM run"
        " WHERE run_id = (SELECT run_id FROM events WHERE seq = ?)"
    )
    first_seq, started_ns, run_id, ended_by, model_name = run(query, (seq,)).one()
    others = "SELECT count(*) FROM events WHERE seq = ? AND run_id = ?"
    is_over = ended_by is not None and not run(others, (seq + 1, run_id)).scalar_one()
    if is_over:
        last_ns = _time_of(run, seq)
        detail = f"run {run_id} was {ended_by}; its last event is {seq}, at {time_text(last_ns)}"
        yield _happening(at_ns, "run", (seq, last_ns, None, NO_SERVER), detail)
    name = f"run {run_id}"
    detail = f"{model_name}, {ended_by}" if is_over else model_name
    yield _happening(at_ns, "run", (first_seq, started_ns, None, name), detail)


def _memory(run: Run, seq: int, at_ns: int, as_of: str) -> Iterator[Happening]:
    query = (
        "SELECT seq, at_ns, active_bytes, cached_bytes, ceiling_bytes, available_bytes"
        " FROM memory_sample WHERE seq <= ? ORDER BY seq DESC LIMIT 1"
    )
    for sample_seq, sampled_ns, active, cached, ceiling, available in run(query, (seq,)):
        share = "no ceiling" if not ceiling else f"{active / ceiling:.1%} of {ceiling}"
        detail = f"{as_of}{active} bytes active ({share}), {cached} cached, {available} available"
        yield _happening(at_ns, "memory", (sample_seq, sampled_ns, None, "reading"), detail)


def _requests(run: Run, seq: int, at_ns: int, as_of: str) -> Iterator[Happening]:
    query = (
        "SELECT p.seq, p.began_ns, q.request_id, p.phase, q.num_prompt_tokens, p.ended_ns,"
        " p.next_phase FROM phase p JOIN request q USING (number)"
        " WHERE p.seq <= ? AND coalesce(p.ended_seq, ? + 1) > ? ORDER BY p.number"
    )
    for *row, num_prompt_tokens, ended_ns, next_phase in run(query, (seq, seq, seq)):
        until = "still" if ended_ns is None else f"until {time_text(ended_ns)}, then {next_phase}"
        detail = f"{as_of}{until}; prompt of {num_prompt_tokens} tokens"
        yield _happening(at_ns, "request", tuple(row), detail)


def _decisions(run: Run, seq: int, at_ns: int) -> Iterator[Happening]:
    query = (
        "SELECT seq, at_ns, request_id, kind, body FROM events"
        " WHERE source = 'decision' AND seq > ? AND seq <= ? ORDER BY seq {}"
    )
    everyday: Counter[str] = Counter()
    firsts: dict[str, Happening] = {}
    found: list[Happening] = []
    for order, first, last in (("DESC", seq - MAX_EVENTS, seq), ("ASC", seq, seq + MAX_EVENTS)):
        num_shown = 0
        for *row, body in run(query.format(order), (first, last)):
            happening = _happening(at_ns, "decision", tuple(row), "")
            fields = msgspec.json.decode(body, type=dict[str, Any])
            if _is_everyday(happening.name, fields):
                everyday[happening.name] += 1
                firsts[happening.name] = min(
                    happening, firsts.get(happening.name, happening), key=lambda each: each.seq
                )
                continue
            found.append(msgspec.structs.replace(happening, detail=_detail(fields)))
            num_shown += 1
            if num_shown == NUM_DECISIONS:
                break
    yield from sorted(found, key=lambda each: each.seq)
    for name, number in everyday.most_common():
        detail = f"{number} around these, not shown one by one"
        yield msgspec.structs.replace(firsts[name], what="everyday", request_id=None, detail=detail)


def _is_everyday(kind: str, fields: dict[str, Any]) -> bool:
    return kind in EVERYDAY or (kind == "tier_shrunk" and fields["reason"] == "budget")


def _detail(fields: dict[str, Any]) -> str:
    """The numbers of a decision as text. Lists, which are of blocks, are told by their length."""
    shown = {
        name: f"{len(cast('list[object]', value))} of them" if isinstance(value, list) else value
        for name, value in fields.items()
        if name not in SAID and not name.endswith("hash") and value not in (None, "", [])
    }
    return ", ".join(f"{name} {_plain(value)}" for name, value in shown.items())


def _plain(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
