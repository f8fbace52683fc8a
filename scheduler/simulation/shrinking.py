"""A story that fails, made smaller while it still fails."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from scheduler.simulation.clients import Habits
from scheduler.simulation.stories import Story

MAX_TRIES = 400
"""Smaller stories that are played at most."""

T = TypeVar("T")


def shrink(story: Story, fails: Callable[[Story], bool]) -> Story:
    """The smallest story found that still fails: it lacks what the failure does not need."""
    num_tries = 0
    is_smaller = True
    while is_smaller:
        is_smaller = False
        for smaller in smaller_ones(story):
            num_tries += 1
            if num_tries > MAX_TRIES:
                return story
            if fails(smaller):
                story, is_smaller = smaller, True
                break
    return story


def smaller_ones(story: Story) -> Iterator[Story]:
    """The story with less in it, much less first: without some clients, or some of what happens;
    with plainer clients; with settings as they are by themselves; without races.
    """
    for happenings in without_some(story.happenings):
        yield replace(story, happenings=happenings)
    for visits in without_some(story.visits):
        yield replace(story, visits=visits)
    for number, visit in enumerate(story.visits):
        plain = replace(visit, habits=Habits(content=visit.habits.content))
        if plain != visit:
            visits = (*story.visits[:number], plain, *story.visits[number + 1 :])
            yield replace(story, visits=visits)
    for name in story.settings:
        settings = {key: value for key, value in story.settings.items() if key != name}
        yield replace(story, settings=settings)
    for name in ("race", "lag"):
        if getattr(story, name):
            yield replace(story, **{name: 0})


def without_some(things: Sequence[T]) -> Iterator[tuple[T, ...]]:
    """Without all of them, a half, a quarter, and so on, down to one."""
    size = len(things)
    while size:
        for begin in range(0, len(things), size):
            yield (*things[:begin], *things[begin + size :])
        size //= 2
