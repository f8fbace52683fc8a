"""Which stories `fermata crash` plays: each point is ended at as often as wanted, or given up."""

from collections import Counter
from random import Random

import pytest

from tools.crash_child import End
from tools.crash_plan import ARMED, MIDDLE, MISSES, Planner, Tale, Told, parse_tale

POINTS = ("begin", MIDDLE, "rare", "again", "never")
COMES_TO = {
    "quick": ({"begin": 1, MIDDLE: 40}, {"begin": 1, MIDDLE: 9}),
    "thorough": ({"begin": 1, MIDDLE: 90, "rare": 2}, {"begin": 1, MIDDLE: 20, "again": 1}),
}
"""For each variant, how often its lives come to points: the first, and later ones."""


def played(tale: Tale) -> Told:
    """What would come of a story: a life is ended at the first of its ends that it comes to."""
    ends: list[End] = []
    passes: list[dict[str, int]] = []
    for number, life in enumerate((*tale.lives, ())):
        comes_to = COMES_TO[tale.variant][min(number, 1)]
        found = [end for end in life if end.number <= comes_to.get(end.point, 0)]
        passes.append(comes_to)
        if not found:
            break
        ends.append(Random(tale.seed).choice(found))
    return Told(tale, tuple(ends), tuple(passes), (), 1.0 if tale.variant == "quick" else 2.0)


def all_played(planner: Planner) -> list[Told]:
    """Stories until the planner wants no more."""
    told: list[Told] = []
    while (tale := planner.next()) is not None:
        told.append(played(tale))
        planner.take(told[-1])
        assert len(told) < 500, "it goes on for ever"
    return told


@pytest.mark.parametrize("looks_first", [True, False])
def test_each_point_is_ended_at_with_as_many_seeds_as_wanted(looks_first: bool) -> None:
    planner = Planner(POINTS, 5, 1, list(COMES_TO), looks_first=looks_first)
    told = all_played(planner)
    seeds = {point: set[int]() for point in POINTS}
    for each in told:
        for end in each.ends:
            seeds[end.point].add(each.tale.seed)
    assert {point for point in POINTS if len(seeds[point]) < 5} == {"never"}
    assert len({each.tale.seed for each in told}) == len(told)
    assert planner.ends == Counter({point: len(found) for point, found in seeds.items() if found})


def test_a_point_that_is_known_and_always_missed_is_given_up() -> None:
    planner = Planner((MIDDLE,), 3, 1, ["quick"])
    planner.take(Told(Tale("quick", 0), (), ({MIDDLE: 5},), (), 1.0))
    drawn: list[Tale] = []
    while (tale := planner.next()) is not None:
        drawn.append(tale)
        planner.take(Told(tale, (), ({},), (), 1.0))
    assert 3 + MISSES <= len(drawn) <= 3 + MISSES + 1
    assert planner.ends[MIDDLE] == 0


def test_stories_beside_each_other_aim_at_different_points() -> None:
    planner = Planner(("rare", "begin"), 1, 1, ["thorough"])
    looks = planner.next()
    assert looks is not None
    planner.take(played(looks))
    planner.next()
    planner.next()
    assert sorted(planner.aims.values()) == ["begin", "rare"]
    assert planner.next() is not None, "a story may miss what it aims at"


def test_the_same_seed_draws_the_same_stories() -> None:
    drawn = [[t.tale for t in all_played(Planner(POINTS, 2, 7, list(COMES_TO)))] for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert all(len(life) <= ARMED for tale in drawn[0] for life in tale.lives)


def test_a_story_is_told_as_it_happened() -> None:
    tale = Tale("quick", 12, ((End("work", 3), End("begin", 1)), (End("again", 1),)))
    told = Told(tale, (End("work", 3), End("again", 1)), (), (), 0.5)
    assert str(told) == "quick:12:work@3+again@1"
    assert parse_tale(str(told)) == Tale("quick", 12, ((End("work", 3),), (End("again", 1),)))
    assert parse_tale("quick:1:") == Tale("quick", 1)


@pytest.mark.parametrize("text", ["", "quick", "quick:x:", "quick:1:work", "quick:1:work@x"])
def test_what_tells_no_story_is_refused(text: str) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        parse_tale(text)
