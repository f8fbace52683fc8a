"""The life of one run, on the loop's thread: describe the model, take the first step, go on until
a stop or a failure, drain, close. Its outcome is the process's exit status.
"""

import importlib.metadata
import os
import platform
import secrets
import sqlite3
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache

import structlog

from journal.crashpoints import reach
from journal.errors import JournalBroken, JournalFull
from journal.events import ModelFacts, ServerStarted
from journal.journal import Journal
from scheduler.clock import SystemClock
from scheduler.deadlines import deadline_ns
from scheduler.engine.base import Engine
from scheduler.engine.model import ModelDescription, ModelError, ModelSource
from scheduler.gauge import Gauge
from scheduler.kvcache.codec import BlockCodec
from scheduler.kvcache.fake_codec import FakeCodec
from scheduler.kvcache.limits import why_none_is_saved
from scheduler.kvcache.naming import KeyDamaged
from scheduler.kvstore import KvStore
from scheduler.loop import Loop, StopNow
from scheduler.machine import MachineUnreadable, ThisMachine
from scheduler.memory import why_nothing_fits
from scheduler.policy import POLICY_VERSION
from scheduler.recovery import Recovered, code_digest
from scheduler.sensors import EngineDeath, Sensors
from scheduler.settings import Settings
from scheduler.state import SchedulerState
from scheduler.stopping import Stopping
from scheduler.upkeep import Upkeep

MAX_QUESTIONS = 256
"""Questions about the state that wait for the loop at most."""

DISTRIBUTIONS = ("mlx-fermata", "mlx", "mlx-lm", "sqlalchemy", "msgspec")
KV_CLOSE_LIMIT_S = 2.0
"""How long the end waits for files in the middle of which it came: nothing of them is kept, and the
next start removes what is left of them.
"""

FULL_LOG_EVERY_NS = 60_000_000_000
"""A disk that stays full is logged so often at most."""

JOURNAL_BROKEN = 3
"""The exit status that says so."""

