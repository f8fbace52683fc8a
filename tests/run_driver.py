"""Whole runs in their threads, with a coroutine as their HTTP side."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from scheduler.engine.fake import FakeEngine, FakeSource
from scheduler.engine.model import ModelDescription, ModelError
from scheduler.run import Exit
from scheduler.service import Service
from scheduler.settings import Settings
from scheduler.streams import RequestStream
from scheduler.wiring import build
from tests.loop_driver import settings_of

LIMIT_S = 20


@dataclass(frozen=True)
class ScriptedSource:
    """The fake model, with what a test wants to go wrong."""

    settings: Settings
    model_error: str | None = None
    load_error: str | None = None
    released: threading.Event | None = None
    caches: Literal["mlx", "fake"] = "fake"

    def describe(self) -> ModelDescription:
        if self.released is not None:
            assert self.released.wait(LIMIT_S)
        if self.model_error is not None:
            raise ModelError(self.model_error)
        return FakeSource(self.settings.fake).describe()

    def make_engine(self, description: ModelDescription, nonce: int) -> FakeEngine:
        del nonce
        return FakeEngine(description.facts, 1, self.settings.fake, load_error=self.load_error)


def serve(
    settings: Settings,
    talk: Callable[[Service], Awaitable[None]],
    source: ScriptedSource | None = None,
) -> Exit:
    """A run from start to end, with `talk` as its HTTP side; a stop follows it."""

    async def main() -> Exit:
        service = build(settings, source or ScriptedSource(settings))
        service.start()
        await talk(service)
        service.stop("the test is over")
        return await service.ended()

    async def limited() -> Exit:
        return await asyncio.wait_for(main(), LIMIT_S)

    return asyncio.run(limited())


def settings_in(folder: Path, **overrides: object) -> Settings:
    return settings_of(state=folder, **overrides)


async def ready(service: Service) -> None:
    """Waits until requests can be counted."""
    assert await service.served_model(LIMIT_S) is not None


async def whole(stream: RequestStream) -> RequestStream:
    """Reads a stream to its end or its cut."""
    while stream.end is None and not stream.cut:
        await stream.wait(len(stream.tokens), None)
    return stream
