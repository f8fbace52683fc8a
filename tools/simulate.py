"""`fermata simulate`: whole servers in one thread and in virtual time, from seeds, with all that
can go wrong; checked at each of their steps, and at their ends.
"""

import os
import shlex
import sys
import tempfile
import time
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from scheduler.simulation.coverage import WANTED
from scheduler.simulation.scenario import ScenarioError, from_text, to_text
from scheduler.simulation.seeds import story_of
from scheduler.simulation.shrinking import shrink
from scheduler.simulation.stories import Story, Told, tell
from scheduler.simulation.worker import Line
from tools.simulate_workers import Worker, Workers, packages_folder, without_settings
from tools.text_table import text_table

DONE, FOUND, UNUSABLE, INTERRUPTED = 0, 1, 2, 130

ENOUGH_SEEDS = 200
"""Among so many no situation may be missing."""

MAX_SHRUNK = 3
"""Failing seeds that are made smaller: each takes up to a minute."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is asked for. `out` is where scenario files are written: a new folder unless it is
    given.
    """

    seeds: int = ENOUGH_SEEDS
    seed: int = 0
    workers: int = 2
    out: Path | None = None
    as_json: bool = False


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """What does not hold, where that was noticed, and the command that shows it again. `scenario`
    is the file of a smaller story that fails in the same place.
    """

    seed: int | None
    failure: str
    place: str
    again: str
    scenario: str | None = None


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What came of all seeds. A core's seconds are those in which it was busy with them, `missing`
    are situations that have not been met, and `was_cut`: somebody interrupted.
    """

    first_seed: int
    num_seeds: int
    num_steps: int
    duration_s: float
    steps_per_s_and_core: int
    met: dict[str, int]
    missing: list[str]
    failures: list[Failure]
    was_cut: bool

    @property
    def status(self) -> int:
        """With few seeds it says nothing that a situation is missing. Seeds that were not played
        say nothing either, and that is no success.
        """
        is_poor = bool(self.missing) and self.num_seeds >= ENOUGH_SEEDS
        if self.failures or (is_poor and not self.was_cut):
            return FOUND
        return INTERRUPTED if self.was_cut else DONE


@dataclass
class Tally:
    """What was told so far, and of which seeds something did not hold. `busy_s` is the time of all
    processors together.
    """

    num_seeds: int = 0
    num_steps: int = 0
    busy_s: float = 0
    met: Counter[str] = field(default_factory=Counter[str])
    failed: dict[int, Told] = field(default_factory=dict[int, Told])
    was_cut: bool = False

    def take(self, line: Line) -> None:
        """What came of one more seed."""
        told = line.told
        self.num_seeds += 1
        self.num_steps += told.num_steps
        self.busy_s += line.busy_s
        self.met.update(told.met)
        if told.failure:
            self.failed[line.seed] = told


def run(wanted: Wanted) -> int:
    """Plays seeds, and prints what came of them. Returns 0; 1 when something does not hold, or a
    situation is missing among enough seeds; 2 for numbers, or a folder, that cannot be; 130 when
    somebody interrupted it and nothing was found until then.
    """
    if why := why_unusable(wanted):
        return refuse(why)
    began_s = time.monotonic()
    tally = play_all(wanted)
    duration_s = time.monotonic() - began_s
    report = Report(
        first_seed=wanted.seed,
        num_seeds=tally.num_seeds,
        num_steps=tally.num_steps,
        duration_s=round(duration_s, 1),
        steps_per_s_and_core=round(tally.num_steps / max(tally.busy_s, 0.001)),
        met={name: tally.met[name] for name in WANTED},
        missing=[name for name in WANTED if not tally.met[name]],
        failures=explain_all(tally, wanted),
        was_cut=tally.was_cut,
    )
    show(report)
    if wanted.as_json:
        print(msgspec.json.encode(report).decode())
    return report.status


def why_unusable(wanted: Wanted) -> str:
    """What is wrong with what is asked for; empty when nothing is. Makes the folder."""
    if wanted.seeds < 1 or wanted.seed < 0 or wanted.workers < 1:
        return "--seeds and --workers are at least 1, --seed is not negative"
    try:
        if wanted.out is not None:
            wanted.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        return f"--out {wanted.out}: {error.strerror}"
    return ""


def refuse(why: str) -> int:
    """One line on stderr, and its exit status."""
    print(f"fermata simulate: {' '.join(why.split())}", file=sys.stderr)
    return UNUSABLE


def play_all(wanted: Wanted) -> Tally:
    """Each worker plays its share. What was told before an interrupt counts."""
    tally = Tally()
    seeds = range(wanted.seed, wanted.seed + wanted.seeds)
    num_workers = min(wanted.workers, wanted.seeds)
    try:
        with closing(Workers()) as workers:
            for number in range(num_workers):
                workers.add(Worker(packages_folder(), seeds[number::num_workers]))
            for _, lines in workers.hear():
                for line in lines:
                    tally.take(line)
                say_progress(f"{tally.num_seeds} of {len(seeds)} seeds")
    except KeyboardInterrupt:
        tally.was_cut = True
    say_progress("")
    return tally


def say_progress(text: str) -> None:
    """One line that is written over, for people only."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


