"""Processes that play seeds of the simulation, from this tree or from a changed copy of it."""

import os
import selectors
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import IO, cast

import msgspec

import scheduler
from scheduler.settings import PREFIX
from scheduler.simulation.stories import Told
from scheduler.simulation.worker import Line

WORKER = "scheduler.simulation.worker"

SILENCE_S = 120
"""The longest that no seed may come to an end: then something goes round in circles."""


def packages_folder() -> Path:
    """The folder with the packages that this process runs."""
    return Path(scheduler.__file__).resolve().parents[1]


def without_settings() -> dict[str, str]:
    """The environment but for settings of a server: a seed is the same wherever it is played."""
    prefix = PREFIX.upper()
    return {n: value for n, value in os.environ.items() if not n.upper().startswith(prefix)}


class Worker:
    """One process, and the seeds that it plays, of which it has told so many. `is_over`: it has
    ended. `words` is what it said last that is told of no seed, or why it `was_killed`.
    """

    def __init__(self, folder: Path, seeds: range) -> None:
        self.seeds = seeds
        self.num_told = 0
        self.is_over = False
        self.was_killed = False
        self.rest = b""
        self.words = ""
        numbers = [str(number) for number in (seeds.start, seeds.stop, seeds.step)]
        self.process = subprocess.Popen(
            [sys.executable, "-P", "-m", WORKER, str(folder), *numbers],
            env=without_settings() | {"PYTHONPATH": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    @property
    def pipe(self) -> IO[bytes]:
        """What it writes."""
        return cast("IO[bytes]", self.process.stdout)

    def hear(self) -> list[Line]:
        """What it has told since. One that has ended too early tells of the seed that it was at."""
        data = os.read(self.pipe.fileno(), 2**16)
        self.is_over = not data
        if self.is_over and self.num_told < len(self.seeds):
            words = self.words or f"exit status {self.process.wait()}"
            return [Line(self.seeds[self.num_told], Told(failure=f"the process ended: {words}"))]
        *lines, self.rest = (self.rest + data).split(b"\n")
        told = [msgspec.json.decode(line, type=Line) for line in lines if line.startswith(b"{")]
        others = [line for line in lines if not line.startswith(b"{")]
        self.words = others[-1].decode(errors="replace") if others else self.words
        self.num_told += len(told)
        return told

    def kill(self, why: str) -> None:
        """Ends it, for this reason."""
        self.words = why
        self.was_killed = True
        self.process.kill()

    def close(self) -> None:
        """Ends it, if it has not ended, and lets go of what it wrote."""
        self.process.kill()
        self.process.wait()
        self.pipe.close()


class Workers:
    """Those that play at present."""

    def __init__(self) -> None:
        self.selector = selectors.DefaultSelector()

    def close(self) -> None:
        """Ends them."""
        for worker in self.all():
            self.remove(worker)
        self.selector.close()

    def all(self) -> list[Worker]:
        """Each of them."""
        return [key.data for key in self.selector.get_map().values()]

    def add(self, worker: Worker) -> None:
        """One more."""
        self.selector.register(worker.pipe, selectors.EVENT_READ, worker)

    def remove(self, worker: Worker) -> None:
        """One less: what it may still have to tell is not heard."""
        if worker in self.all():
            self.selector.unregister(worker.pipe)
            worker.close()

    def hear(self) -> Iterator[tuple[Worker, list[Line]]]:
        """What they tell, as it comes, until none is left. Who hears may add and remove some."""
        while self.selector.get_map():
            ready = self.selector.select(SILENCE_S)
            for worker in () if ready else self.all():
                worker.kill(f"no seed has come to an end for {SILENCE_S} s")
            for key, _ in ready:
                worker: Worker = key.data
                lines = worker.hear()
                if worker.is_over:
                    self.remove(worker)
                yield worker, lines
