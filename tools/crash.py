"""`fermata crash`: ends a server hard at named points, starts it again, and checks that nothing is
lost.
"""

import importlib
import json
import math
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from journal.crashpoints import POINTS
from tools.crash_plan import Planner, Tale, Told, parse_tale
from tools.crash_variants import VARIANTS
from tools.crash_workers import WorkerDied, Workers, each_of
from tools.text_table import text_table

SERVED_BY = (
    "anyio._backends._asyncio",
    "api.server",
    "encodings.idna",
    "journal.migration",
    "scheduler.run",
    "scheduler.wiring",
    "uvicorn.protocols.http.httptools_impl",
)
"""What a server imports late. Servers are forked from this process and find it imported; nothing is
opened by that.
"""

NEW_PROCESSES = 20
"""So many ends at least are of lives that are new processes, where nothing was imported before."""


class Usage(Exception):
    """What was asked for cannot be done: exit status 2."""


@dataclass(frozen=True)
class Wanted:
    """What the command line asks for."""

    points: str = "all"
    seeds: int = 5
    seed: int = 1
    workers: int = 4
    keep: Path | None = None
    story: str | None = None
    limit_s: float = math.inf
    new_processes: int = NEW_PROCESSES


@dataclass
class Group:
    """What came of the points whose names begin alike."""

    points: int = 0
    ends: int = 0
    fewest: int = 0
    violations: int = 0
    slowest_s: float = 0.0


@dataclass
class Report:
    """What came of all stories. `unreached` are points to which nobody came as often as wanted."""

    ends: dict[str, int]
    wanted: int
    told: list[Told] = field(default_factory=list[Told])
    duration_s: float = 0.0
    was_cut: bool = False
    folder: str = ""

    @property
    def violations(self) -> list[Told]:
        return [told for told in self.told if told.problems]

    @property
    def unreached(self) -> list[str]:
        return [point for point, count in self.ends.items() if count < self.wanted]

    @property
    def new_process_ends(self) -> int:
        """Ends of servers that were processes of their own from the interpreter on."""
        return sum(len(told.ends) for told in self.told if told.tale.new_process)

    @property
    def status(self) -> int:
        """Where time ran out it says nothing that some points were not reached."""
        return int(bool(self.violations or (self.unreached and not self.was_cut)))

    def groups(self) -> dict[str, Group]:
        """By the first part of the name."""
        groups: dict[str, Group] = defaultdict(Group)
        for point, count in self.ends.items():
            group = groups[group_of(point)]
            group.fewest = count if not group.points else min(group.fewest, count)
            group.points += 1
            group.ends += count
        for told in self.told:
            for name in {group_of(end.point) for end in told.ends} & groups.keys():
                group = groups[name]
                group.violations += bool(told.problems)
                group.slowest_s = max(group.slowest_s, told.duration_s)
        return groups


def group_of(point: str) -> str:
    """The first part of a point's name."""
    return point.partition(".")[0]


def chosen(text: str) -> list[str]:
    """The points that `--points` names. Raises Usage."""
    if text == "all":
        return list(POINTS)
    found: dict[str, None] = {}
    for pattern in text.split(","):
        if not pattern.strip():
            raise Usage(f"--points {text}: there is an empty name in it")
        names = [name for name in POINTS if fnmatchcase(name, pattern.strip())]
        if not names:
            raise Usage(f"--points {pattern}: no such point; `--list` shows all of them")
        found |= dict.fromkeys(names)
    return list(found)


def run(wanted: Wanted, *, as_json: bool) -> int:
    """Plays the stories and shows what came of them; returns the exit status."""
    try:
        points = chosen(wanted.points)
        tale = None if wanted.story is None else told_tale(wanted.story)
    except Usage as error:
        print(f"fermata: {error}", file=sys.stderr)
        return 2
    try:
        report = repeated(tale, wanted) if tale is not None else ended_at_all(points, wanted)
    except WorkerDied as error:
        print(f"fermata: a worker died {error}", file=sys.stderr)
        return 1
    show(report)
    if as_json:
        print(json.dumps(as_object(report)))
    return report.status


def list_points() -> int:
    """Shows all points."""
    for name, what in POINTS.items():
        print(f"{name:40} {what}")
    return 0


def told_tale(text: str) -> Tale:
    """The story that `--story` names. Raises Usage."""
    try:
        tale = parse_tale(text)
    except ValueError:
        raise Usage(f"--story {text}: write VARIANT:SEED:POINT@NUMBER+POINT@NUMBER") from None
    if tale.variant not in VARIANTS:
        raise Usage(f"--story {text}: the variants are {', '.join(VARIANTS)}")
    for (end,) in tale.lives:
        if end.point not in POINTS:
            raise Usage(f"--story {text}: there is no point {end.point}")
    return tale


