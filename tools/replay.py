"""`fermata replay`: decides a journal again and says where it comes out differently."""

import sys
from collections.abc import Iterator
from difflib import SequenceMatcher
from itertools import zip_longest
from pathlib import Path

import msgspec

from journal.errors import JournalError
from journal.events import Decision
from journal.reader import JournalReader
from scheduler.replay import Divergence, Replay

SAME, DIFFERENT, UNUSABLE, OTHER_POLICY = 0, 1, 2, 3


def run(path: Path) -> int:
    """Prints each divergence and, last, the counts. Returns the exit status: 0 without divergence,
    1 with one, 2 for a journal that cannot be read, 3 when only runs of another policy differ.
    """
    try:
        with JournalReader.open(path) as reader:
            return print_replay(Replay(reader.read()))
    except JournalError as error:
        print(f"fermata replay: {error}", file=sys.stderr)
        return UNUSABLE


def print_replay(replay: Replay) -> int:
    """The replay as text, and its exit status."""
    status, num_divergences = SAME, 0
    for divergence in replay.divergences():
        num_divergences += 1
        print("\n".join(lines_of(divergence)))
        if not divergence.of_other_policy:
            status = DIFFERENT
        elif status == SAME:
            status = OTHER_POLICY
    print(
        f"{replay.num_steps} steps, {replay.num_decisions} decisions, {num_divergences} divergences"
    )
    return status


def lines_of(divergence: Divergence) -> list[str]:
    """What was decided then and what would be now; equal decisions are left out."""
    policy = f" by policy {divergence.policy_version}" if divergence.of_other_policy else ""
    lines = [f"run {divergence.run_id}, step {divergence.step}{policy}:"]
    for recorded, expected in differing(divergence):
        lines += [f"  recorded {text_of(recorded)}", f"  expected {text_of(expected)}"]
        if recorded and expected and type(recorded) is type(expected):
            lines.append(f"  they differ in {', '.join(differing_fields(recorded, expected))}")
    return lines + ([f"  {divergence.problem}"] if divergence.problem else [])


def differing(divergence: Divergence) -> Iterator[tuple[Decision | None, Decision | None]]:
    """What was recorded and what would stand in its place. One decision more or less does not make
    those behind it differ.
    """
    recorded, expected = divergence.recorded, divergence.expected
    matcher = SequenceMatcher(None, recorded, expected, autojunk=False)
    for tag, begin, end, expected_begin, expected_end in matcher.get_opcodes():
        if tag != "equal":
            yield from zip_longest(recorded[begin:end], expected[expected_begin:expected_end])


def differing_fields(recorded: Decision, expected: Decision) -> list[str]:
    """The names of the fields in which two decisions of one kind differ."""
    names = recorded.__struct_fields__
    return [name for name in names if getattr(recorded, name) != getattr(expected, name)]


def text_of(decision: Decision | None) -> str:
    """A decision in one line, as the journal has it."""
    if decision is None:
        return "nothing"
    return msgspec.json.encode(decision, order="deterministic").decode()
