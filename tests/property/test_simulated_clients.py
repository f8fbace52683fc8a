"""Whole servers with clients that leave, come back and ask again, while processes die, disks fail
and memory is short: everybody ends, and nobody is told anything that changes.
"""

import pytest

from scheduler.simulation.stories import play, story_of


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_everybody_ends_and_nothing_is_lost(seed: int) -> None:
    world = play(story_of(seed))
    assert all(client.over for client in world.clients)
    assert not world.state.requests
