"""A process that plays seeds, one after the other, and puts what came of each on a line of stdout:

    python -m scheduler.simulation.worker FOLDER FIRST STOP STRIDE

FOLDER is where its packages must come from, so that a changed copy is what is played.
"""

import gc
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from scheduler.simulation.seeds import story_of
from scheduler.simulation.stories import Told, tell


class Line(msgspec.Struct, frozen=True):
    """What is told of one seed, and how long the processor was busy with it."""

    seed: int
    told: Told
    busy_s: float = 0


def main(arguments: Sequence[str]) -> None:
    """Who has started it ends it; an interrupt of the terminal is not meant for it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder, first, stop, stride = arguments
    ours = Path(__file__).resolve().parents[2]
    assert ours == Path(folder).resolve(), f"the packages of {ours} are played, not of {folder}"
    lines, sys.stdout = sys.stdout, sys.stderr  # nobody else writes among them
    gc.freeze()
    for seed in range(int(first), int(stop), int(stride)):
        began_s = time.process_time()
        told = tell(story_of(seed))
        line = Line(seed, told, time.process_time() - began_s)
        print(msgspec.json.encode(line).decode(), file=lines, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
