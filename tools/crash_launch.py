"""Lives of servers that end hard, one after the other, and how a driver starts them.

A launcher is forked from a process that has imported everything and opened nothing: no thread, no
file, no mlx. It forks a server for each life, and so a life costs no import; a life that is asked
for in a new process is one like any other, from the interpreter on.
"""

import asyncio
import gc
import os
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn

import msgspec

from scheduler.settings import PREFIX
from tools import crash_child
from tools.crash_child import End, LifePlan

LIFE_LIMIT_S = 60
"""The longest that anything is waited for which a life must do."""


class Order(msgspec.Struct, frozen=True):
    """One life, to be started. `log` is where its stderr goes."""

    plan: LifePlan
    log: str
    new_process: bool = False


class News(msgspec.Struct, frozen=True):
    """What is said of a life: where it listens; that its files are in order; its passes, and where
    it was ended; and by the launcher, the status with which it ended (negative: a signal).
    """

    address: str | None = None
    pid: int = 0
    passes: dict[str, int] | None = None
    end: End | None = None
    swept: bool = False
    status: int | None = None


def launch(orders: socket.socket) -> None:
    """The launcher's process: starts each life that is ordered, until the driver hangs up."""
    with orders.makefile("rb") as lines:
        for line in lines:
            order = msgspec.json.decode(line, type=Order)
            pid = os.fork()
            if pid == 0:
                become(order, orders)
            _, status = os.waitpid(pid, 0)
            told = msgspec.json.encode({"status": os.waitstatus_to_exitcode(status)})
            orders.sendall(told + b"\n")


def become(order: Order, orders: socket.socket) -> NoReturn:
    """The forked process becomes the life, and ends with it."""
    status = 1
    try:
        # A plan has all the settings of its life, and the user's own are nobody's business here.
        for name in [name for name in os.environ if name.startswith(PREFIX)]:
            del os.environ[name]
        log = os.open(order.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, sys.stderr.fileno())
        os.close(log)
        if order.new_process:
            os.dup2(orders.fileno(), sys.stdout.fileno())
            plan = msgspec.json.encode(order.plan).decode()
            os.execv(sys.executable, [sys.executable, "-P", "-m", "tools.crash_child", plan])
        status = crash_child.live_beside(orders, order.plan)
    finally:
        leave(status)


def leave(status: int) -> NoReturn:
    """The end of a forked process, which must not go on with what its parent does. Called in a
    `finally`: an error of ours is shown first.
    """
    error = sys.exception()
    if error is not None:
        sys.excepthook(type(error), error, error.__traceback__)
    os._exit(status)


class Life:
    """A life that was started. `address` is there once it listens; `status` once it has ended, and
    then also its passes.
    """

    def __init__(self) -> None:
        self.address: str | None = None
        self.pid = 0
        self.passes: dict[str, int] = {}
        self.end: End | None = None
        self.status: int | None = None
        self.listening = asyncio.Event()
        self.swept = asyncio.Event()
        self.over = asyncio.Event()

    def hear(self, news: News) -> None:
        """What is said of it."""
        if news.address is not None:
            self.address, self.pid = news.address, news.pid
            self.listening.set()
        if news.swept:
            self.swept.set()
        if news.passes is not None:
            self.passes, self.end = news.passes, news.end
        if news.status is not None:
            self.status = news.status
            self.over.set()

    async def ended(self) -> int:
        """Waits for its end; returns the status. Raises TimeoutError."""
        await asyncio.wait_for(self.over.wait(), LIFE_LIMIT_S)
        assert self.status is not None
        return self.status

    def kill(self, number: signal.Signals = signal.SIGKILL) -> None:
        """A signal to its process, unless it has ended."""
        if self.status is None and self.pid:
            os.kill(self.pid, number)


class Launcher:
    """The driver's end. Used in one asyncio loop, one life at a time."""

    def __init__(self, orders: socket.socket) -> None:
        self._orders = orders
        self._writer: asyncio.StreamWriter | None = None
        self._listener: asyncio.Future[None] | None = None
        self._life = Life()

    async def start(self, plan: LifePlan, log: Path, *, new_process: bool = False) -> Life:
        """A new life. The one before it is over, or has been killed."""
        if self._writer is None:
            reader, self._writer = await asyncio.open_connection(sock=self._orders)
            self._listener = asyncio.ensure_future(self._listen(reader))
        else:
            await self._life.ended()
        self._life = Life()
        self._writer.write(msgspec.json.encode(Order(plan, str(log), new_process)) + b"\n")
        await self._writer.drain()
        return self._life

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            self._life.hear(msgspec.json.decode(line, type=News))

    async def close(self) -> None:
        """Hangs up, also when no life was ever begun: the launcher ends, and a life that goes on
        with it.
        """
        if self._writer is None or self._listener is None:
            self._orders.close()
            return
        self._writer.close()
        await self._listener


def fork_launcher(*others: socket.socket) -> tuple[int, socket.socket]:
    """A launcher's process id, and the driver's end of the line. Called in a process with one
    thread and no asyncio; `others` are lines of that process, of which a launcher knows nothing.
    """
    ours, theirs = socket.socketpair()
    # What was imported is not looked at again in each child: its memory stays shared.
    gc.freeze()
    pid = os.fork()
    if pid:
        theirs.close()
        return pid, ours
    status = 1
    try:
        ours.close()
        for other in others:
            other.close()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends it, by hanging up
        launch(theirs)
        status = 0
    finally:
        leave(status)
