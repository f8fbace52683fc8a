"""`fermata simulate --mutations`: breaks copies of the scheduler, one mistake at a time, and sees
that the simulation finds it.
"""

import shutil
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from scheduler.simulation.stories import Told
from tools.mutations import MUTATIONS, Mutation
from tools.simulate import DONE, FOUND, INTERRUPTED, Wanted, refuse, say_progress, why_unusable
from tools.simulate_workers import Worker, Workers, packages_folder

PACKAGES = ("journal", "migrations", "scheduler")


class MutationError(Exception):
    """A mutation that is not one of the source as it is, or cannot be played."""


class Found(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a mutation: the first seed that fails, null when none did, and how."""

    name: str
    seed: int | None
    failure: str = ""
    place: str = ""
    duration_s: float = 0


@dataclass
class Hunt:
    """The mutations that are left, and those that are being played: each worker plays its own copy,
    since when. `found` is what came of the others.
    """

    folder: Path
    seeds: range
    left: deque[Mutation]
    began_s: dict[Worker, tuple[Mutation, float]] = field(
        default_factory=dict[Worker, tuple[Mutation, float]]
    )
    found: list[Found] = field(default_factory=list[Found])

    def run(self, num_workers: int) -> None:
        """All of them, so many at a time. Raises MutationError."""
        with closing(Workers()) as workers:
            for _ in range(min(num_workers, len(self.left))):
                self.begin_next(workers)
            for worker, lines in workers.hear():
                failed = [line for line in lines if line.told.failure]
                if failed:
                    self.end(worker, failed[0].seed, failed[0].told)
                elif worker.is_over:
                    self.end(worker, None, Told())
                else:
                    continue
                workers.remove(worker)
                self.begin_next(workers)

    def begin_next(self, workers: Workers) -> None:
        """Breaks one more copy, and has it played."""
        if not self.left:
            return
        mutation = self.left.popleft()
        began_s = time.monotonic()
        worker = Worker(mutated_copy(mutation, self.folder / str(len(self.left))), self.seeds)
        self.began_s[worker] = mutation, began_s
        workers.add(worker)

    def end(self, worker: Worker, seed: int | None, told: Told) -> None:
        """This is what came of one. Raises MutationError where its process has ended of something
        else than a story: that shows nothing.
        """
        mutation, began_s = self.began_s.pop(worker)
        if told.failure and not told.place and not worker.was_killed:
            raise MutationError(f"mutation {mutation.name}: {told.failure}")
        found = Found(
            name=mutation.name,
            seed=seed,
            failure=told.failure,
            place=told.place,
            duration_s=round(time.monotonic() - began_s, 1),
        )
        self.found.append(found)
        say_progress("")
        print(line_of(found), flush=True)
        say_progress(f"{len(self.left) + len(self.began_s)} mutations left")


def run(wanted: Wanted, only: str | None) -> int:
    """Plays each mutation until a seed fails, and prints which one. Returns 0; 1 when one is not
    found, or is none any more; 2 for numbers and a name that cannot be; 130 when interrupted.
    """
    chosen = [mutation for mutation in MUTATIONS if only in (None, mutation.name)]
    if not chosen:
        return refuse(f"there is no mutation {only!r}; `--mutations --list` shows them")
    if why := why_unusable(wanted):
        return refuse(why)
    seeds = range(wanted.seed, wanted.seed + wanted.seeds)
    with tempfile.TemporaryDirectory(prefix="fermata-mutations-") as folder:
        hunt = Hunt(Path(folder), seeds, deque(chosen))
        try:
            with suppress(KeyboardInterrupt):
                hunt.run(wanted.workers)
        except MutationError as error:
            print(f"fermata simulate: {error}", file=sys.stderr)
            return FOUND
    say_progress("")
    return report(hunt.found, len(chosen), len(seeds), as_json=wanted.as_json)


def report(found: Sequence[Found], num_chosen: int, num_seeds: int, *, as_json: bool) -> int:
    """The last line, and the exit status: those that were left by an interrupt are no success."""
    missed = [each.name for each in found if each.seed is None]
    print(
        f"{len(found) - len(missed)} of {num_chosen} mutations found within {num_seeds} seeds,"
        f" {len(missed)} not found, {num_chosen - len(found)} not played"
    )
    if as_json:
        print(msgspec.json.encode({"found": found, "missed": missed}).decode())
    if missed:
        return FOUND
    return DONE if len(found) == num_chosen else INTERRUPTED


def line_of(found: Found) -> str:
    """One mutation, for people."""
    if found.seed is None:
        return f"not found: {found.name}, {found.duration_s:.1f} s"
    place = f" ({found.place})" if found.place else ""
    what = f"{found.failure[:120]}{place}"
    return f"{found.name}: seed {found.seed}, {found.duration_s:.1f} s, {what}"


def list_mutations(*, as_json: bool) -> int:
    """Says what each of them breaks."""
    if as_json:
        listed = [{"name": m.name, "file": m.file, "breaks": m.breaks} for m in MUTATIONS]
        print(msgspec.json.encode({"mutations": listed}).decode())
        return DONE
    for mutation in MUTATIONS:
        print(f"{mutation.name} ({mutation.file}): {mutation.breaks}")
    return DONE


def mutated_copy(mutation: Mutation, folder: Path) -> Path:
    """Copies the packages that a simulation needs, with the mistake in them. Raises
    MutationError.
    """
    for package in PACKAGES:
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(packages_folder() / package, folder / package, ignore=ignore)
    file = folder / mutation.file
    file.write_text(mutated(mutation, file.read_text(encoding="utf-8")), encoding="utf-8")
    return folder


def mutated(mutation: Mutation, source: str) -> str:
    """The source of its file with the mistake in it. Raises MutationError where that is not a
    change of exactly one place.
    """
    count = source.count(mutation.text)
    if count != 1 or mutation.text == mutation.replacement:
        raise MutationError(
            f"mutation {mutation.name}: its text is in {mutation.file} {count} times, not once"
        )
    return source.replace(mutation.text, mutation.replacement)
