"""The best that any scheduler could do with a few long prompts, for `fermata bench pressure`. It
shares the cost model's numbers with the simulation and none of its code.

One engine does one piece of work at a time: it feeds a chunk of a prompt, or decodes one token for
each of a set of rows that are in memory together. Pauses are free here: a row leaves memory and
comes back in no time, and nothing is ever fed twice.

`floor_ns` bounds every schedule, whatever it does, from below:

- The prompts must be fed. Cut into chunks in any way, their tokens' own time adds up to the same,
  a chunk takes at least the time of its tokens, and there are as few chunks as their longest
  length allows.
- Each row's part of each of its decode steps depends on how many positions it holds, and so not on
  the schedule.
- What a schedule can save is the reading of the weights, once for each decode step. A row decodes
  once in a step, so there are at least as many steps as its longest output; and at most `k` rows,
  the most that fit in memory together at their prompts' sizes, decode in one step, so there are at
  least a `k`th of all output tokens.

`least_ns` is the makespan of real schedules: every order of admission, with serial starts (each
request runs to its end before the next begins) and overlapped starts (the next prompt is fed as
soon as the one before it is; rows that are ready decode one token between two chunks, or stand
still until all prompts are fed), the rows in memory being those that have the most output left and
fit. It can never be below the floor; where both are equal, no schedule of any kind is better.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations, permutations

from journal.events import ModelFacts
from scheduler.simulation.cost import EngineCost


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request: tokens to feed, tokens to put out, and what is done of both."""

    num_prompt_tokens: int
    num_output_tokens: int
    fed: int = 0
    put_out: int = 0

    @property
    def held(self) -> int:
        """Positions in its row: the last known token is never fed before a decode step."""
        return self.fed + self.put_out

    @property
    def is_ready(self) -> bool:
        return self.fed >= self.num_prompt_tokens - 1

    @property
    def left(self) -> int:
        return self.num_output_tokens - self.put_out


@dataclass(frozen=True, slots=True)
class Problem:
    """Prompts, and what they meet. `chunk_tokens` is what is fed at once."""

    prompts: tuple[Prompt, ...]
    facts: ModelFacts
    cost: EngineCost
    ceiling_bytes: int
    chunk_tokens: int

    def bytes_of(self, positions: int) -> int:
        """A row of so many positions, in whole steps of allocation."""
        step = self.facts.kv_step_tokens
        rounded = (positions + step - 1) // step * step
        return self.facts.state_bytes + rounded * self.facts.kv_bytes_per_token

    def fits(self, positions: Sequence[int], length: int = 0) -> bool:
        """Whether rows of these sizes, and a chunk of this length, are below the ceiling."""
        rows_bytes = sum(self.bytes_of(held) for held in positions)
        chunk_bytes = length * self.facts.transient_bytes_per_token
        return self.facts.weights_bytes + rows_bytes + chunk_bytes <= self.ceiling_bytes

    def feed_ns(self, start: int, length: int) -> int:
        """The tokens' own time: each costs the same and attends to all before it."""
        attended = (start + start + length - 1) * length // 2
        return length * self.cost.token_ns + attended * self.cost.attend_ps // 1000

    def rows_ns(self, held: Sequence[int]) -> int:
        """The rows' part of a decode step: each reads its positions and the one that is new."""
        return sum(self.cost.row_ns + (h + 1) * self.cost.read_ps // 1000 for h in held)


def floor_ns(problem: Problem) -> int:
    """No schedule takes less: see the module's text."""
    # A chunk's time is rounded down to a nanosecond, and there are not more chunks than tokens.
    fed = sum(
        problem.feed_ns(0, p.num_prompt_tokens - 1) - p.num_prompt_tokens for p in problem.prompts
    )
    chunks = sum(-(-(p.num_prompt_tokens - 1) // problem.chunk_tokens) for p in problem.prompts)
    rows = sum(
        problem.rows_ns(range(p.num_prompt_tokens - 1, p.num_prompt_tokens - 1 + p.left))
        for p in problem.prompts
    )
    launched = chunks * problem.cost.launch_ns
    return fed + launched + rows + least_steps(problem) * problem.cost.weights_ns


def least_steps(problem: Problem) -> int:
    """The decode steps that any schedule takes at least."""
    sizes = [p.num_prompt_tokens - 1 for p in problem.prompts]
    most = max(k for k in range(len(sizes) + 1) if any_fits(problem, sizes, k))
    outputs = [p.num_output_tokens for p in problem.prompts]
    return max(*outputs, -(-sum(outputs) // max(1, most)))


def any_fits(problem: Problem, sizes: Sequence[int], k: int) -> bool:
    """Whether some `k` of these rows fit together."""
    return any(problem.fits(chosen) for chosen in combinations(sizes, k))


def least_ns(problem: Problem) -> tuple[int, str]:
    """The least makespan of all schedules of the family, and which it is."""
    found: list[tuple[int, str]] = []
    for order in permutations(range(len(problem.prompts))):
        prompts = [problem.prompts[number] for number in order]
        named = "-".join(str(number + 1) for number in order)
        found.append((serial_ns(problem, prompts), f"serial {named}"))
        for beside in (True, False):
            how = "decoding between chunks" if beside else "prompts first"
            found.append((overlapped_ns(problem, prompts, beside), f"overlapped {named}, {how}"))
    return min(found)


def serial_ns(problem: Problem, prompts: Sequence[Prompt]) -> int:
    """Each request runs to its end before the next begins."""
    return sum(overlapped_ns(problem, [prompt], False) for prompt in prompts)


def overlapped_ns(problem: Problem, prompts: Sequence[Prompt], beside: bool) -> int:
    """Each prompt is fed when the one before it has been."""
    taken_ns = 0
    done: list[Prompt] = []
    for prompt in prompts:
        row = prompt
        while not row.is_ready:
            length = min(problem.chunk_tokens, row.num_prompt_tokens - 1 - row.fed)
            assert problem.fits([row.held + length], length), "each prompt fits alone"
            taken_ns += problem.cost.launch_ns
            taken_ns += max(problem.cost.weights_ns, problem.feed_ns(row.fed, length))
            row = replace(row, fed=row.fed + length)
            if beside:
                taken_ns += decode(problem, done, [row.held])
        done.append(row)
    while any(row.left for row in done):
        taken_ns += decode(problem, done, [])
    return taken_ns


def decode(problem: Problem, rows: list[Prompt], others: list[int]) -> int:
    """One step of the rows that fit beside `others`, those with the most output left first."""
    chosen: list[int] = []
    sizes = list(others)
    for number in sorted(range(len(rows)), key=lambda n: (-rows[n].left, n)):
        row = rows[number]
        if row.left and problem.fits([*sizes, row.held + 1]):
            chosen.append(number)
            sizes.append(row.held + 1)
    if not chosen:
        return 0
    took_ns = problem.cost.weights_ns + problem.rows_ns([rows[number].held for number in chosen])
    for number in chosen:
        rows[number] = replace(rows[number], put_out=rows[number].put_out + 1)
    return took_ns
