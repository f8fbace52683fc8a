"""Stories: what is asked of a simulated server and what happens to it, drawn from a seed.

A story is data. It can be written down, and made smaller while it still fails.
"""

from dataclasses import dataclass, field
from random import Random

from scheduler.request import IllegalTransition
from scheduler.settings import NS_PER_S
from scheduler.simulation.checks import check_end
from scheduler.simulation.clients import Asked, Habits
from scheduler.simulation.happenings import Happening, plan
from scheduler.simulation.models import (
    SMALL_BLOCK,
    small_ceiling,
    small_machine,
    small_settings,
)
from scheduler.simulation.world import Stuck, World

LIMIT_NS = 3 * 3_600 * NS_PER_S
"""Virtual time after which a story must be over."""

SPAN_MS = 20_000
"""In which things happen."""

FAILURES = (
    AssertionError,
    AttributeError,
    IllegalTransition,
    LookupError,
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


def play(story: Story) -> World:
    """The story to its end, with all that must hold in it and then. Raises what does not hold:
    AssertionError, Stuck, or an error of the core.
    """
    world = begin(story)
    world.run(LIMIT_NS)
    check_end(world)
    return world


def failure_of(story: Story) -> str:
    """What does not hold in this story, in one line; empty when all of it does."""
    try:
        play(story)
    except FAILURES as error:
        return f"{type(error).__name__}: {error}"
    return ""


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


# By a seed


def story_of(seed: int) -> Story:
    """A small crowded server, whose clients leave and come back, and to which things happen."""
    random = Random(seed)
    state_bytes = random.choice((0, 0, 40_000))
    most_tokens = random.randint(30, 200)
    num_rows = random.randint(1, 3)
    room_tokens = max(most_tokens + 170, (most_tokens + 100) * num_rows * random.randint(4, 8) // 8)
    ceiling_bytes = small_ceiling(room_tokens, state_bytes, num_rows)
    return Story(
        seed=seed,
        ceiling_bytes=ceiling_bytes,
        state_bytes=state_bytes,
        race=random.choice((0, 30, 80)),
        lag=random.choice((0, 0, 5, 40)),
        settings=settings_of(random),
        visits=tuple(visits_of(random, most_tokens)),
        happenings=tuple(happenings_of(random, ceiling_bytes)),
    )


def settings_of(random: Random) -> dict[str, object]:
    """Settings that lead to different decisions."""
    return {
        "kv__memory_bytes": random.choice((0, 60_000)),
        "kv__writing_bytes": random.choice((50_000, 400_000)),
        "kv__max_bytes": random.choice((10**9, 10**9, 400_000)),
        "kv__await_ms": random.choice((0, 500, 60_000)),
        "memory__reserve": random.choice(("bound", "expected", "chunk", "chunk")),
        "memory__growth_tokens": random.choice((1, 16, 256)),
        "memory__min_progress_tokens": random.choice((1, 16)),
        "scheduler__max_rows": random.randint(1, 6),
        "journal__durability": random.choice(("process", "power")),
        "journal__snapshot_events": random.choice((100, 300, 50_000)),
        "requests__max_deaths": random.choice((2, 100)),
        "requests__orphan_grace_s": random.choice((0, 2, 10, 60)),
        "requests__restart_grace_s": random.choice((5, 60)),
        "requests__retention_s": random.choice((5, 3_600)),
        "requests__on_restart": random.choice(("resume", "resume", "resume", "hold", "cancel")),
        "requests__max_lingering": random.choice((0, 256)),
        "requests__max_age_s": random.choice((0, 0, 0, 15)),
        "server__drain_limit_ms": random.choice((0, 500, 3_000)),
        "server__hold_limit_ms": random.choice((100, 5_000)),
        "fake__turn_tokens": random.randint(20, 100),
    }


def visits_of(random: Random, most_tokens: int) -> list[Visit]:
    """Clients, some of which ask the same as others."""
    within_ms = random.choice((1, SPAN_MS // 2))
    visits: list[Visit] = []
    for _ in range(random.randint(2, 6)):
        asked = Asked(
            num_prompt_tokens=random.randint(1, most_tokens),
            max_tokens=random.choice((random.randint(1, 40), random.randint(40, 160))),
            at_ns=random.randrange(within_ms) * 1_000_000,
            ends_turn=random.random() < 0.3,
            shares=random.choice((0, 0, SMALL_BLOCK * random.randint(1, 8))),
        )
        visits.append(Visit(asked, habits_of(random, len(visits) + 1)))
        while random.random() < 0.25:
            visits.append(twin_of(random, visits[-1]))
    return visits


def habits_of(random: Random, content: int) -> Habits:
    """How one client behaves."""
    return Habits(
        content=content,
        key=content if random.random() < 0.3 else 0,
        leaves_at_tokens=tuple(random.randint(1, 60) for _ in range(random.choice((0, 0, 1, 3)))),
        leaves_ns=tuple(
            random.randrange(SPAN_MS) * 1_000_000 for _ in range(random.choice((0, 0, 1, 2)))
        ),
        returns=random.choice(("attach", "resend", "resend", "never")),
        back_ns=random.choice((0, 10, 700, 3_000, 15_000)) * 1_000_000,
        patience_ns=random.choice((0, 0, 0, 4, 30)) * NS_PER_S,
        tries=random.choice((3, 30)),
        cancels_at_tokens=random.choice((-1, -1, -1, -1, random.randint(1, 30))),
    )


def twin_of(random: Random, other: Visit) -> Visit:
    """Another client that asks the same, or uses the same key for something else."""
    asked, habits = other.asked, habits_of(random, other.habits.content)
    at_ns = asked.at_ns + random.choice((0, 1, 5_000)) * 1_000_000
    content = habits.content if random.random() < 0.9 else habits.content + 100
    twin = Asked(
        num_prompt_tokens=asked.num_prompt_tokens,
        max_tokens=asked.max_tokens,
        at_ns=at_ns,
        ends_turn=asked.ends_turn,
        shares=asked.shares,
    )
    return Visit(
        twin,
        Habits(
            content=content,
            key=other.habits.key if random.random() < 0.8 else 0,
            leaves_at_tokens=habits.leaves_at_tokens,
            leaves_ns=habits.leaves_ns,
            returns=habits.returns,
            back_ns=habits.back_ns,
            tries=habits.tries,
        ),
    )


POINTS = (
    *(
        f"commit.{when}.{kind}"
        for when in ("before", "after")
        for kind in (
            "batch_changed",
            "block_saved",
            "blocks_evicted",
            "chain_pinned",
            "chain_restored",
            "chain_saved",
            "chain_unpinned",
            "client_attached",
            "client_gone",
            "drain_ended",
            "engine_ready",
            "kv_freed",
            "memory_sampled",
            "pause_started",
            "prefill_chunk_committed",
            "request_admitted",
            "request_adopted",
            "request_cancelled",
            "request_finished",
            "request_received",
            "request_resumed",
            "resume_started",
            "server_started",
            "server_stopping",
            "tail_save_planned",
            "tokens_decoded",
        )
    ),
    *(
        f"effect.after.{kind}"
        for kind in ("accept_request", "drop_row", "end_request", "remove_files", "save_tail")
    ),
    "hub.flush.before",
    "hub.flush.after",
    "step.done",
    "recovery.state",
    "recovery.done",
    "recovery.started",
)
"""Where a process may be killed."""


def happenings_of(random: Random, ceiling_bytes: int) -> list[Happening]:
    """A few things that happen; in most stories they are of few kinds."""
    kinds = random.sample(sorted(DRAWS), k=random.randint(0, 7))
    often = [kind for kind in kinds for _ in range(random.choice((1, 1, 2, 4)))]
    often += ["mark"] * random.choice((0, 0, 1, 3))
    found = [draw(random, kind, ceiling_bytes) for kind in often]
    return sorted(found, key=lambda happening: happening.at_ms)


LASTING_MS = (50, 1_000, 6_000)
NEXT = ("", "", "", "resume", "hold", "cancel", "other model")
DOWN_MS = (0, 0, 300, 4_000)

DRAWS = {
    "crash": (DOWN_MS, NEXT, (0,)),
    "power": (DOWN_MS, NEXT, (0,)),
    "stop": (DOWN_MS, NEXT, (0, 20, 2_000)),
    "mark": (tuple(range(1, 8)), POINTS, (0,)),
    "full disk": ((0,), ("",), LASTING_MS),
    "broken disk": ((0,), ("",), LASTING_MS),
    "broken reads": ((0,), ("",), LASTING_MS),
    "slow disk": ((3, 20), ("",), LASTING_MS),
    "damage": (tuple(range(100)), ("missing", "cut", "corrupt"), (0,)),
    "memory": ((200, 500, 900), ("",), LASTING_MS),
    "reuse": ((300, 800), ("",), (0,)),
    "full journal": ((0,), ("",), LASTING_MS),
    "clock": ((-20_000, -1_000, 3_000, 100_000), ("",), (0,)),
    "hold": (tuple(range(7)), ("",), LASTING_MS),
    "cancel": (tuple(range(7)), ("",), (0,)),
    "clear": ((0,), ("",), (0,)),
    "fail": (tuple(range(7)), ("",), (0,)),
}
"""The numbers, words and lengths in ms that each may have. Memory is in thousandths of the ceiling.
"""


def draw(random: Random, kind: str, ceiling_bytes: int) -> Happening:
    """One thing of this kind."""
    numbers, words, lengths = DRAWS[kind]
    number = random.choice(numbers)
    if kind in ("memory", "reuse"):
        number = number * ceiling_bytes // 1000
    return Happening(
        at_ms=random.randrange(SPAN_MS),
        kind=kind,
        number=number,
        word=random.choice(words),
        lasts_ms=random.choice(lengths),
    )