NS_PER_S = 10**9
NONCE_BITS = 62
"""A nonce fits SQLite's and JSON's integers with room to spare."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Exit:
    """Why the scheduler ended: the process's exit status, and one line for people if it is not 0.

    0 clean, 1 a bug, 2 the model or the ceiling cannot be had, 3 the journal is broken, 4 the
    engine died.
    """

    status: int
    message: str = ""


class Ended(Exception):
    """The scheduler has ended, or has too many questions to answer: nothing more is taken."""


Question = Callable[[SchedulerState], None]


class FullLog:
    """Logs that the journal has no space: when that begins, at most once a minute, and its end.

    `clock_ns` is a monotonic clock.
    """

    def __init__(self, clock_ns: Callable[[], int]) -> None:
        self.clock_ns = clock_ns
        self.began_ns: int | None = None
        self.told_ns = 0

    def wait(self) -> None:
        """Called before each wait for space."""
        now_ns = self.clock_ns()
        if self.began_ns is None:
            self.began_ns = now_ns
        elif now_ns - self.told_ns < FULL_LOG_EVERY_NS:
            return
        self.told_ns = now_ns
        log.warning(
            "the journal has no space: nothing is admitted until there is some",
            waited_s=(now_ns - self.began_ns) // 1_000_000_000,
        )

    def commit(self) -> None:
        """Called after each commit that was made."""
        if self.began_ns is not None:
            waited_s = (self.clock_ns() - self.began_ns) // 1_000_000_000
            self.began_ns = None
            log.warning("the journal has space again", waited_s=waited_s)


class Run:
    """See the module's text. `main` is the thread's body; other methods say who calls them.

    `on_described` and `on_ready` tell HTTP about the model; `on_ended` is the last thing that
    happens, when all streams are cut. They are called on the loop's thread.
    """

    def __init__(
        self, settings: Settings, source: ModelSource, journal: Journal, recovered: Recovered
    ) -> None:
        self.settings = settings
        self.source = source
        self.journal = journal
        self.state = recovered.state
        self.clock = SystemClock()
        self.sensors = Sensors(recovered.known, settings.scheduler.max_inbox, self.clock)
        self.loop = Loop(settings, journal, recovered, self.sensors, self.wait_for_space)
        self.full_log = FullLog(self.clock.monotonic_ns)
        self.upkeep = Upkeep(settings, journal)
        self.engine: Engine | None = None
        self.kv: KvStore | None = None
        self.description: Future[ModelDescription] = Future()
        self.questions: deque[Question] = deque()
        self.stopping = Stopping(settings.server, self.clock)
        self.begun = False
        self.closed = False
        self.on_described: Callable[[ModelDescription], object] = ignore
        self.on_ready: Callable[[ModelFacts], object] = ignore
        self.on_ended: Callable[[Exit], object] = ignore

    # Any thread

    @property
    def run_id(self) -> int:
        """The number of this run in the journal; 0 before its first step."""
        return self.state.run_id if self.begun else 0

    @property
    def is_stopping(self) -> bool:
        """Whether a stop was asked for, or the end has come by itself."""
        return self.closed or self.sensors.stop_reason is not None

    def ask(self, question: Question) -> None:
        """Puts a question that the loop answers between two steps. Raises Ended."""
        if self.closed or len(self.questions) >= MAX_QUESTIONS:
            raise Ended
        self.questions.append(question)
        self.sensors.wake.set()

    def stop(self, reason: str) -> None:
        """A clean stop; the second call is a stop at once."""
        if self.sensors.stop_reason is None:
            self.stopping.begin()
            self.sensors.stop(reason)
        else:
            self.stopping.at_once.set()
            self.sensors.wake.set()

    # The loop's thread

    def main(self) -> None:
        """The thread's body: from the description to the end, whatever it is."""
        outcome = self.outcome()
        self.closed = True
        with ExitStack() as last:
            last.callback(self.on_ended, outcome)
            is_broken = outcome.status == JOURNAL_BROKEN
            last.callback(self.journal.abandon if is_broken else self.journal.close)
            if self.kv is not None:
                last.callback(self.kv.close, KV_CLOSE_LIMIT_S)
            if self.engine is not None:
                last.callback(self.engine.stop)
            log.debug("scheduler ended", status=outcome.status, message=outcome.message)

    def outcome(self) -> Exit:
        """The run, and how it ended."""
        try:
            self.serve()
        except (ModelError, MachineUnreadable) as error:
            return Exit(2, str(error))
        except EngineDeath as death:
            return Exit(2 if death.while_loading else 4, f"the engine died: {death}")
        except JournalBroken as error:
            return Exit(JOURNAL_BROKEN, str(error))
        except Exception as error:  # the loop's one edge: a bug ends the process, and says so
            log.exception("the scheduler has a bug")
            return Exit(1, f"the scheduler has a bug: {error!r}")
        return Exit(0)

    def serve(self) -> None:
        """Everything between the start and a clean end."""
        threading.Thread(target=self.describe, name="fermata-describe", daemon=True).start()
        while not self.description.done():
            if self.sensors.stop_reason is not None:
                return
            self.pause()
        description = self.description.result()
        limits = self.settings.limits(device_bytes=description.device_bytes)
        if why := why_nothing_fits(description.facts, limits):
            raise ModelError(why)
        nonce = secrets.randbits(NONCE_BITS)
        self.engine = self.source.make_engine(description, nonce)
        self.kv = make_kv(self.settings, self.source, description, self.sensors)
        self.sensors.gauge = Gauge(
            self.settings.memory.sample_ms, self.clock, self.engine.read_memory, ThisMachine()
        )
        try:
            started = server_started(self.settings, description, nonce)
            self.loop.begin(started, self.engine, self.kv)
            self.full_log.commit()
            self.begun = True
            self.on_described(description)
            self.go_on()
            reach("stop.drained")
            self.journal.gather()
            self.loop.save_snapshot()
        except StopNow:
            log.warning("stopped while the journal had no space")
        except JournalFull:
            log.warning("no space for a snapshot: the next start folds more events")

    def go_on(self) -> None:
        """Steps until a stop has come to its end."""
        was_ready = False
        while not self.is_over():
            self.pause()
            while self.loop.step():
                self.full_log.commit()
                if self.state.engine_ready and not was_ready:
                    was_ready = True
                    self.loaded()
                self.answer()
                if self.is_over():
                    return
            if not self.state.stopping:
                now_ns = max(self.state.now_ns, self.clock.wall_ns())
                self.upkeep.work(now_ns, idle=not self.state.admitted)

    def loaded(self) -> None:
        """The engine has measured its model, which may need more than its description says. Raises
        ModelError when nothing fits: else each request would be refused as too long.
        """
        model, limits = self.state.model, self.state.limits
        assert model is not None
        assert limits is not None
        if why := why_nothing_fits(model, limits):
            raise ModelError(why)
        self.on_ready(model)

    def describe(self) -> None:
        """Describes the model, in a thread of its own. A failure is the loop's to handle."""
        try:
            self.description.set_result(self.source.describe())
        except ModelError as error:
            self.description.set_exception(error)
        finally:
            if not self.description.done():
                self.description.set_exception(sys.exc_info()[1])
            self.sensors.wake.set()

    def pause(self) -> None:
        """Waits until there is something to do."""
        self.answer()
        self.sensors.wake.wait(self.wait_s())
        self.sensors.wake.clear()

    def wait_s(self) -> float | None:
        """Until the next thing that time itself brings: the end of a drain, a deadline that the
        state names, a reading of memory, or upkeep, which rests while the server stops.
        """
        if not self.begun:
            return None  # only the description, a stop or a question can end this wait
        return max(0.0, min(self.waits_s()))

    def waits_s(self) -> Iterator[float]:
        """How long until each of these."""
        yield self.stopping.wait_s() if self.stopping.begun else self.upkeep.wait_s()
        due_ns = deadline_ns(self.state)
        if due_ns is not None:
            yield (due_ns - max(self.state.now_ns, self.clock.wall_ns())) / NS_PER_S
        reading_ns = None if self.sensors.gauge is None else self.sensors.gauge.wait_ns(self.state)
        if reading_ns is not None:
            yield reading_ns / NS_PER_S

    def is_over(self) -> bool:
        """Whether a stop has come to its end: it is recorded, and the engine and the writers are
        empty, the limits have passed, or somebody is in a hurry.

        A block whose end the journal has not seen is nobody's at the next start, and swept.
        """
        if not self.state.stopping:
            return False
        if self.stopping.drain_is_over() and not self.sensors.drained:
            self.sensors.end_drain()
        state = self.state
        is_empty = not (state.admitted or state.leaving or state.index.writing_bytes)
        return is_empty or self.stopping.is_over()

    def wait_for_space(self) -> None:
        """What the loop does between two tries of a commit. Raises StopNow when a stop is due."""
        self.full_log.wait()
        self.stopping.at_once.wait(self.settings.journal.full_wait_ms / 1000)
        if self.stopping.drain_is_over() or self.stopping.is_over():
            raise StopNow
        self.answer()

    def answer(self) -> None:
        """Answers the questions about the state that have come in."""
        while self.questions:
            self.questions.popleft()(self.state)


