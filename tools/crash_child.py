"""One life of a server that may be ended at a named point: `python -m tools.crash_child PLAN`.

It is the server of `fermata serve`, from its folder and its socket to its stop. What a plan adds
lies around it: the hook that ends the process, failures of the disk and of rows, and memory that
something else takes.
"""

import asyncio
import os
import signal
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import msgspec

from journal import crashpoints
from journal.crashpoints import POINTS
from scheduler.engine.base import MemoryReading
from scheduler.engine.fake import FakeEngine, FakeSource
from scheduler.engine.fake_row import Failure, Phase
from scheduler.engine.model import ModelDescription, ModelSource
from scheduler.engine.models import resolve
from scheduler.settings import Settings
from tools import serve

SWEPT = "recovery.swept"
"""From here on no file lies there that the journal does not know, but for what is being written."""

Say = Callable[[dict[str, object]], None]


class Fault(msgspec.Struct, frozen=True):
    """At the passes `first` to `last` of a point an operation fails with this error number."""

    point: str
    error: int
    first: int = 1
    last: int = 1


class RowFailure(msgspec.Struct, frozen=True):
    """Row `number` fails in this work, once `at` tokens are cached or put out."""

    number: int
    during: Phase
    at: int = 0


class Ballast(msgspec.Struct, frozen=True):
    """From the reading of memory with this number on, something else holds so many bytes."""

    reading: int
    num_bytes: int


class End(msgspec.Struct, frozen=True):
    """The process is ended when it comes to a point for the `number`-th time."""

    point: str
    number: int


class LifePlan(msgspec.Struct, frozen=True):
    """What a life is: its settings by group and name, and what befalls it. It is ended at the first
    of the `ends` to which it comes.
    """

    state: str
    settings: dict[str, object]
    ends: tuple[End, ...] = ()
    faults: tuple[Fault, ...] = ()
    failures: tuple[RowFailure, ...] = ()
    ballast: tuple[Ballast, ...] = ()


class CrashHook:
    """Counts the passes of each point, makes faults, and ends the process. Safe for threads."""

    def __init__(
        self, plan: LifePlan, end: Callable[[End], object], swept: Callable[[], object]
    ) -> None:
        self._plan = plan
        self._end = end
        self._swept = swept
        self._lock = threading.Lock()
        self.passes: Counter[str] = Counter()

    def __call__(self, name: str) -> None:
        assert name in POINTS, f"the point {name} is not listed"
        plan = self._plan
        with self._lock:
            self.passes[name] += 1
            number = self.passes[name]
            end = End(name, number)
            if end in plan.ends:
                self._end(end)
        if name == SWEPT:
            self._swept()
        for fault in plan.faults:
            if fault.point == name and fault.first <= number <= fault.last:
                raise OSError(fault.error, f"{os.strerror(fault.error)} (planned, at {name})")


class PlannedEngine(FakeEngine):
    """The fake engine beside something else that takes memory."""

    ballast: tuple[Ballast, ...] = ()
    num_readings = 0

    def read_memory(self) -> MemoryReading:
        self.num_readings += 1
        for each in self.ballast:
            if each.reading == self.num_readings:
                self.memory.set_ballast(each.num_bytes)
        return super().read_memory()


class PlannedSource(FakeSource):
    """The fake model, with what a plan lets happen to its rows and its memory."""

    def __init__(self, settings: Settings, plan: LifePlan) -> None:
        super().__init__(settings.fake)
        self._plan = plan

    def make_engine(self, description: ModelDescription, nonce: int) -> FakeEngine:
        engine = PlannedEngine(description.facts, nonce, self.settings)
        engine.ballast = self._plan.ballast
        engine.failures = [
            Failure(each.number, each.during, each.at, "planned") for each in self._plan.failures
        ]
        return engine


def settings_of(plan: LifePlan) -> Settings:
    """The settings of a life: the plan's, and nobody else's."""
    return Settings.model_validate({"state": plan.state, **plan.settings})


def source_of(plan: LifePlan, settings: Settings) -> ModelSource:
    """The model, as the plan lets it be."""
    return PlannedSource(settings, plan) if settings.model == "fake" else resolve(settings)


def live(plan: LifePlan, say: Say) -> int:
    """The life; returns the exit status, unless it ends before. `say` hears first where it listens,
    last how often it passed each point, and whether it was ended.
    """

    def end(end: End) -> None:
        say({"passes": hook.passes, "end": end})
        os.kill(os.getpid(), signal.SIGKILL)

    hook = CrashHook(plan, end, lambda: say({"swept": True}))
    crashpoints.install(hook)
    signals = serve.catch_signals()
    serve.configure_logging()
    settings = settings_of(plan)
    serve.make_state_folder(Path(plan.state))
    serve.check_key(settings)
    with serve.listen(settings.server.host, settings.server.port) as listener:
        address = serve.address_of(listener)
        say({"address": address, "pid": os.getpid()})
        service = serve.make_service(settings, source_of(plan, settings))
        status = asyncio.run(serve.serve(service, listener, address, signals))
    say({"passes": hook.passes})
    return status


def live_beside(driver: socket.socket, plan: LifePlan) -> int:
    """The life, told to the driver line by line. It ends with the driver, whatever happens."""

    def say(message: dict[str, object]) -> None:
        driver.sendall(msgspec.json.encode(message) + b"\n")

    threading.Thread(target=end_with, args=(driver,), daemon=True).start()
    return live(plan, say)


def end_with(driver: socket.socket) -> None:
    """Waits for the driver's end: as long as it lives it sends nothing. Then nobody is left to end
    this process.
    """
    driver.recv(1, socket.MSG_PEEK)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    """A life in a process of its own, whose stdout is the line to the driver."""
    plan = msgspec.json.decode(sys.argv[1], type=LifePlan)
    with socket.socket(fileno=os.dup(sys.stdout.fileno())) as driver:
        return live_beside(driver, plan)


if __name__ == "__main__":
    sys.exit(main())
