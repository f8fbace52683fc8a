"""Servers on the fake engine whose memory is read as a test wants it."""

import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from journal import events
from scheduler.engine.base import (
    EngineCommand,
    MemoryReading,
    MemoryReturned,
    ReclaimMemory,
    RunChunk,
)
from scheduler.engine.fake import FakeEngine, FakeSource
from scheduler.engine.fake_settings import FakeSettings
from scheduler.engine.model import ModelDescription
from tests.integration.http_server import TIMEOUT_S, RunningServer, running
from tests.integration.kv_serving import recorded

MB = 10**6
CEILING = 1000 * MB
GROUPS: dict[str, Any] = {
    "memory": {"ceiling": CEILING, "sample_ms": 10, "growth_tokens": 512},
    "kv": {"memory_bytes": 0, "reserve_bytes": 0},
    "scheduler": {"chunk_tokens": 64},
}
ASKED: dict[str, Any] = {
    "model": "default",
    "prompt": "a prompt of more than one block: " * 10,
    "ignore_eos": True,
    "seed": 3,
}
ACTIONS = (
    events.ReclaimStarted,
    events.TierShrunk,
    events.PauseStarted,
    events.KvDropped,
    events.EmergencyDeclared,
    events.RequestAborted,
)


@dataclass
class PressedEngine(FakeEngine):
    """`usages` are what the next readings come to, in bytes in use; after them it is `usage_bytes`,
    or what the engine itself uses where that is more. `kept_bytes` are in the allocator's cache
    until they are asked for. `seen` is released by each reading; no chunk is fed while `gate` is
    closed.
    """

    usages: deque[int] = field(default_factory=deque[int])
    usage_bytes: int = 0
    kept_bytes: int = 0
    num_readings: int = 0
    seen: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    gate: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.gate.set()

    def read_memory(self) -> MemoryReading:
        self.num_readings += 1
        self.seen.release()
        found = super().read_memory()
        used_bytes = self.usages.popleft() if self.usages else self.usage_bytes
        active_bytes = max(found.active_bytes, used_bytes)
        return MemoryReading(active_bytes, self.kept_bytes, active_bytes)

    def run_chunk(self, command: RunChunk) -> None:
        assert self.gate.wait(TIMEOUT_S)
        super().run_chunk(command)

    def obey(self, command: EngineCommand) -> None:
        if not isinstance(command, ReclaimMemory):
            super().obey(command)
            return
        freed_bytes, self.kept_bytes = self.kept_bytes, 0
        self.deliver(MemoryReturned(freed_bytes, self.read_memory().active_bytes, 0, 1))


class PressedSource(FakeSource):
    """The fake model on such an engine."""

    def __init__(self, step_ms: int) -> None:
        super().__init__(FakeSettings(step_ms=step_ms))
        self.made = threading.Event()

    def make_engine(self, description: ModelDescription, nonce: int) -> PressedEngine:
        self.engine = PressedEngine(description.facts, nonce, self.settings)
        self.made.set()
        return self.engine


@dataclass
class Pressed:
    """A server, its engine, and requests that are sent to it."""

    server: RunningServer
    source: PressedSource
    pool: ThreadPoolExecutor
    answers: list[Future[httpx.Response]] = field(default_factory=list[Future[httpx.Response]])

    @property
    def engine(self) -> PressedEngine:
        assert self.source.made.wait(TIMEOUT_S)
        return self.source.engine

    @property
    def folder(self) -> Path:
        return self.server.folder

    def send(self, max_tokens: int, **more: Any) -> Future[httpx.Response]:
        """A completion, sent from a thread of its own."""
        body = ASKED | {"max_tokens": max_tokens} | more
        return self.pool.submit(self.server.http.post, "/v1/completions", json=body)

    def two_rows(self, max_tokens: int) -> tuple[str, str]:
        """Two requests that decode, the older one first. `answers` are theirs."""
        for number, prompt in enumerate(("one prompt ", "another prompt "), 1):
            self.answers.append(self.send(max_tokens, prompt=prompt * 30))
            self.server.wait_for_phase("decoding", number)
        first, second = recorded(self.folder, events.RequestReceived)
        return first.request_id, second.request_id

    def wait_until(self, reached: Callable[[], bool]) -> None:
        """Returns once it is so."""
        self.server.wait_until(lambda _: reached())

    def wait_for_readings(self) -> None:
        """Returns once all scripted readings were taken, and what follows was recorded."""
        self.wait_until(lambda: not self.engine.usages)
        taken = self.num_readings()
        self.wait_until(lambda: self.num_readings() > taken + 4)

    def num_readings(self) -> int:
        """How often memory was read so far."""
        return self.engine.num_readings


@contextmanager
def pressed(folder: Path, step_ms: int = 5, **groups: Any) -> Iterator[Pressed]:
    """A server for a test."""
    source = PressedSource(step_ms)
    with (
        ThreadPoolExecutor(4) as pool,
        running(folder, source, **(GROUPS | groups)) as server,
    ):
        yield Pressed(server, source, pool)
