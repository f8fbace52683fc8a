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

MOST_ENDS = 5
"""Lives of one story that are ended at most."""

MIDDLE = "commit.after.tokens_decoded"
"""Where a life is ended that only has to come before another."""

ROUNDS = 4
"""So often each variant is played before a point to which none came is given up."""

MISSES = 15
"""So often more than is wanted a point is tried for that was seen before it is given up."""

SURE = 0.6
MANY = 6
"""Passes of one point in one life."""

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
    story has another seed. `looks_first`: each variant is played once without an end, which shows
    where it comes; who has little time ends it at once.
    """

    def __init__(
        self,
        points: Sequence[str],
        wanted: int,
        seed: int,
        variants: Sequence[str],
        *,
        looks_first: bool = True,
    ) -> None:
        self.points = points
        self.wanted = wanted
        self.seed = seed
        self.looks_first = looks_first
        self.known = {variant: Known() for variant in variants}
        self.ends: Counter[str] = Counter()
        self.tries: Counter[str] = Counter()
        self.misses: Counter[tuple[str, str]] = Counter()
        self.aims: dict[int, str] = {}
        self.played: Counter[str] = Counter()
        self.num_drawn = 0
        self.num_new_process_ends = 0

    def lacking(self) -> list[str]:
        """The points that have not been ended at as often as wanted, the rarest first."""
        lacking = [point for point in self.points if self.ends[point] < self.wanted]
        lacking = [point for point in lacking if not self.is_given_up(point)]
        return sorted(lacking, key=lambda point: len(self.variants_to(point)))

    def variants_to(self, point: str) -> list[str]:
        """The variants that are known to come there."""
        return [name for name, known in self.known.items() if known.comes_to(point)]

    def best_for(self, point: str) -> str:
        """The variant that has missed it least often; of these one whose first life comes there,
        then the cheapest.
        """

        def rank(name: str) -> tuple[int, bool, float]:
            known = self.known[name]
            return self.misses[point, name], point not in known.first, known.cost_s

        return min(self.variants_to(point), key=rank)

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
            target = self.target_of(seen)
            variant = self.best_for(target)
            self.aims[seed] = target
            self.tries[target] += 1
            self.misses[target, variant] += 1  # until the contrary is told
        self.played[variant] += 1
        return Tale(variant, seed, self.lives(random, variant, target, lacking))

    def target_of(self, seen: Sequence[str]) -> str:
        """The first at which there will not have been ends enough when all stories that aim at it
        and are still being played come to it.
        """
        aims = Counter(self.aims.values())
        open_ones = (point for point in seen if self.ends[point] + aims[point] < self.wanted)
        return next(open_ones, seen[0])

    def lives(
        self, random: Random, variant: str, target: str | None, lacking: Sequence[str]
    ) -> tuple[tuple[End, ...], ...]:
        """What each life is armed with. The target is in the first life that comes to it; a life
        that could give nothing more is not ended, and the story is over with it.
        """
        known = self.known[variant]
        if not known.durations_s:
            if self.looks_first:
                return ()
            return (tuple(End(point, 1) for point in random.sample(lacking, most_of(lacking))),)
        lives: list[tuple[End, ...]] = []
        if target is None:
            lives.append(armed(random, known.first, lacking) or (late(random, known.first),))
        elif self.is_for_first(target, variant):
            lives.append((drawn(random, target, known.first),))
        else:
            lives.append((late(random, known.first),))
            lives.append((drawn(random, target, known.later),))
        num_more = random.randrange(1, MOST_ENDS)
        # Nobody knows how much the deaths before have left for these to come to.
        more = [armed(random, known.later, lacking, SURE) for _ in range(num_more)]
        return (*lives, *more)

    def is_for_first(self, target: str, variant: str) -> bool:
        """Whether the first life is to come to it. Where later ones do as well, each third try is
        theirs while it is missed.
        """
        known = self.known[variant]
        if target in known.first and target in known.later:
            return self.misses[target, variant] % 3 > 0
        return target in known.first

    def take(self, told: Told) -> None:
        """A story was played."""
        self.known[told.tale.variant].add(told)
        self.aims.pop(told.tale.seed, None)
        if told.tale.new_process:
            self.num_new_process_ends += len(told.ends)
        for point in {end.point for end in told.ends}:
            self.ends[point] += 1
            self.misses[point, told.tale.variant] -= 1


def armed(
    random: Random, passes: Mapping[str, int], lacking: Sequence[str], sure: float | None = None
) -> tuple[End, ...]:
    """The ends of one life: some of the points to which it may come."""
    points = [point for point in lacking if point in passes]
    chosen = random.sample(points, most_of(points))
    return tuple(drawn(random, point, passes, sure) for point in chosen)


def late(random: Random, passes: Mapping[str, int]) -> End:
    """An end in the middle of work, with something behind it that a later life can find."""
    if not passes:
        return End(MIDDLE, 1)
    point = MIDDLE if MIDDLE in passes else random.choice(sorted(passes))
    most = passes[point]
    return End(point, random.randint(min(most, 1 + most // 3), most))


def most_of(points: Sequence[str]) -> int:
    """With how many of these a life is armed."""
    return min(ARMED, len(points))


def drawn(random: Random, point: str, passes: Mapping[str, int], sure: float | None = None) -> End:
    """An end at one of the passes that a life may have: of few often the first, which comes for
    sure; of many any, since the first ones are all made at a start. `sure` is how often the first.
    """
    most = passes[point]
    if sure is None:
        sure = SURE if most < MANY else 0.2
    return End(point, 1 if random.random() < sure else random.randint(1, most))
