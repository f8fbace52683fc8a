"""Processes that write a journal and die on the way: `python -m tests.journal_child FOLDER HOW`.

HOW is `commit`, which commits decode steps and prints the seq of each until it is killed, or the
name of a moment of a compaction, at which the process kills itself.
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from journal import compaction, database
from journal.journal import Journal
from tests.journal_steps import Steps

NUM_STEPS_BEFORE = 4
MOMENTS = ("copying", "alone", "flushed", "renamed")


def begin(folder: Path) -> Steps[Journal]:
    """A journal with two requests that decode."""
    steps = Steps(Journal.open(folder, gather_steps=5))
    steps.start()
    steps.receive(1)
    steps.receive(2)
    steps.join(1, 2)
    return steps


def die(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def after(function: Callable[..., object]) -> Callable[..., None]:
    """The function, and then death."""

    def last(*arguments: object) -> None:
        function(*arguments)
        die()

    return last


def commit_until_killed(folder: Path) -> None:
    steps = begin(folder)
    token = 0
    while True:
        record = steps.decode({1: [token], 2: [token, token]})[-1]
        print(record.seq, flush=True)
        token += 1


def die_while_compacting(folder: Path, moment: str) -> None:
    steps = begin(folder)
    for token in range(12):
        steps.decode({1: [token], 2: [token, token]})
    if moment == "copying":
        compaction.Compaction.complete = die  # type: ignore[method-assign]
    elif moment == "alone":
        database.Database.leave_wal = after(database.Database.leave_wal)  # type: ignore[assignment]
    elif moment == "flushed":
        database.Database.replace = die  # type: ignore[method-assign]
    elif moment == "renamed":
        database.flush = die
    through_seq = [record.seq for record in steps.journal.read() if record.step == NUM_STEPS_BEFORE]
    steps.journal.begin_compaction(through_seq[-1], 1, {"carried": True})
    while not steps.journal.advance_compaction():
        pass


if __name__ == "__main__":
    if sys.argv[2] == "commit":
        commit_until_killed(Path(sys.argv[1]))
    else:
        die_while_compacting(Path(sys.argv[1]), sys.argv[2])
