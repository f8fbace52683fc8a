"""Whole servers under memory pressure, in virtual time: everybody ends, exactly."""

from random import Random

import pytest

from scheduler.simulation.world import World
from tests.property.pressure_world import (
    S,
    assert_ended_well,
    hardware_of,
    play,
    prompts_of,
    room_for,
    settings_under,
)


@pytest.mark.parametrize("seed", range(24))
def test_every_request_ends_whatever_the_workload(seed: int) -> None:
    random = Random(seed)
    state_bytes = random.choice((0, 0, 40_000))
    most_tokens = random.randint(100, 1_500)
    num_rows = random.randint(1, 4)
    settings = settings_under(
        room_for(most_tokens * num_rows * 3 // 4 + 300, state_bytes, num_rows),
        kv__memory_bytes=random.choice((0, 200_000)),
        scheduler__max_rows=random.randint(1, 6),
        fake__turn_tokens=random.randint(10, 150),
    )
    world = World(settings, hardware_of(state_bytes), seed=seed, race=random.choice((0, 30)))
    if seed % 3 == 0:
        for _ in range(3):
            world.plan(random.randrange(100 * S), world.crash)
    play(world, prompts_of(random, random.randint(2, 9), most_tokens))
    assert_ended_well(world)
