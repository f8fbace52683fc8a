"""Pressure on simulated hardware: played again, each story gives the same journal.

The scheduler, its loop and the fake engine are those of a server; time, the disk and the memory
that something else takes are not.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from journal import events
from scheduler.engine.fake_row import Failure
from scheduler.request import Phase
from scheduler.simulation.clients import Habits
from scheduler.simulation.world import Asked, World, nothing
from tests.property.pressure_world import LIMIT_NS, S, hardware_of, room_for, settings_under

CEILING_BYTES = room_for(800, num_rows=2)
SECOND = f"req_{2:026}"
ROW = Asked(num_prompt_tokens=200, max_tokens=90)
SHORT_ROW = Asked(num_prompt_tokens=40, max_tokens=30)


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


def clients_come_back() -> World:
    """One whose connection is lost asks again, and adopts its request; another does so by its key,
    twice, once after its end. An equal one that has its client is left alone, one comes back by its
    position, and for one nobody comes.
    """
    world = world_of(requests__orphan_grace_s=8)
    again = Habits(content=1, leaves_at_tokens=(5,), returns="resend", back_ns=2 * S)
    for asked, habits in (
        (SHORT_ROW, again),
        (replace(SHORT_ROW, at_ns=S), Habits(content=1)),
        (SHORT_ROW, replace(again, content=2, key=2)),
        (replace(SHORT_ROW, at_ns=20 * S), Habits(content=2, key=2)),
        (replace(SHORT_ROW, at_ns=21 * S), Habits(content=3, key=2)),
        (SHORT_ROW, Habits(content=4, leaves_at_tokens=(5,), returns="attach", back_ns=3 * S)),
        (
            replace(SHORT_ROW, at_ns=2 * S),
            Habits(content=5, leaves_at_tokens=(1,), returns="never"),
        ),
    ):
        world.ask(asked, habits)
    return run(world)


def found_by_starts() -> World:
    """The process dies three times, each time with three requests: one whose client sends it again,
    one that an operator lets go on, and one for which nobody comes. The first start lets them run
    on, so that the first is finished when it is sent again; the second holds them; the third ends
    them.
    """
    world = world_of(requests__restart_grace_s=15)
    for number, (at_s, on_restart) in enumerate(((2, "resume"), (40, "hold"), (80, "cancel"))):
        asked = replace(SHORT_ROW, at_ns=(at_s - 1) * S)
        back_ns = (12 if on_restart == "resume" else 4) * S
        world.ask(asked, Habits(content=number + 1, returns="resend", back_ns=back_ns))
        released = world.ask(asked, Habits(returns="never"))
        world.ask(asked, Habits(returns="never"))
        world.plan(at_s * S, partial(start_with, world, on_restart))
        release = events.ReleaseRequested(request_id=released)
        world.plan((at_s + 2) * S, partial(world.wish, release))
    return run(world)


def start_with(world: World, on_restart: str) -> None:
    """The process is killed, and the next one is told so."""
    requests = world.settings.requests.model_copy(update={"on_restart": on_restart})
    world.settings = world.settings.model_copy(update={"requests": requests})
    world.crash()


def drained() -> World:
    """A stop: what does not finish in time is held, and goes on at the next start."""
    world = world_of(server__drain_limit_ms=500, state_bytes=40_000)
    for number in range(3):
        asked = replace(SHORT_ROW, max_tokens=(10, 60, 40)[number], at_ns=number * 100_000_000)
        world.ask(asked, Habits(content=number + 1, returns="attach", back_ns=S))
    world.plan(2 * S, world.stop)
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
        clients_come_back,
        found_by_starts,
        drained,
    )
}
