"""A clean stop while blocks are still being written: what they hold is found at the next start."""

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from journal import events
from scheduler.kvcache.fileformat import Tensor
from scheduler.kvcache.naming import KeptFile
from scheduler.kvcache.store import BlockStore, Saved, SaveFailed
from scheduler.run import Exit, Run
from scheduler.service import Service
from scheduler.settings import Settings
from tests.integration.kv_serving import files_below, recorded, wait_for
from tests.loop_driver import arrival_of
from tests.run_driver import LIMIT_S, ready, serve, settings_in, whole

BLOCK_TOKENS = 16
NUM_BLOCKS = 12
TEXT = "x" * (NUM_BLOCKS * BLOCK_TOKENS + 1)


@pytest.fixture
def may_write(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, no writer begins with a file."""
    released = threading.Event()
    save = BlockStore.save

    def held(
        store: BlockStore, file: KeptFile, tensors: Mapping[str, Tensor]
    ) -> Saved | SaveFailed:
        assert released.wait(LIMIT_S)
        return save(store, file, tensors)

    monkeypatch.setattr(BlockStore, "save", held)
    yield released
    released.set()


def kv_settings(folder: Path, **overrides: object) -> Settings:
    return settings_in(folder, kv__block_tokens=BLOCK_TOKENS, kv__reserve_bytes=0, **overrides)


def wait_until_given_up(run: Run) -> None:
    """Returns once the loop takes no more steps, and nothing is left for the writers to begin."""
    assert run.kv is not None
    deadline = time.monotonic() + LIMIT_S
    while not run.closed or run.kv.writers.num_queued:
        assert time.monotonic() < deadline


async def answered(service: Service) -> None:
    """One request from start to end."""
    await ready(service)
    stream = service.submit(arrival_of(service.new_request_id(), TEXT, 4))
    assert (await whole(stream)).end is not None


def test_a_stop_waits_for_blocks_that_are_being_saved(
    state_folder: Path, may_write: threading.Event
) -> None:
    settings = kv_settings(state_folder)

    async def before(service: Service) -> None:
        await answered(service)
        service.stop("SIGTERM")
        await asyncio.to_thread(wait_for, state_folder, events.ServerStopping)
        may_write.set()
        assert await service.ended() == Exit(0)

    async def after(service: Service) -> None:
        await answered(service)

    assert serve(settings, before) == Exit(0)
    (planned,) = recorded(state_folder, events.BlockSavePlanned)
    saved = recorded(state_folder, events.BlockSaved)
    assert len(planned.blocks) == NUM_BLOCKS
    assert {event.hash for event in saved} == {block.hash for block in planned.blocks}
    assert serve(settings, after) == Exit(0)
    (restored,) = recorded(state_folder, events.ChainRestored, run_id=2)
    assert restored.num_disk_tokens == NUM_BLOCKS * BLOCK_TOKENS


@pytest.mark.parametrize("in_a_hurry", [True, False])
def test_a_stop_that_may_not_wait_leaves_nothing_behind(
    state_folder: Path, may_write: threading.Event, in_a_hurry: bool
) -> None:
    limit_ms = 600_000 if in_a_hurry else 1
    settings = kv_settings(state_folder, server__drain_limit_ms=limit_ms, server__hold_limit_ms=1)

    async def before(service: Service) -> None:
        await answered(service)
        service.stop("SIGTERM")
        if in_a_hurry:
            await asyncio.to_thread(wait_for, state_folder, events.ServerStopping)
            service.stop("SIGTERM")
        await asyncio.to_thread(wait_until_given_up, service._run)  # pyright: ignore[reportPrivateUsage]
        may_write.set()

    async def after(service: Service) -> None:
        await ready(service)

    assert serve(settings, before) == Exit(0)
    assert recorded(state_folder, events.BlockSaved) == []
    assert serve(settings, after) == Exit(0)
    assert files_below(state_folder) == []
