"""Records histories anew: `python -m tests.histories.record [NAME ...]`, all of them by default.

Done when the policy was changed on purpose, after POLICY_VERSION was raised, and committed with
that change. Simulated stories give the same file each time; those over HTTP run in real time.
"""

import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from journal.events import Record
from tests.histories import served, simulated
from tests.histories.keeping import FOLDER, keep, read

COMMAND = "python -m tests.histories.record"
MAX_PLAYS = 5
"""Of a story in real time, until what it is for has happened."""

NAMES = (*simulated.STORIES, *served.STORIES)


def records_of(name: str) -> list[Record]:
    """Plays the story of this name; its journal."""
    if name in simulated.STORIES:
        return list(simulated.STORIES[name]().journal.read())
    for _ in range(MAX_PLAYS - 1):
        with suppress(served.Uneventful):
            return served_records(name)
    return served_records(name)


def served_records(name: str) -> list[Record]:
    """The journal of a story over HTTP. Raises Uneventful."""
    with tempfile.TemporaryDirectory() as folder:
        served.STORIES[name](Path(folder))
        return read(Path(folder))


def record(
    names: tuple[str, ...], folder: Path = FOLDER, say: Callable[[str], None] = print
) -> None:
    """Records these stories into a folder."""
    for name in names:
        file = folder / f"{name}.db"
        keep(records_of(name), file)
        say(f"{file.name}: {len(read(file))} events, {file.stat().st_size // 1024} KiB")


def main() -> None:
    """The command."""
    names = tuple(sys.argv[1:]) or NAMES
    unknown = sorted(set(names) - set(NAMES))
    if unknown:
        sys.exit(f"no such history: {', '.join(unknown)}; there are {', '.join(NAMES)}")
    record(names)


if __name__ == "__main__":
    main()
