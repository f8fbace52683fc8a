"""A small machine under pressure, in virtual time, and what must hold at the end of each story."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from journal import events
from scheduler.settings import Settings
from scheduler.simulation.checks import check_end
from scheduler.simulation.models import (
    SMALL_BLOCK,
    SMALL_CHUNK,
    SMALL_ENGINE,
    SMALL_TOKEN_BYTES,
    SMALL_TRANSIENT_BYTES,
    SMALL_WEIGHTS_BYTES,
    small_ceiling,
    small_machine,
    small_model,
    small_settings,
)
from scheduler.simulation.world import Asked, Hardware, World

S = 1_000_000_000
LIMIT_NS = 3_600 * S
BLOCK = SMALL_BLOCK
TOKEN_BYTES = SMALL_TOKEN_BYTES
WEIGHTS_BYTES = SMALL_WEIGHTS_BYTES
CHUNK = SMALL_CHUNK
TRANSIENT_BYTES = SMALL_TRANSIENT_BYTES
ENGINE = SMALL_ENGINE

facts_of = small_model


def hardware_of(state_bytes: int = 0) -> Hardware:
    return small_machine(state_bytes)


def room_for(num_tokens: int, state_bytes: int = 0, num_rows: int = 1) -> int:
    """A ceiling under which rows of so many tokens together stay below the low mark."""
    return small_ceiling(num_tokens, state_bytes, num_rows)


def settings_under(ceiling_bytes: int, **overrides: object) -> Settings:
    """Settings of a small server below this ceiling, which keeps nothing in memory."""
    return small_settings(ceiling_bytes, **overrides)


def play(world: World, requests: Sequence[Asked]) -> World:
    """Asks all of it, and goes on until nothing is left to do."""
    for asked in requests:
        world.ask(asked)
    world.run(LIMIT_NS)
    return world


def assert_ended_well(world: World) -> None:
    """Each request that was taken has ended, with the tokens that it would have got undisturbed;
    nothing is left of any; and every step is decided the same again.
    """
    check_end(world)


# Stories


@dataclass(frozen=True)
class Story:
    """A world, what is asked of it, and whether something else takes its memory."""

    world: World
    requests: list[Asked]
    is_robbed: bool


def story_of(seed: int) -> Story:
    """A crowded server: rows that are let in by what they have, crashes, wishes, lost memory."""
    random = Random(seed)
    state_bytes = random.choice((0, 0, 40_000))
    most_tokens = random.randint(60, 500)
    num_rows = random.randint(2, 4)
    most_room = (most_tokens + 200) * num_rows * random.randint(4, 7) // 8
    settings = settings_under(
        room_for(max(most_tokens + 400, most_room), state_bytes, num_rows),
        kv__memory_bytes=random.choice((0, 200_000)),
        kv__writing_bytes=random.choice((50_000, 400_000)),
        kv__max_bytes=random.choice((10**9, 10**9, 3_000_000)),
        kv__await_ms=random.choice((0, 500, 60_000)),
        memory__reserve=random.choice(("bound", "expected", "chunk", "chunk")),
        memory__growth_tokens=random.choice((1, 16, 256)),
        memory__min_progress_tokens=random.choice((1, 16, 64)),
        scheduler__max_rows=random.randint(1, 6),
        requests__max_deaths=100,
        fake__turn_tokens=random.randint(50, 300),
    )
    race = random.choice((0, 30, 80))
    world = World(settings, hardware_of(state_bytes), seed=seed, race=race)
    requests = prompts_of(random, random.randint(3, 7), most_tokens)
    if random.random() < 0.4:
        crash_often(world, random)
    if random.random() < 0.4:
        wish_for(world, random, len(requests))
    if random.random() < 0.3:
        trouble(world, random)
    is_robbed = random.random() < 0.4
    if is_robbed:
        rob(world, random)
    return Story(world, requests, is_robbed)


def prompts_of(random: Random, num_requests: int, most_tokens: int) -> list[Asked]:
    """Requests of any size up to a bound, which come at once or in the first 20 seconds."""
    within_ns = random.choice((1, 20 * S))
    return [
        Asked(
            num_prompt_tokens=random.randint(1, most_tokens),
            max_tokens=random.randint(20, 350),
            at_ns=random.randrange(within_ns),
            ends_turn=random.random() < 0.3,
            shares=random.choice((0, 0, BLOCK * random.randint(1, 20))),
        )
        for _ in range(num_requests)
    ]


def crash_often(world: World, random: Random) -> None:
    for _ in range(random.randint(1, 4)):
        world.plan(random.randrange(100 * S), world.crash)


def trouble(world: World, random: Random) -> None:
    """The disk is full for some seconds, and loses files."""
    for _ in range(random.randint(1, 3)):
        begin_ns = random.randrange(60 * S)
        world.plan(begin_ns, world.fill_disk)
        world.plan(begin_ns + random.randrange(20 * S), world.free_disk)
    for _ in range(random.randint(0, 6)):
        which = random.randrange(1_000)
        world.plan(random.randrange(60 * S), partial(world.lose_file, which))


def rob(world: World, random: Random) -> None:
    """Something else takes up to half of the memory for a few seconds, a few times."""
    ceiling_bytes = world.settings.memory.ceiling
    assert isinstance(ceiling_bytes, int)
    for _ in range(random.randint(1, 6)):
        begin_ns, num_bytes = random.randrange(80 * S), random.randrange(ceiling_bytes // 2)
        world.plan(begin_ns, partial(world.take_memory, num_bytes))
        end_ns = begin_ns + random.randrange(5 * S)
        world.plan(end_ns, partial(world.take_memory, -num_bytes))


def wish_for(world: World, random: Random, num_requests: int) -> None:
    """Operators hold requests, and release all of them now and then; clients leave and cancel."""
    ids = [f"req_{number + 1:026}" for number in range(num_requests)]
    hold, cancel, leave = events.HoldRequested, events.CancelRequested, events.ClientGone
    for _ in range(random.randint(1, 8)):
        kind = random.choice((hold, hold, hold, cancel, leave))
        wish = partial(world.wish, kind(request_id=random.choice(ids)))
        world.plan(random.randrange(80 * S), wish)
    for at_ns in (30 * S, 60 * S, 100 * S):
        for request_id in ids:
            release = events.ReleaseRequested(request_id=request_id)
            world.plan(at_ns, partial(world.wish, release))
