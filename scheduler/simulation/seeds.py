"""Stories drawn from seeds: small crowded servers, whose clients leave and come back, and to which
things happen.
"""

from collections.abc import Iterable
from dataclasses import replace
from random import Random

from scheduler.settings import NS_PER_S
from scheduler.simulation.clients import Asked, Habits
from scheduler.simulation.happenings import Happening
from scheduler.simulation.models import SMALL_BLOCK, small_ceiling
from scheduler.simulation.stories import Story, Visit

SPAN_MS = 20_000
"""In which things happen."""

CROWD_MS = 8_000
"""In which a crowd has not dissolved yet."""

CROWDED = 4
"""One story of so many is one in which memory is short from its start."""


def story_of(seed: int) -> Story:
    """The story of a seed, the same for ever."""
    random = Random(seed)
    return crowd_of(seed, random) if seed % CROWDED == 1 else mixture_of(seed, random)


def crowd_of(seed: int, random: Random) -> Story:
    """More requests than memory has room for, whose rows grow beyond what was reserved for them, so
    that some are held and go on all the time; and others use memory too.
    """
    state_bytes = random.choice((0, 0, 40_000))
    room_tokens = random.randint(280, 420)
    ceiling_bytes = small_ceiling(room_tokens, state_bytes, num_rows=3)
    settings = settings_of(random) | {
        "memory__reserve": "chunk",
        "memory__pause": random.random() < 0.9,
        "memory__min_progress_tokens": 64,
        "scheduler__max_rows": random.randint(4, 8),
        "scheduler__chunk_tokens": random.choice((16, 32)),
        "requests__max_age_s": 0,
    }
    return Story(
        seed=seed,
        ceiling_bytes=ceiling_bytes,
        state_bytes=state_bytes,
        race=random.choice((0, 30, 80)),
        settings=settings,
        visits=tuple(crowd_visits_of(random)),
        happenings=in_order(crowd_happenings_of(random, ceiling_bytes)),
    )


def crowd_visits_of(random: Random) -> list[Visit]:
    """Many clients at about the same time, most of which stay to the end."""
    visits: list[Visit] = []
    for content in range(1, random.randint(7, 10)):
        asked = Asked(
            num_prompt_tokens=random.randint(10, 90),
            max_tokens=random.randint(60, 180),
            at_ns=random.randrange(1_500) * 1_000_000,
        )
        leaves = random.random() < 0.3
        habits = habits_of(random, content) if leaves else Habits(content=content)
        visits.append(Visit(asked, habits))
    return visits


CROWD_POINTS = (
    "commit.after.pause_started",
    "commit.before.chain_pinned",
    "commit.after.chain_pinned",
    "commit.after.resume_started",
    "commit.before.request_resumed",
    "recovery.state",
    "recovery.done",
    "recovery.started",
)
"""Where the process of such a story may be killed."""


def crowd_happenings_of(random: Random, ceiling_bytes: int) -> list[Happening]:
    """Others use memory, the disk becomes slow and then fails, and in every other story the process
    is killed while requests are held or go on.
    """
    other = random.choice(("stop", random.choice(sorted(DRAWS))))
    found = [draw(random, other, ceiling_bytes)]
    lost = ["damage"] * random.choice((0, 2))
    for kind in (*lost, "hold", "hold", "memory", "memory", "memory", "memory"):
        drawn = replace(draw(random, kind, ceiling_bytes), at_ms=random.randrange(CROWD_MS))
        if kind == "memory":
            drawn = replace(drawn, number=ceiling_bytes * random.choice((50, 100, 200)) // 1000)
        found.append(drawn)
    for kind in ("full disk", "broken disk"):
        at_ms = random.randrange(CROWD_MS)
        slow_ms = max(0, at_ms - 2_000)
        found.append(Happening(at_ms=slow_ms, kind="slow disk", number=20, lasts_ms=2_000))
        found.append(replace(draw(random, kind, ceiling_bytes), at_ms=at_ms))
    for _ in range(random.choice((0, 2))):
        at_ms, point = random.randrange(CROWD_MS), random.choice(CROWD_POINTS)
        passes = random.choice((1, 1, 2))
        found.append(Happening(at_ms=at_ms, kind="mark", number=passes, word=point))
    return found


def mixture_of(seed: int, random: Random) -> Story:
    """A little of everything."""
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
        happenings=happenings_of(random, ceiling_bytes),
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
    content = habits.content if random.random() < 0.8 else habits.content + 100
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


def happenings_of(random: Random, ceiling_bytes: int) -> tuple[Happening, ...]:
    """A few things that happen; in most stories they are of few kinds."""
    kinds = random.sample(sorted(DRAWS), k=random.randint(0, 7))
    often = [kind for kind in kinds for _ in range(random.choice((1, 1, 2, 4)))]
    often += ["mark"] * random.choice((0, 0, 1, 3))
    return in_order(draw(random, kind, ceiling_bytes) for kind in often)


def in_order(happenings: Iterable[Happening]) -> tuple[Happening, ...]:
    """As they come."""
    return tuple(sorted(happenings, key=lambda happening: happening.at_ms))


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
