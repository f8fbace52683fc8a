"""What the demo asks for, sized by what the machine can do.

Two short prompts are soon decoding; the third is long, so that the kill finds it in the middle of
its prefill. Every prompt is computed twice in all (for the answer, and once more for the
comparison), so their lengths follow the measured prefill rate.
"""

import random
from dataclasses import dataclass

MEASURE_S = 2.0
"""So many seconds of prefill are measured at least."""

MEASURE_LINES = 128
"""The longest prompt that is used for it."""

MEASURE_PROMPTS = 100
"""The most prompts that are used for it. Only a machine with some 80,000 tokens/s needs more, and
its rate is known well enough by then.
"""

LONG_PREFILL_S = 1.5
"""Seconds of prefill that the long prompt's lines are made for, at the measured rate."""

LINE_TOKENS = (80, 2048)
"""Bounds of those lines: enough chunks to be caught in one, and within the model's context."""

OUTPUT_TOKENS = (24, 48, 512)
"""Each answer: on a slow machine, on an ordinary one, and the most. A fast machine is asked for
long answers, since two of them must still be under way when the third prompt is in its prefill.
"""

SLOW_S, FAST_S = 2, 0.2
"""An answer has the tokens that are prefilled in so many seconds: on a slow and a fast machine."""

CHUNK_TOKENS = 8
"""The chunk beside decoding rows: small, so that the long prompt takes many of them."""

BLOCK_TOKENS = 16
"""Tokens in a block of saved KV: few, so that prompts of a few dozen tokens have blocks."""

SAVED_PERMILLE = 250
"""So much of the long prompt is on disk when the kill comes."""

SENTENCES = (
    "The ferry leaves the old harbour at a quarter past six.",
    "A baker on the corner sells bread with walnuts and honey.",
    "In winter the lighthouse is painted white by two brothers.",
    "The school choir sings under the big lime tree on Sundays.",
    "Nobody knows who built the stone bridge over the brook.",
    "At low tide the children look for mussels near the pier.",
)

SHORT_PROMPTS = (
    "Tell me a short story about a lighthouse keeper and a storm.",
    "Explain in simple words how a rainbow comes about.",
    "Describe a market in a small town on an early morning.",
    "Tell me a short story about a fox who wants to learn to swim.",
)


@dataclass(frozen=True, slots=True)
class Measured:
    """The machine and the tokenizer: `rate` is that of prefill, in tokens a second."""

    rate: float
    tokens_per_line: float


@dataclass(frozen=True, slots=True)
class Plan:
    """`prompts` are in the order of the clients, the long one last."""

    prompts: tuple[str, ...]
    num_lines: int
    max_tokens: int


def lines(count: int, seed: int) -> str:
    """So many numbered sentences, in an order that the seed decides."""
    chance = random.Random(seed)
    return "\n".join(f"{i + 1}. {chance.choice(SENTENCES)}" for i in range(count))


def measured_prompt(number: int, count: int, seed: int) -> str:
    """A prompt to measure with. Its beginning is its own, so that nothing of it is saved yet."""
    return f"{number}. measurement.\n{lines(count, seed)}"


def next_count(number: int, count: int, duration_s: float) -> int | None:
    """The lines of the next prompt to measure with, when `number` of them took `duration_s` seconds
    of prefill in all and the last had `count` lines; null when that is enough. They double until
    half of the time is measured: the sum is then at most about twice the least on any machine
    where one line takes less.
    """
    if duration_s >= MEASURE_S or number >= MEASURE_PROMPTS:
        return None
    return count if duration_s >= MEASURE_S / 2 else min(2 * count, MEASURE_LINES)


def make_plan(measured: Measured, seed: int, scale: int) -> Plan:
    """What this machine can do in the time that there is. A scale over 1 asks for more, where the
    usual was done before it could be interrupted.
    """
    line_tokens = scale * min(max(measured.rate * LONG_PREFILL_S, LINE_TOKENS[0]), LINE_TOKENS[1])
    num_lines = max(1, round(line_tokens / measured.tokens_per_line))
    short = random.Random(seed).sample(SHORT_PROMPTS, 2)
    question = "Write one paragraph about the village that these lines describe."
    long = f"{lines(num_lines, seed)}\n\n{question}"
    return Plan((*short, long), num_lines, scale * output_tokens(measured.rate))


def output_tokens(rate: float) -> int:
    """The length of each answer."""
    least, usual, most = OUTPUT_TOKENS
    return round(min(max(least, min(rate * SLOW_S, usual), rate * FAST_S), most))
