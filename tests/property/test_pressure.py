"""Whole servers under memory pressure, in virtual time: everybody ends, exactly."""

import pytest

from tests.property.pressure_world import assert_ended_well, play, story_of

FAILED_ONCE = (143, 325)
"""A row's chain is restored in the step in which an emergency would hold it, alone."""

SEEDS = (*range(20), *FAILED_ONCE)


@pytest.mark.parametrize("seed", SEEDS)
def test_every_request_ends_whatever_happens(seed: int) -> None:
    story = story_of(seed)
    world = play(story.world, story.requests)
    assert_ended_well(world)
    assert story.is_robbed or world.records["RequestAborted"] == 0