def ignore(_: object) -> None:
    """Nobody listens."""


def make_kv(
    settings: Settings, source: ModelSource, description: ModelDescription, sensors: Sensors
) -> KvStore | None:
    """The store of saved KV, if anything is to be saved. Raises ModelError when its folder or key
    cannot be used.
    """
    limits = settings.kv.limits(description.facts)
    if limits is None:
        return None
    if why := why_none_is_saved(description.facts, limits):
        log.warning("no KV of this model will be saved", reason=why)
    try:
        return KvStore(
            settings.state,
            settings.kv,
            make_codec(source),
            block_tokens=limits.block_tokens,
            fingerprint=description.facts.fingerprint,
            deliver=sensors.deliver_fact,
        )
    except (OSError, KeyDamaged) as error:
        raise ModelError(f"the folder for saved KV cannot be used: {error}") from error


def make_codec(source: ModelSource) -> BlockCodec:
    """How rows of this model's engine become blocks. Only the real one brings mlx in."""
    if source.caches == "fake":
        return FakeCodec()
    from scheduler.kvcache.mlx_codec import MlxCodec

    return MlxCodec()


def server_started(settings: Settings, description: ModelDescription, nonce: int) -> ServerStarted:
    """The first fact of a run: everything that its decisions may depend on."""
    return ServerStarted(
        policy_version=POLICY_VERSION,
        code_digest=code_digest(),
        limits=settings.limits(description.facts, device_bytes=description.device_bytes),
        model=description.facts,
        engine_nonce=nonce,
        configuration=settings.configuration(),
        platform=platform.platform(),
        blas=description.blas,
        versions=dict(versions()),
        process_id=os.getpid(),
    )


@cache
def versions() -> Mapping[str, str]:
    """What this process is made of. Nothing is imported for it."""
    found = {"python": platform.python_version(), "sqlite": sqlite3.sqlite_version}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    return found
