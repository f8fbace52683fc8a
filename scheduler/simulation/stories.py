"""Stories: what is asked of a simulated server, and what happens to it.

A story is data. It can be written down, and made smaller while it still fails.
"""

import traceback
from dataclasses import dataclass, field

from scheduler.request import IllegalTransition
from scheduler.settings import NS_PER_S
from scheduler.simulation.checks import check_end
from scheduler.simulation.clients import Asked, Habits
from scheduler.simulation.happenings import Happening, plan
from scheduler.simulation.models import small_machine, small_settings
from scheduler.simulation.world import Stuck, World

LIMIT_NS = 3 * 3_600 * NS_PER_S
"""Virtual time after which a story must be over."""

FAILURES = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    IllegalTransition,
    LookupError,
    RuntimeError,
    Stuck,
    TypeError,
    ValueError,
)
"""How what does not hold is raised: by checks, and by code that meets what cannot be."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A client: what it asks, and how it behaves."""

    asked: Asked
    habits: Habits


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """Everything that a simulation depends on."""

    seed: int
    ceiling_bytes: int
    state_bytes: int = 0
    race: int = 0
    lag: int = 0
    settings: dict[str, object] = field(default_factory=dict[str, object])
    visits: tuple[Visit, ...] = ()
    happenings: tuple[Happening, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What came of a story. `failure` says in one line what does not hold, `place` where that was
    noticed; both are empty when all of it does. `met` counts the situations of `coverage`.
    """

    failure: str = ""
    place: str = ""
    num_steps: int = 0
    met: dict[str, int] = field(default_factory=dict[str, int])


def play(story: Story) -> World:
    """The story to its end, with all that must hold in it and then. Raises what does not hold:
    AssertionError, Stuck, or an error of the core.
    """
    world = begin(story)
    finish(world)
    return world


def finish(world: World) -> None:
    """As `play`, of a world in which nothing has happened yet."""
    world.run(LIMIT_NS)
    check_end(world)


def tell(story: Story) -> Told:
    """Plays a story, and says what came of it."""
    world: World | None = None
    failure = place = ""
    try:
        world = begin(story)
        finish(world)
    except FAILURES as error:
        failure = " ".join(f"{type(error).__name__}: {error}".split())
        place = place_of(error)
    if world is None:
        return Told(failure=failure, place=place)
    return Told(failure=failure, place=place, num_steps=world.num_steps, met=dict(world.coverage))


def place_of(error: Exception) -> str:
    """Where something was found not to hold: in the function that required it."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.name != "require"]
    file = frames[-1].filename.replace("\\", "/").rpartition("/")[2]
    return f"{file}:{frames[-1].lineno} {frames[-1].name}"


def begin(story: Story) -> World:
    """The world of a story, in which nothing has happened yet."""
    settings = small_settings(story.ceiling_bytes, **story.settings)
    hardware = small_machine(story.state_bytes)
    world = World(settings, hardware, seed=story.seed, race=story.race, lag=story.lag)
    world.disk.jitter = world.random
    for visit in story.visits:
        world.ask(visit.asked, visit.habits)
    for happening in story.happenings:
        plan(world, happening)
    last_ms = max((h.at_ms + h.lasts_ms for h in story.happenings), default=0)
    plan(world, Happening(at_ms=last_ms + 1_000, kind="settle"))
    for later_ms in (10_000, 60_000, 200_000):
        plan(world, Happening(at_ms=last_ms + later_ms, kind="let go"))
    return world
