"""Which stories are played, so that the process is ended at each point as often as is wanted.

Nothing is known beforehand of where a variant comes: each story tells, and the next ones are drawn
by it. A life is armed with several points that still lack ends, and is ended at the first to which
it comes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from random import Random
from statistics import mean

import msgspec

from tools.crash_child import End

ARMED = 6
"""Points at which one life may be ended at most: with more, all lives would be short."""

MOST_ENDS = 3
"""Lives of one story that are ended at most."""

ROUNDS = 4
"""So often each variant is played before a point to which none came is given up."""

MISSES = 8
"""So often more than is wanted a point is tried for that was seen before it is given up."""

Passes = dict[str, int]


class Tale(msgspec.Struct, frozen=True):
    """What story is played: a variant, a seed, and for each life but the last the ends that it may
    come to. `new_process`: each life is a process of its own, not forked.
    """

    variant: str
    seed: int
    lives: tuple[tuple[End, ...], ...] = ()
    new_process: bool = False


class Told(msgspec.Struct, frozen=True):
    """What came of a story. `ends` are those that came, one for each life that was ended; `passes`
    those of each life.
    """

    tale: Tale
    ends: tuple[End, ...]
    passes: tuple[Passes, ...]
    problems: tuple[str, ...]
    duration_s: float

    def __str__(self) -> str:
        """As `--story` takes it: what happened, not what might have."""
        ends = "+".join(f"{end.point}@{end.number}" for end in self.ends)
        return f"{self.tale.variant}:{self.tale.seed}:{ends}"


def parse_tale(text: str) -> Tale:
    """The story that is told like this. Raises ValueError."""
    variant, seed, ends = text.split(":")
    parts = [end.split("@") for end in ends.split("+") if end]
    lives = tuple((End(point, int(number)),) for point, number in parts)
    return Tale(variant, int(seed), lives)


class Known:
    """Where one variant comes, in first lives and in later ones: for each point how often at
    most.
    """

    def __init__(self) -> None:
        self.first: Passes = {}
        self.later: Passes = {}
        self.durations_s: list[float] = []

    def add(self, told: Told) -> None:
        """One story."""
        self.durations_s.append(told.duration_s)
        for number, passes in enumerate(told.passes):
            known = self.later if number else self.first
            for point, count in passes.items():
                known[point] = max(count, known.get(point, 0))

    def comes_to(self, point: str) -> bool:
        return point in self.first or point in self.later

    @property
    def cost_s(self) -> float:
        return mean(self.durations_s) if self.durations_s else 0.0


class Planner:
    """Draws stories until each point has been ended at in `wanted` of them, or is given up. Each
    story has another seed.
    """

    def __init__(
        self, points: Sequence[str], wanted: int, seed: int, variants: Sequence[str]
    ) -> None:
        self.points = points
        self.wanted = wanted
        self.seed = seed
        self.known = {variant: Known() for variant in variants}
        self.ends: Counter[str] = Counter()
        self.tries: Counter[str] = Counter()
        self.played: Counter[str] = Counter()
        self.num_drawn = 0

    def lacking(self) -> list[str]:
        """The points that have not been ended at as often as wanted, the rarest first."""
        lacking = [point for point in self.points if self.ends[point] < self.wanted]
        lacking = [point for point in lacking if not self.is_given_up(point)]
        return sorted(lacking, key=lambda point: len(self.variants_to(point)))

    def variants_to(self, point: str) -> list[str]:
        """The variants that are known to come there, the cheapest first."""
        found = [name for name, known in self.known.items() if known.comes_to(point)]
        return sorted(found, key=lambda name: self.known[name].cost_s)

    def is_given_up(self, point: str) -> bool:
        if self.tries[point] >= self.wanted + MISSES:
            return True
        played_enough = min(self.played[name] for name in self.known) >= ROUNDS
        return played_enough and not self.variants_to(point)

    def next(self) -> Tale | None:
        """The next story; None when nothing is lacking any more."""
        lacking = self.lacking()
        if not lacking:
            return None
        seed = self.seed + self.num_drawn
        self.num_drawn += 1
        random = Random(f"plan {seed}")
        fewest = min(self.known, key=lambda name: self.played[name])
        seen = [point for point in lacking if self.variants_to(point)]
        if not seen or not self.played[fewest]:
            variant, target = fewest, None
        else:
            target = seen[0]
            variant = random.choice(self.variants_to(target)[:3])
            self.tries[target] += 1
        self.played[variant] += 1
        return Tale(variant, seed, self.lives(random, variant, target, lacking))

    def lives(
        self, random: Random, variant: str, target: str | None, lacking: Sequence[str]
    ) -> tuple[tuple[End, ...], ...]:
        """What each life is armed with. The target is in the first life that comes to it."""
        known = self.known[variant]
        in_first = target is None or target in known.first
        lives = [armed(random, known.first, lacking, target if in_first else None)]
        for number in range(random.randrange(1, MOST_ENDS)):
            wanted = None if in_first or number else target
            lives.append(armed(random, known.later, lacking, wanted))
        return tuple(lives)

    def take(self, told: Told) -> None:
        """A story was played."""
        self.known[told.tale.variant].add(told)
        self.ends.update({end.point for end in told.ends})


def armed(
    random: Random, passes: Mapping[str, int], lacking: Sequence[str], target: str | None
) -> tuple[End, ...]:
    """The ends of one life: the target, or some of the points to which it may come; of a variant of
    which nothing is known, that is any.
    """
    if target is not None:
        return (drawn(random, target, passes),)
    points = [point for point in lacking if point in passes] or list(passes or lacking)
    chosen = random.sample(points, min(ARMED if passes else 2 * ARMED, len(points)))
    return tuple(drawn(random, point, passes) for point in chosen)


def drawn(random: Random, point: str, passes: Mapping[str, int]) -> End:
    """An end at one of the passes that a life may have; often the first, which it is sure of."""
    most = passes.get(point, 1)
    return End(point, 1 if random.random() < 0.6 else random.randint(1, most))
