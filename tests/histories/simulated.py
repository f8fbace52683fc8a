"""Pressure on simulated hardware: played again, each story gives the same journal.

The scheduler, its loop and the fake engine are those of a server; time, the disk and the memory
that something else takes are not.
"""

from collections.abc import Callable
from functools import partial

from journal import events
from scheduler.engine.fake_row import Failure
from scheduler.request import Phase
from scheduler.simulation.world import Asked, World, nothing
from tests.property.pressure_world import LIMIT_NS, S, hardware_of, room_for, settings_under

CEILING_BYTES = room_for(800, num_rows=2)
SECOND = f"req_{2:026}"
ROW = Asked(num_prompt_tokens=200, max_tokens=90)


def world_of(*requests: Asked, state_bytes: int = 0, **overrides: object) -> World:
    """A server that was asked this; it holds two rows of 400 tokens."""
    settings = settings_under(CEILING_BYTES, **overrides)
    world = World(settings, hardware_of(state_bytes), seed=1)
    for asked in requests:
        world.ask(asked)
    return world


def run(world: World) -> World:
    """Until nothing is left to happen."""
    world.run(LIMIT_NS)
    return world


def when(world: World, reached: Callable[[], bool], happen: Callable[[], None]) -> None:
    """Lets something happen at once, the first time that it is so after a step."""

    def look() -> None:
        if reached():
            world.watch = nothing
            world.timeline.at(world.timeline.now_ns, happen)

    world.watch = look


def is_in(world: World, phase: Phase) -> bool:
    """Whether one of the requests is there."""
    return any(request.phase is phase for request in world.state.requests.values())


def take_between(world: World, begin_s: int, end_s: int, permille: int = 500) -> None:
    """Something else takes so much of the ceiling, from one second to another."""
    num_bytes = CEILING_BYTES * permille // 1000
    world.plan(begin_s * S, partial(world.take_memory, num_bytes))
    world.plan(end_s * S, partial(world.take_memory, -num_bytes))


def keep_for_reuse(world: World) -> None:
    """Buffers of work that is over are in the allocator's cache."""
    world.engine.memory.take(CEILING_BYTES // 2)
    world.engine.memory.take(-(CEILING_BYTES // 2))


# Stories


def every_rung() -> World:
    """What the allocator keeps goes first, then blocks in memory, then a row is held and, over the
    emergency mark, the last one; when the memory comes back both go on.
    """
    world = world_of(ROW, ROW, kv__memory_bytes=100_000)
    world.plan(3 * S, partial(keep_for_reuse, world))
    take_between(world, 5, 9)
    return run(world)


def emergency_alone() -> World:
    """A row alone is dropped and computed again; the second time it is given up."""
    world = world_of(ROW)
    for begin_s in (2, 6):
        take_between(world, begin_s, begin_s + 2, permille=900)
    return run(world)


def disk_full_while_pausing() -> World:
    """The disk is full when the tail is written: its row is held with its tokens only, and the next
    one at once.
    """
    world = world_of(ROW, ROW, ROW, memory__reserve="chunk", memory__growth_tokens=1)
    when(world, lambda: is_in(world, Phase.PAUSING), world.fill_disk)
    take_between(world, 3, 6, permille=400)
    world.plan(8 * S, world.free_disk)
    return run(world)


def crash_while_pausing() -> World:
    """The process is killed while a tail is written; the next one finds the row waiting."""
    world = world_of(ROW, ROW, state_bytes=40_000)
    when(world, lambda: is_in(world, Phase.PAUSING), world.crash)
    take_between(world, 3, 5, permille=200)
    return run(world)


def crash_while_paused() -> World:
    """The process is killed while a request is held by hand; it stays held, and is let go later."""
    world = world_of(ROW, ROW, state_bytes=40_000)
    world.plan(2 * S, lambda: world.wish(events.HoldRequested(request_id=SECOND)))
    when(world, lambda: is_in(world, Phase.PAUSED), world.crash)
    world.plan(6 * S, lambda: world.wish(events.ReleaseRequested(request_id=SECOND)))
    return run(world)


def crowded_disk() -> World:
    """A prompt waits for blocks that another computes, a row fails and begins again, and what the
    disk has no room for leaves it.
    """
    shared = Asked(num_prompt_tokens=200, max_tokens=20, shares=160)
    later = Asked(num_prompt_tokens=180, max_tokens=10, at_ns=10 * S)
    world = world_of(ROW, shared, later, kv__await_ms=60_000, kv__max_bytes=300_000)
    world.engine.failures = [Failure(1, "decode", at=9)]
    return run(world)


STORIES: dict[str, Callable[[], World]] = {
    story.__name__: story
    for story in (
        every_rung,
        emergency_alone,
        disk_full_while_pausing,
        crash_while_pausing,
        crash_while_paused,
        crowded_disk,
    )
}
