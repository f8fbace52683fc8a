"""Whole servers with clients that leave, come back and ask again, while processes die, disks fail
and memory is short: everybody ends, and nobody is told anything that changes.
"""

import pytest

from scheduler.simulation import stories
from scheduler.simulation.happenings import Happening
from scheduler.simulation.models import small_machine, small_settings
from scheduler.simulation.scenario import to_text
from scheduler.simulation.seeds import story_of
from scheduler.simulation.shrinking import shrink
from scheduler.simulation.stories import Story, play, tell
from scheduler.simulation.world import Stuck, World

SEEDS = (*range(60), 65, 102, 112, 282, 563)
"""The later ones meet what the first do not, and failed once (563)."""


@pytest.mark.parametrize("seed", SEEDS)
def test_whatever_happens_everybody_ends_and_nothing_is_lost(seed: int) -> None:
    story = story_of(seed)
    print(to_text(story))  # for whoever looks for what has failed
    world = play(story)
    assert all(client.over for client in world.clients)
    assert not world.state.requests


def test_a_story_is_played_the_same_each_time() -> None:
    first, second = (list(play(story_of(3)).journal.read()) for _ in range(2))
    assert [(r.at_ns, r.event) for r in first] == [(r.at_ns, r.event) for r in second]


def test_a_server_that_only_spins_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(small_settings(2_000_000), small_machine())
    monkeypatch.setattr(world, "turn", lambda: True)
    with pytest.raises(Stuck, match="time stands still"):
        world.run(1)


def test_a_failing_story_is_made_as_small_as_it_can_be() -> None:
    story = next(s for s in map(story_of, range(500)) if len(kinds_of(s)) > 5)
    wanted = kinds_of(story)[2]

    def fails(smaller: Story) -> bool:
        return wanted in kinds_of(smaller) and len(smaller.visits) > 0

    smallest = shrink(story, fails)
    assert kinds_of(smallest) == [wanted]
    assert len(smallest.visits) == 1
    assert not smallest.settings


def kinds_of(story: Story) -> list[str]:
    return sorted({happening.kind for happening in story.happenings})


def test_what_does_not_hold_is_a_failure_and_not_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_end(world: World) -> None:
        raise AssertionError(f"{len(world.clients)} clients")

    monkeypatch.setattr(stories, "check_end", check_end)
    story = Story(seed=1, ceiling_bytes=2_000_000, visits=story_of(1).visits[:1])
    told = tell(story)
    assert told.failure == "AssertionError: 1 clients"
    assert told.place.endswith(" check_end")
    assert told.num_steps > 0
    crash = Happening(at_ms=1, kind="crash", word="no such thing")
    monkeypatch.undo()
    assert not tell(Story(seed=1, ceiling_bytes=2_000_000, happenings=(crash,))).failure
