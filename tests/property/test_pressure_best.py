"""The best schedule of a few prompts: what it is in cases that can be counted by hand, and that the
scheduler never beats it.
"""

from random import Random

import pytest

from scheduler.simulation.cost import EngineCost
from scheduler.simulation.world import Asked, World
from tests.property.pressure_world import (
    CHUNK,
    ENGINE,
    WEIGHTS_BYTES,
    facts_of,
    hardware_of,
    play,
    room_for,
    settings_under,
)
from tools.bench_pressure_best import Problem, Prompt, floor_ns, least_ns

READS_WEIGHTS_ONLY = EngineCost(
    token_ns=10, attend_ps=0, weights_ns=1_000, read_ps=0, row_ns=0, copy_ns=0
)


def problem_of(*prompts: Prompt, ceiling_bytes: int, cost: EngineCost = ENGINE) -> Problem:
    return Problem(prompts, facts_of(), cost, ceiling_bytes, CHUNK)


def test_rows_that_fit_together_read_the_weights_once_for_all() -> None:
    two = (Prompt(101, 30), Prompt(101, 50))
    problem = problem_of(*two, ceiling_bytes=10**9, cost=READS_WEIGHTS_ONLY)
    fed_ns = 2 * 100 * 10  # one chunk each, and as long as the weights are read
    assert least_ns(problem)[0] == fed_ns + 50 * 1_000
    assert floor_ns(problem) == fed_ns + 50 * 1_000 - 2 * 101


def test_rows_that_fit_one_at_a_time_take_all_their_steps() -> None:
    two = (Prompt(101, 30), Prompt(101, 50))
    one_row_bytes = WEIGHTS_BYTES + 160 * 1_000 + CHUNK * 100
    problem = problem_of(*two, ceiling_bytes=one_row_bytes, cost=READS_WEIGHTS_ONLY)
    assert least_ns(problem)[0] == 2 * 100 * 10 + (30 + 50) * 1_000


@pytest.mark.parametrize("seed", range(6))
def test_the_scheduler_takes_no_less_than_the_best(seed: int) -> None:
    random = Random(seed)
    prompts = [Prompt(random.randint(100, 900), random.randint(1, 200)) for _ in range(3)]
    ceiling_bytes = room_for(1_500, num_rows=2)
    world = World(settings_under(ceiling_bytes), hardware_of(), seed=seed)
    play(world, [Asked(p.num_prompt_tokens, p.num_output_tokens) for p in prompts])
    problem = problem_of(*prompts, ceiling_bytes=ceiling_bytes)
    floor = floor_ns(problem)
    assert floor <= least_ns(problem)[0]
    assert floor <= max(world.ended_ns.values())
