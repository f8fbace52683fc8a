"""What the demo asks for, and the memory that it is given.

Three prompts end a little before the step in which a row's memory grows, and their answers go
beyond it: so the three rows fit at first, and no longer once they have grown.
"""

import random
from collections.abc import Iterable
from dataclasses import dataclass

from journal.events import ModelFacts
from scheduler.memory import row_bytes, size_text

MEASURED_LINES = (1, 4)
"""The prompts that are measured with: from their sizes follow what a line and the rest take, and
from the time of the longer one how fast the machine is.
"""

PROMPT_TOKENS = 216
"""Each prompt has at most so many tokens, of the 256 that a row's first step of memory holds."""

MOST_OUTPUT_TOKENS = 512
"""The longest answers that are asked for to gain time."""

FAST_S = 0.2
"""An answer has the tokens that are prefilled in so many seconds, or more where memory has room for
them: a fast machine is asked for long answers, so that there is time to kill its server in the
middle of them.
"""

CHUNK_TOKENS = (16, 32)
"""Bounds of a chunk: small, so that what it needs for a moment is little beside a row."""

BLOCK_TOKENS = 16
"""Tokens in a block of saved KV: few, so that prompts of some hundred tokens have many."""

SENTENCES = (
    "The ferry leaves the old harbour at a quarter past six.",
    "A baker on the corner sells bread with walnuts and honey.",
    "In winter the lighthouse is painted white by two brothers.",
    "The school choir sings under the big lime tree on Sundays.",
    "Nobody knows who built the stone bridge over the brook.",
    "At low tide the children look for mussels near the pier.",
)

HEROES = ("lighthouse keeper", "baker", "ferry captain", "school teacher")


@dataclass(frozen=True, slots=True)
class Measured:
    """The machine and the tokenizer: `rate` is that of prefill, in tokens a second; `other_tokens`
    of a prompt are not lines.
    """

    rate: float
    tokens_per_line: float
    other_tokens: float


@dataclass(frozen=True, slots=True)
class Plan:
    """`prompts` are in the order of the clients."""

    prompts: tuple[str, ...]
    num_lines: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Memory that holds about one and a half of the requests, in bytes: below `low_bytes` a row is
    let in, over `high_bytes` one is held. `row_bytes` is what one comes to.
    """

    weights_bytes: int
    row_bytes: int
    low_bytes: int
    high_bytes: int
    ceiling_bytes: int
    chunk_tokens: int
    model: ModelFacts

    def holds(self, num_tokens: Iterable[int]) -> bool:
        """Whether there is room for rows of so many tokens and a chunk: while there is none for
        all, one stays held.
        """
        chunk_bytes = self.chunk_tokens * self.model.transient_bytes_per_token
        rows_bytes = sum(row_bytes(self.model, count) for count in num_tokens)
        return self.weights_bytes + rows_bytes + chunk_bytes <= self.low_bytes

    def settings(self) -> dict[str, str]:
        """The same for the server. What is reserved for a row is little, so that all get in."""
        return {
            "FERMATA_MEMORY__CEILING": str(self.ceiling_bytes),
            "FERMATA_MEMORY__LOW_PERMILLE": str(self.low_bytes * 1000 // self.ceiling_bytes),
            "FERMATA_MEMORY__HIGH_PERMILLE": str(self.high_bytes * 1000 // self.ceiling_bytes),
            "FERMATA_MEMORY__HYSTERESIS_PERMILLE": "1",
            "FERMATA_MEMORY__RESERVE": "chunk",
            "FERMATA_MEMORY__MIN_PROGRESS_TOKENS": "32",
            "FERMATA_MEMORY__SAMPLE_MS": "20",  # a fast machine fills it in a moment
            "FERMATA_KV__MEMORY_BYTES": "0",  # what is saved is read from files
        }

    def text(self) -> str:
        """For people."""
        rows = (self.high_bytes - self.weights_bytes) / self.row_bytes
        return (
            f"the ceiling is {size_text(self.ceiling_bytes)}: beside the weights"
            f" ({size_text(self.weights_bytes)}) there is room for {rows:.1f} of the three, which"
            f" grow to {size_text(self.row_bytes)} each"
        )


def lines(count: int, seed: int) -> str:
    """So many numbered sentences, in an order that the seed decides."""
    chance = random.Random(seed)
    return "\n".join(f"{i + 1}. {chance.choice(SENTENCES)}" for i in range(count))


def story_prompt(hero: str, count: int, seed: int) -> str:
    """A prompt with so many lines, that is answered at length."""
    return f"{lines(count, seed)}\n\nWrite a long story about the {hero} of this village."


def make_plan(measured: Measured, model: ModelFacts, seed: int) -> Plan:
    """Three prompts for this tokenizer, and answers that are long enough for this machine and for
    the memory of this model.
    """
    room = PROMPT_TOKENS - measured.other_tokens
    num_lines = max(1, int(room / measured.tokens_per_line))
    heroes = random.Random(seed).sample(HEROES, 3)
    prompts = tuple(
        story_prompt(hero, num_lines, 3 * seed + index) for index, hero in enumerate(heroes)
    )
    fast = min(round(measured.rate * FAST_S), MOST_OUTPUT_TOKENS)
    return Plan(prompts, num_lines, max(fast, least_output_tokens(model)))


def least_output_tokens(model: ModelFacts) -> int:
    """Answers in the middle of which three rows no longer fit."""
    num_steps = 2
    while 3 * row_bytes(model, num_steps * model.kv_step_tokens) <= room_bytes(model, num_steps):
        num_steps += 1
    until_full = (num_steps - 1) * model.kv_step_tokens - PROMPT_TOKENS
    return 3 * until_full // 2 + 40


def room_bytes(model: ModelFacts, num_steps: int) -> int:
    """What there is for rows, when they are planned to take so many steps of memory."""
    memory = make_memory_plan(model, num_steps * model.kv_step_tokens)
    return memory.high_bytes - memory.weights_bytes


def make_memory_plan(model: ModelFacts, num_tokens: int) -> MemoryPlan:
    """The memory for requests that come to so many tokens. The marks leave room for the first step
    of all three and for a chunk, and not for all that they grow to.
    """
    first_bytes = row_bytes(model, 1)
    step_bytes = row_bytes(model, 2 * model.kv_step_tokens) - first_bytes
    shortest, longest = CHUNK_TOKENS
    each_bytes = max(1, model.transient_bytes_per_token)
    chunk_tokens = min(max(first_bytes // (4 * each_bytes), shortest), longest)
    chunk_bytes = chunk_tokens * each_bytes
    full_bytes = row_bytes(model, num_tokens)
    rows_bytes = max(3 * full_bytes // 2, 3 * first_bytes)
    low_bytes = model.weights_bytes + rows_bytes + chunk_bytes + step_bytes // 4
    high_bytes = low_bytes + chunk_bytes + step_bytes // 4  # for what is counted by readings only
    return MemoryPlan(
        weights_bytes=model.weights_bytes,
        row_bytes=full_bytes,
        low_bytes=low_bytes,
        high_bytes=high_bytes,
        ceiling_bytes=high_bytes + max(step_bytes, 2 * chunk_bytes),
        chunk_tokens=chunk_tokens,
        model=model,
    )