def started(wanted: Wanted) -> Workers:
    """The workers, in a new folder."""
    parent = wanted.keep
    if parent is not None:
        parent.mkdir(parents=True, exist_ok=True)
    for name in SERVED_BY:
        importlib.import_module(name)
    workers = Workers(Path(tempfile.mkdtemp(prefix="fermata-crash-", dir=parent)))
    workers.start(wanted.workers)
    return workers


def repeated(tale: Tale, wanted: Wanted) -> Report:
    """One story again."""
    workers = started(wanted)
    try:
        told = list(workers.play(each_of([tale])))
    finally:
        workers.close()
    ends = {end.point: 0 for life in tale.lives for end in life}
    for end in told[0].ends:
        ends[end.point] = 1
    return Report(ends, 1, told, told[0].duration_s, folder=str(workers.folder))


def ended_at_all(points: Sequence[str], wanted: Wanted) -> Report:
    """Ends at each of these points, as often as wanted."""
    began = time.monotonic()
    planner = Planner(
        points,
        wanted.seeds,
        wanted.seed,
        list(VARIANTS),
        looks_first=wanted.limit_s == math.inf,
    )
    workers = started(wanted)
    told: list[Told] = []
    interrupted = False
    try:
        deadline = began + wanted.limit_s
        for each in workers.play(lambda: following(planner, wanted, deadline)):
            planner.take(each)
            told.append(each)
            say_problems(each)
    except KeyboardInterrupt:
        interrupted = True  # what was found by now is shown
    finally:
        workers.close()
    ends = {point: planner.ends[point] for point in points}
    duration_s = time.monotonic() - began
    return Report(
        ends=ends,
        wanted=wanted.seeds,
        told=told,
        duration_s=duration_s,
        was_cut=interrupted or duration_s > wanted.limit_s,
        folder=str(workers.folder),
    )


def following(planner: Planner, wanted: Wanted, deadline: float) -> Tale | None:
    """The next story, as long as there is time; the first ones in new processes, until enough of
    these have ended.
    """
    if time.monotonic() >= deadline:
        return None
    tale = planner.next()
    if tale is None or not tale.lives or planner.num_new_process_ends >= wanted.new_processes:
        return tale
    return Tale(tale.variant, tale.seed, tale.lives, new_process=True)


def say_problems(told: Told) -> None:
    """A violation, as it is found."""
    if told.problems:
        print(f"violation: fermata crash --story {told}", flush=True)
        for problem in told.problems[:5]:
            print(f"    {problem[:300]}", flush=True)


COLUMNS = ("points", "number", "ends", "fewest", "violations", "slowest s")


def rows_of(report: Report) -> list[list[str]]:
    """The table by groups of points."""
    return [
        [
            name,
            str(group.points),
            str(group.ends),
            str(group.fewest),
            str(group.violations),
            f"{group.slowest_s:.1f}",
        ]
        for name, group in report.groups().items()
    ]


def show(report: Report) -> None:
    """The table, and what is not as it should be."""
    for line in text_table(COLUMNS, rows_of(report), COLUMNS[1:]):
        print(line)
    stories, ends = len(report.told), sum(report.ends.values())
    print(
        f"{len(report.ends)} points, {ends} ends ({report.new_process_ends} of new processes) in"
        f" {stories} stories, {len(report.violations)} violations, {report.duration_s:.0f} s"
    )
    for point in () if report.was_cut else report.unreached:
        print(f"not reached: {point} {report.ends[point]} of {report.wanted}")
    for told in report.violations:
        print(f"violation: fermata crash --story {told}; its folder is in {report.folder}")


def by_variant(told: Sequence[Told]) -> dict[str, dict[str, float]]:
    """Of each variant how many stories, ends and seconds."""
    found: dict[str, dict[str, float]] = {}
    for each in told:
        sums = found.setdefault(each.tale.variant, {"stories": 0, "ends": 0, "seconds": 0.0})
        sums["stories"] += 1
        sums["ends"] += len(each.ends)
        sums["seconds"] = round(sums["seconds"] + each.duration_s, 1)
    return found


def as_object(report: Report) -> dict[str, object]:
    """The same for programs."""
    return {
        "points": report.ends,
        "wanted": report.wanted,
        "stories": len(report.told),
        "new_process_ends": report.new_process_ends,
        "violations": [
            {"story": str(told), "problems": told.problems} for told in report.violations
        ],
        "unreached": report.unreached,
        "variants": by_variant(report.told),
        "was_cut": report.was_cut,
        "duration_s": round(report.duration_s, 1),
    }
