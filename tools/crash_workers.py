"""Processes that play stories beside each other, and the one that hands stories out.

All of them are forked from a process that has imported everything and opened nothing: each worker
is a driver with clients, and has a launcher of its own for its servers' lives.
"""

import asyncio
import os
import selectors
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NoReturn

import msgspec

from journal.journal import Journal
from tools.bench_history import HistoryWriter
from tools.crash_launch import Launcher, fork_launcher, leave
from tools.crash_plan import Tale, Told
from tools.crash_story import Story, script_of

HISTORY = "history"
EMPTY = "empty"
HISTORY_EVENTS = 6_000
"""More than a mebibyte of them: a journal that is shortened at the least size that can be set."""

WORKER_LIMIT_S = 300
"""The longest that nobody has anything to tell."""


class WorkerDied(Exception):
    """A worker ended by a bug of the harness; its last words are on stderr."""


@dataclass
class Worker:
    """One of them, as the parent sees it, and the story that it plays."""

    pid: int
    line: socket.socket
    rest: bytes = b""
    tale: Tale | None = None

    def hand(self, tale: Tale) -> None:
        """A story for it."""
        self.tale = tale
        self.line.sendall(msgspec.json.encode(tale) + b"\n")

    def hear(self) -> Iterator[Told]:
        """What it has told. Raises WorkerDied."""
        data = self.line.recv(2**16)
        if not data:
            raise WorkerDied(f"while it played {self.tale}")
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self.tale = None
            yield msgspec.json.decode(line, type=Told)


@dataclass
class Workers:
    """All of them. `folder` is where stories have their folders; those that went wrong stay."""

    folder: Path
    workers: list[Worker] = field(default_factory=list[Worker])

    def start(self, count: int) -> None:
        """Called by a process with one thread."""
        forked(lambda: write_journals(self.folder))
        for number in range(count):
            ours, theirs = socket.socketpair()
            pid = os.fork()
            if pid == 0:
                ours.close()
                for worker in self.workers:
                    worker.line.close()
                end_after(partial(work, theirs, self.folder, f"worker{number}"))
            theirs.close()
            self.workers.append(Worker(pid, ours))

    def play(self, next_tale: Callable[[], Tale | None]) -> Iterator[Told]:
        """Stories as they end, until there are no more. Raises WorkerDied."""
        with selectors.DefaultSelector() as selector:
            for worker in self.workers:
                selector.register(worker.line, selectors.EVENT_READ, worker)
            while True:
                for worker in self.workers:
                    if worker.tale is None and (tale := next_tale()) is not None:
                        worker.hand(tale)
                if all(worker.tale is None for worker in self.workers):
                    return
                ready = selector.select(WORKER_LIMIT_S)
                if not ready:
                    raise WorkerDied(f"nothing was told for {WORKER_LIMIT_S} s")
                for key, _ in ready:
                    yield from key.data.hear()

    def close(self) -> None:
        """Ends them, and what they have started."""
        for worker in self.workers:
            worker.line.close()
        for worker in self.workers:
            os.waitpid(worker.pid, 0)
        for name in (HISTORY, EMPTY):
            shutil.rmtree(self.folder / name, ignore_errors=True)
        with suppress(OSError):
            self.folder.rmdir()  # stays when a story that went wrong is in it


def write_journals(folder: Path) -> None:
    """One that has grown too large, of requests that ended a while ago; and one without events."""
    Journal.open(folder / EMPTY).close()
    writer = HistoryWriter(folder / HISTORY, seed=1, at_ns=time.time_ns() - 3600 * 10**9)
    while writer.state.seq < HISTORY_EVENTS:
        writer.generation()
    writer.journal.close()


def each_of(tales: Iterable[Tale]) -> Callable[[], Tale | None]:
    """Hands these out, one after the other."""
    left = iter(tales)
    return lambda: next(left, None)


def forked(work: Callable[[], object]) -> None:
    """Has something done in a process of its own, and waits for it. Raises WorkerDied."""
    pid = os.fork()
    if pid == 0:
        end_after(work)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]):
        raise WorkerDied("a journal could not be prepared")


def end_after(work: Callable[[], object]) -> NoReturn:
    """The rest of a forked process."""
    status = 1
    try:
        work()
        status = 0
    finally:
        leave(status)


def work(line: socket.socket, folder: Path, name: str) -> None:
    """A worker's process: it plays the stories that are handed to it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends it, by hanging up
    pid, orders = fork_launcher(line)
    asyncio.run(play_all(line, orders, folder, name))
    os.waitpid(pid, 0)


async def play_all(line: socket.socket, orders: socket.socket, folder: Path, name: str) -> None:
    """Until the parent hangs up."""
    launcher = Launcher(orders)
    reader, writer = await asyncio.open_connection(sock=line)
    number = 0
    while tale := await reader.readline():
        number += 1
        place = folder / f"{name}-{number}"
        asked = msgspec.json.decode(tale, type=Tale)
        script = script_of(asked)
        beginning = {"grown": folder / HISTORY, "empty": folder / EMPTY}.get(script.journal)
        story = Story(place, launcher, asked, script, beginning=beginning)
        told = await story.play()
        if not told.problems:
            shutil.rmtree(place)
        else:
            (place / "problems").write_text(f"{told}\n" + "\n".join(told.problems) + "\n")
        writer.write(msgspec.json.encode(told) + b"\n")
        await writer.drain()
    writer.close()
    await launcher.close()
