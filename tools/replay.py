"""`fermata replay`: decides a journal again and says where it comes out differently; or shows what
the journal had come to at a step, or the life of one request.
"""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, takewhile
from pathlib import Path

import msgspec

from journal.bundle import refuse_changed
from journal.errors import JournalError
from journal.events import Record
from journal.queries import last_position
from journal.reader import JournalReader
from scheduler.policy import POLICY_VERSION
from scheduler.recovery import code_digest
from scheduler.replay import Divergence, Replay
from scheduler.views import ServerView, view_server
from tools.replay_life import Life, NoSuchRequest, find_request, life_of
from tools.replay_text import lines_of, lines_of_life, lines_of_state

SAME, DIFFERENT, UNUSABLE, OTHER_POLICY = 0, 1, 2, 3


class NoSuchStep(Exception):
    """The journal has no such step. One line."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What a replay came to, for programs. `policy_version` and `code_digest` are this release's;
    those of a divergence are what its run recorded. `recorded_policy_versions`: those of all runs.
    """

    steps: int
    decisions: int
    divergences: list[Divergence]
    policy_version: int
    recorded_policy_versions: list[int]
    code_digest: str
    state: ServerView | None = None


@dataclass(frozen=True, slots=True)
class Wanted:
    """Through which step, whether the state there is shown, and whether programs read it."""

    until: int | None = None
    show: bool = False
    as_json: bool = False


def run(path: Path, wanted: Wanted | None = None) -> int:
    """Prints each divergence, the state if it is wanted, and last the counts. Returns the exit
    status: 0 without divergence, 1 with one, 2 for a journal that cannot be read and a step that is
    not in it, 3 when only runs of another policy differ.
    """
    wanted = wanted or Wanted()
    try:
        with JournalReader.open(path) as reader:
            refuse_changed(reader)
            return print_replay(Replay(read(reader, wanted.until)), wanted)
    except (JournalError, NoSuchStep) as error:
        return unusable(error)


def run_life(path: Path, given: str, *, until: int | None = None, as_json: bool) -> int:
    """Prints the life of one request, through a step where one is given. Returns 0, or 2 for a
    journal that cannot be read, and a request or a step that is not in it.
    """
    try:
        with JournalReader.open(path) as reader:
            refuse_changed(reader)
            request_id = find_request(reader, given)
            check_step(reader, until)
            life = life_of(read(reader, until), request_id)
            if not life.moments and until is not None:
                raise NoSuchRequest(f"{request_id} came after step {until}")
    except (JournalError, NoSuchRequest, NoSuchStep) as error:
        return unusable(error)
    print_life(life, as_json=as_json)
    return SAME


def print_life(life: Life, *, as_json: bool) -> None:
    """The life as text, or as one JSON object."""
    print(msgspec.json.encode(life).decode() if as_json else "\n".join(lines_of_life(life)))


def unusable(error: Exception) -> int:
    """One line on stderr, and its exit status."""
    print(f"fermata replay: {error}", file=sys.stderr)
    return UNUSABLE


def check_step(reader: JournalReader, until: int | None) -> None:
    """Raises NoSuchStep for a step after the journal's last."""
    with reader.transaction() as run:
        last = last_position(run).step
    if until is not None and until > last:
        raise no_step_after(last, until)


def no_step_after(last: int, until: int) -> NoSuchStep:
    """The error for a step that the journal has not come to."""
    return NoSuchStep(f"the journal ends with step {last}: there is no {until}")


def read(reader: JournalReader, until: int | None) -> Iterator[Record]:
    """The records through a step; all of them without one. Raises NoSuchStep for a step before the
    journal's first.
    """
    records = reader.read()
    first = next(records, None)
    if first is None:
        return iter(())
    if until is None:
        return chain((first,), records)
    if until < first.step:
        raise NoSuchStep(f"the journal begins with step {first.step}: there is no step {until}")
    return takewhile(lambda record: record.step <= until, chain((first,), records))


def print_replay(replay: Replay, wanted: Wanted | None = None) -> int:
    """The replay as text, or as one JSON object, and its exit status. Raises NoSuchStep when the
    journal ends before the step that is wanted.
    """
    wanted = wanted or Wanted()
    status = SAME
    found: list[Divergence] = []
    for divergence in replay.divergences():
        found.append(divergence)
        status = worse(status, divergence)
        if not wanted.as_json:
            print("\n".join(lines_of(divergence)))
    state = replay.state
    broken = bool(found) and bool(found[-1].problem)
    if wanted.until is not None and state.step < wanted.until and not broken:
        raise no_step_after(state.step, wanted.until)
    view = view_server(state, state.now_ns) if wanted.show else None
    if wanted.as_json:
        report = Report(
            steps=replay.num_steps,
            decisions=replay.num_decisions,
            divergences=found,
            policy_version=POLICY_VERSION,
            recorded_policy_versions=sorted(replay.policy_versions),
            code_digest=code_digest(),
            state=view,
        )
        print(msgspec.json.encode(report).decode())
        return status
    if view is not None:
        print("\n".join(lines_of_state(view)))
    if others := sorted(replay.policy_versions - {POLICY_VERSION}):
        print(f"recorded under policy {', '.join(map(str, others))}, decided by {POLICY_VERSION}")
    counts = f"{replay.num_steps} steps, {replay.num_decisions} decisions"
    print(f"{counts}, {len(found)} divergences")
    return status


def worse(status: int, divergence: Divergence) -> int:
    """The exit status once this divergence is known too."""
    if not divergence.of_other_policy:
        return DIFFERENT
    return OTHER_POLICY if status == SAME else status