# Failures


def explain_all(tally: Tally, wanted: Wanted) -> list[Failure]:
    """Each of them, the first ones with a smaller story unless somebody interrupts."""
    failures: list[Failure] = []
    for number, seed in enumerate(sorted(tally.failed)):
        is_shrunk = number < MAX_SHRUNK and not tally.was_cut
        try:
            file = shrunk_file(seed, tally.failed[seed], wanted.out) if is_shrunk else None
        except KeyboardInterrupt:
            tally.was_cut = True
            file = None
        failures.append(failure_of(seed, tally.failed[seed], file))
    return failures


def failure_of(seed: int, told: Told, file: Path | None) -> Failure:
    """A seed that has failed."""
    return Failure(
        seed=seed,
        failure=told.failure,
        place=told.place,
        again=f"fermata simulate --seed {seed} --seeds 1",
        scenario=None if file is None else str(file),
    )


def shrunk_file(seed: int, told: Told, out: Path | None) -> Path | None:
    """The smallest story that fails in the same place, as a file; none where the seed does not fail
    in this process, or ends it.
    """
    if not told.place:
        return None
    keep_settings_out()
    say_progress(f"seed {seed} has failed, and is made smaller")
    story = shrink(story_of(seed), lambda smaller: tell(smaller).place == told.place)
    say_progress("")
    folder = Path(tempfile.mkdtemp(prefix="fermata-simulate-")) if out is None else out
    file = folder / f"seed-{seed}.json"
    file.write_text(to_text(story) + "\n")
    return file


def keep_settings_out() -> None:
    """A story brings its own settings: those of this process's environment are none of its."""
    kept = without_settings()
    for name in os.environ.keys() - kept.keys():
        del os.environ[name]


# What is printed


def show(report: Report) -> None:
    """The situations, the numbers, and last what is not as it should be."""
    rows = [(name, f"{count:,}") for name, count in report.met.items()]
    print("\n".join(text_table(("met", "times"), rows, ("times",))))
    cut = ", interrupted" if report.was_cut else ""
    print(
        f"{report.num_seeds:,} seeds from {report.first_seed}: {report.num_steps:,} steps,"
        f" {report.steps_per_s_and_core:,} steps/s and core, {report.duration_s:.1f} s,"
        f" {len(report.failures)} failures{cut}"
    )
    for name in report.missing:
        print(f"not met: {name}")
    for failure in report.failures:
        show_failure(failure)


def show_failure(failure: Failure) -> None:
    """One failure, and the commands that show it again."""
    where = "the scenario" if failure.seed is None else f"seed {failure.seed}"
    place = f" ({failure.place})" if failure.place else ""
    print(f"{where} fails: {failure.failure[:500]}{place}")
    print(f"    again: {failure.again}")
    if failure.scenario is not None:
        again = f"fermata simulate --scenario {shlex.quote(failure.scenario)}"
        print(f"    made smaller: {again}")


def list_situations(*, as_json: bool) -> int:
    """Names what is counted."""
    print(msgspec.json.encode({"situations": WANTED}).decode() if as_json else "\n".join(WANTED))
    return DONE


# One scenario


def run_scenario(path: Path, *, as_json: bool) -> int:
    """Plays the story of a file. Returns 0; 1 when something does not hold, 2 for a file that is no
    scenario.
    """
    keep_settings_out()
    try:
        story = read_scenario(path)
    except ScenarioError as error:
        return refuse(f"{path}: {error}")
    told = tell(story)
    again = f"fermata simulate --scenario {shlex.quote(str(path))}"
    failure = Failure(seed=None, failure=told.failure, place=told.place, again=again)
    if told.failure:
        show_failure(failure)
    else:
        print(f"{path}: {told.num_steps:,} steps, all of it holds")
    if as_json:
        found = failure if told.failure else None
        met = {name: told.met.get(name, 0) for name in WANTED}
        shown = {"num_steps": told.num_steps, "met": met, "failure": found}
        print(msgspec.json.encode(shown).decode())
    return FOUND if told.failure else DONE


def read_scenario(path: Path) -> Story:
    """Raises ScenarioError, in one line, for a file that cannot be read or is none."""
    try:
        return from_text(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ScenarioError(error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        raise ScenarioError("this is no text") from error
