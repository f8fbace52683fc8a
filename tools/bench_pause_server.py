"""A run of the production scheduler on rows of real size, for the benchmark of pauses."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from journal.journal import Journal
from scheduler.recovery import recover
from scheduler.run import Ended, Exit, Run
from scheduler.settings import Settings, load_settings
from scheduler.state import SchedulerState
from tools.bench_kv import BenchError
from tools.bench_pause_rows import Shape, SizedEngine, SizedSource

BLOCK_TOKENS = 256

STEP_MS = 10
"""Of a decode step."""

MAX_TOKENS = 100_000
LIMIT_S = 300
LOOK_S = 0.002

T = TypeVar("T")


def settings_for(shape: Shape, state: Path) -> Settings:
    """As users have them, but for a model of this size, and no blocks in memory: what goes on is
    read from disk.
    """
    return load_settings(
        overrides={
            "model": "fake",
            "state": state,
            "memory.ceiling": "none",
            "kv.block_tokens": BLOCK_TOKENS,
            "kv.memory_bytes": 0,
            "kv.reserve_bytes": 0,
            "fake.step_ms": STEP_MS,
            "fake.turn_tokens": 0,
            "fake.context_tokens": 10 * MAX_TOKENS,
            "fake.weights_bytes": 10**9,
            "fake.kv_bytes_per_token": shape.bytes_per_token,
            "fake.state_bytes": shape.state_bytes,
        }
    )


class Server:
    """A run in its thread, without HTTP."""

    def __init__(self, settings: Settings, shape: Shape, rest_s: float) -> None:
        self.shape = shape
        self.rest_s = rest_s
        self.state_folder = settings.state
        journal = Journal.open(settings.state, durability=settings.journal.durability)
        recovered = recover(journal, settings.requests.max_lingering)
        source = SizedSource(shape, rest_s, settings.fake)
        self.run = Run(settings, source, journal, recovered)
        self.exit: Future[Exit] = Future()
        self.run.on_ended = self.ended
        threading.Thread(target=self.run.main, name="fermata-loop").start()

    def ended(self, outcome: Exit) -> None:
        """What was asked while the loop ended is answered. The loop's thread."""
        self.run.answer()
        self.exit.set_result(outcome)

    def ask(self, question: Callable[[SchedulerState], T]) -> T:
        """What the loop answers between two steps. Raises BenchError when it has ended."""
        answer: Future[T] = Future()
        try:
            self.run.ask(lambda state: answer.set_result(question(state)))
            return answer.result(LIMIT_S)
        except Ended as error:
            raise BenchError(f"the scheduler: {self.exit.result(LIMIT_S).message}") from error

    def wait_until(self, is_so: Callable[[SchedulerState], bool], what: str) -> None:
        """Returns when it is so. Raises BenchError when it never is."""
        end = time.monotonic() + LIMIT_S
        while not self.ask(is_so):
            if time.monotonic() > end:
                raise BenchError(f"{what}: not within {LIMIT_S} s")
            time.sleep(LOOK_S)

    @property
    def freeing_s(self) -> float:
        """How long the allocator took for the row that was dropped last."""
        assert isinstance(self.run.engine, SizedEngine), "the source made it"
        return self.run.engine.freeing_s

    def stop(self) -> Exit:
        """A stop at once: what is held stays so."""
        self.run.stop("the measurement is over")
        self.run.stop("the measurement is over")
        return self.exit.result(LIMIT_S)


@contextmanager
def serving(shape: Shape, state: Path, rest_s: float = 0.0) -> Iterator[Server]:
    """A server with a model that is loaded. Raises BenchError when it did not end well."""
    server = Server(settings_for(shape, state), shape, rest_s)
    try:
        server.wait_until(lambda state: state.engine_ready, "the model is loaded")
        yield server
    finally:
        outcome = server.stop()
    if outcome.status:
        raise BenchError(f"the scheduler: {outcome.message}")
