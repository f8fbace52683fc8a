"""What a replay has found, as text."""

from collections.abc import Iterator
from datetime import UTC, datetime
from difflib import SequenceMatcher
from itertools import zip_longest
from typing import cast

import msgspec

from journal.events import Decision
from scheduler.policy import POLICY_VERSION
from scheduler.recovery import code_digest
from scheduler.replay import Divergence
from scheduler.views import RequestView, ServerView
from tools.ps import age, size
from tools.replay_life import Life, Moment
from tools.request_ids import shortest
from tools.text_table import text_table

DIGEST_CHARACTERS = 12
"""Of a code digest: enough to tell releases apart."""

MAX_SHOWN = 50
"""Requests of a state that are shown one by one."""

MAX_VALUE_CHARACTERS = 60
"""Of a value in a line about one event."""


def time_text(at_ns: int) -> str:
    """A time of the journal, to the millisecond."""
    return datetime.fromtimestamp(at_ns / 1e9, UTC).isoformat(sep=" ", timespec="milliseconds")


# A divergence


def lines_of(divergence: Divergence) -> list[str]:
    """What was decided then and what would be now, side by side, with the state that led there;
    equal decisions are left out.
    """
    lines = [
        f"run {divergence.run_id}, step {divergence.step}, at {time_text(divergence.at_ns)}",
        f"  recorded by {maker(divergence.policy_version, divergence.code_digest)}",
        f"  expected by {maker(POLICY_VERSION, code_digest())}",
    ]
    for recorded, expected in differing(divergence):
        lines += lines_of_pair(recorded, expected)
    if divergence.problem:
        lines.append(f"  {divergence.problem}")
    if divergence.led_by is not None:
        lines += ["  decided on:", *(f"    {line}" for line in lines_of_state(divergence.led_by))]
    return lines


def maker(policy_version: int, digest: str) -> str:
    """By what a decision was made."""
    return f"policy {policy_version}, code {digest[:DIGEST_CHARACTERS] or 'unknown'}"


def differing(divergence: Divergence) -> Iterator[tuple[Decision | None, Decision | None]]:
    """What was recorded and what would stand in its place. One decision more or less does not make
    those behind it differ.
    """
    recorded, expected = divergence.recorded, divergence.expected
    matcher = SequenceMatcher(None, recorded, expected, autojunk=False)
    for tag, begin, end, expected_begin, expected_end in matcher.get_opcodes():
        if tag != "equal":
            yield from zip_longest(recorded[begin:end], expected[expected_begin:expected_end])


def lines_of_pair(recorded: Decision | None, expected: Decision | None) -> list[str]:
    """Two decisions of one kind field by field; else each as a whole, as the journal has it."""
    if recorded is None or expected is None or type(recorded) is not type(expected):
        return [f"  recorded {text_of(recorded)}", f"  expected {text_of(expected)}"]
    fields = differing_fields(recorded, expected)
    rows = [
        ("*" if name in fields else "", name, value_of(recorded, name), value_of(expected, name))
        for name in recorded.__struct_fields__
    ]
    kind = msgspec.to_builtins(recorded)["kind"]
    table = text_table(("", kind, "recorded", "expected"), rows, ())
    return [f"  {line}" for line in [*table, f"they differ in {', '.join(fields)}"]]


def differing_fields(recorded: Decision, expected: Decision) -> list[str]:
    """The names of the fields in which two decisions of one kind differ."""
    names = recorded.__struct_fields__
    return [name for name in names if getattr(recorded, name) != getattr(expected, name)]


def value_of(decision: Decision, name: str) -> str:
    """One field as JSON, cut where it is long."""
    return cut(msgspec.json.encode(getattr(decision, name), order="deterministic").decode())


def cut(text: str) -> str:
    """A text of bounded length."""
    if len(text) <= MAX_VALUE_CHARACTERS:
        return text
    return f"{text[: MAX_VALUE_CHARACTERS - 3]}..."


def text_of(decision: Decision | None) -> str:
    """A decision in one line, as the journal has it."""
    if decision is None:
        return "nothing"
    return msgspec.json.encode(decision, order="deterministic").decode()


# A state


def lines_of_state(view: ServerView) -> list[str]:
    """The state at a step: how many requests are in which phase, memory, and each of them."""
    memory = view.memory
    marks = "no ceiling"
    if memory.ceiling_bytes is not None:
        ceiling = size(memory.ceiling_bytes)
        read = size(memory.active_bytes + memory.cached_bytes) or "0B"
        usage = size(memory.usage_bytes) or "0B"
        marks = f"{read} read, {usage} used and reserved, of {ceiling}, {memory.level}"
    reliefs = ", ".join(f"{relief.rung} {size(relief.expected_bytes)}" for relief in memory.reliefs)
    engine = "stopping" if view.stopping else "ready" if view.engine_ready else "loading"
    lines = [
        f"step {view.step} of run {view.run_id}, at {time_text(view.now_ns)}: engine {engine}",
        f"memory: {marks}; {size(view.reserved_bytes) or '0B'} reserved for rows"
        + (f"; under way: {reliefs}" if reliefs else ""),
        f"requests: {phases_of(view.requests)}; batch {view.batch} of {view.batch_rows} rows",
    ]
    names = shortest(request.id for request in view.requests)
    rows = [row_of(request, names) for request in view.requests[:MAX_SHOWN]]
    if rows:
        columns = ("request", "state", "prompt", "output", "cached", "reserved", "age", "waits for")
        right = ("prompt", "output", "cached", "reserved", "age")
        lines += text_table(columns, rows, right)
    if len(view.requests) > MAX_SHOWN:
        lines.append(f"and {len(view.requests) - MAX_SHOWN} more")
    return lines


def phases_of(requests: list[RequestView]) -> str:
    """How many open requests are in each phase."""
    counts: dict[str, int] = {}
    for request in requests:
        counts[request.state] = counts.get(request.state, 0) + 1
    return ", ".join(f"{count} {phase}" for phase, count in counts.items()) or "none"


def row_of(request: RequestView, names: dict[str, str]) -> tuple[str, ...]:
    """One request of a state."""
    return (
        names[request.id],
        request.state,
        str(request.num_prompt_tokens),
        f"{request.num_output_tokens}/{request.max_tokens}",
        str(request.num_cached_tokens or request.num_saved_tokens),
        size(request.reserved_bytes),
        age(request.age_ms),
        "" if request.wait is None else request.wait.text,
    )


# A life


def lines_of_life(life: Life) -> list[str]:
    """Each moment in a line: when, what it became, the event with its numbers."""
    columns = ("seq", "step", "after", "is", "by", "event", "")
    rows = [row_of_moment(moment) for moment in life.moments]
    began = time_text(life.moments[0].at_ns) if life.moments else "nothing is left of it"
    right = ("seq", "step", "after")
    return [f"{life.request_id}, from {began}", *text_table(columns, rows, right)]


def row_of_moment(moment: Moment) -> tuple[str, ...]:
    """One moment of a life."""
    numbers = " ".join(f"{name}={cut(plain(value))}" for name, value in moment.numbers.items())
    if moment.num_steps:
        numbers = f"{moment.num_tokens} tokens in {moment.num_steps} steps"
    after = f"{moment.since_ms / 1000:.3f}s"
    return (
        str(moment.seq),
        str(moment.step),
        after,
        moment.phase,
        moment.source,
        moment.kind,
        numbers,
    )


def plain(value: object) -> str:
    """A value as people read it; lists by their length, since they are blocks."""
    if isinstance(value, list | tuple):
        return f"{len(cast('list[object]', value))} of them"
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()
