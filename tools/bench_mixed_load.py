"""The mixed workload of `fermata bench mixed`: one answer runs, then four prompts come at once.

Whoever plays it says when each token came. Times are seconds since the four were sent.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec

STREAM_TOKENS = 200
"""Output of the answer that runs."""

STREAM_BEFORE = 10
"""Tokens of it that have come when the four are sent."""

PROMPT_TOKENS = (120, 374, 712, 1035)
OUTPUT_TOKENS = 32

STREAM_PROMPT = "Count from one to five hundred in digits, with nothing in between but commas."
WISH = "Repeat these words one after the other, and then go on with words of your own:"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A user's message, and its tokens behind the model's chat template."""

    text: str
    tokens: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Workload:
    """What one round asks for."""

    stream: Prompt
    four: tuple[Prompt, ...]


class Played(msgspec.Struct, frozen=True):
    """When each token came: of the answer that runs, and of each of the four."""

    stream: list[float]
    four: list[list[float]]

    @property
    def longest_gap_s(self) -> float:
        """Between two tokens of the answer that runs, from the moment when the four were sent."""
        return max(gaps(self.stream))

    @property
    def done_s(self) -> float:
        """Until the last token of the four."""
        return max(times[-1] for times in self.four)

    @property
    def first_s(self) -> list[float]:
        """Until the first token of each of the four."""
        return [times[0] for times in self.four]

    @property
    def is_shortest_first(self) -> bool:
        """Whether the shorter of two prompts had its first token before the longer one."""
        return self.first_s == sorted(self.first_s)


def gaps(times: Sequence[float], until: float = float("inf")) -> list[float]:
    """Between two tokens, of which the later one came after the start and the earlier one before
    `until`.
    """
    pairs = pairwise(times)
    return [later - earlier for earlier, later in pairs if later > 0 and earlier < until]


class PromptMaker:
    """Prompts of exact lengths, drawn from a seed, for the model in this folder."""

    def __init__(self, folder: Path, seed: int) -> None:
        from transformers import AutoTokenizer

        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        self.chance = random.Random(seed)
        marks = ("\u0120", "\u2581")  # how tokenizers write the space before a word
        self.words = sorted(
            token[1:]
            for token in self.tokenizer.get_vocab()
            if token[0] in marks and token[1:].isascii() and token[1:].islower()
        )

    def draw(self) -> Workload:
        """One round's prompts. No two begin alike, so that no cache of prefixes helps anybody."""
        stream = Prompt(STREAM_PROMPT, self.encode(STREAM_PROMPT), STREAM_TOKENS)
        return Workload(stream, tuple(self.of_length(length) for length in PROMPT_TOKENS))

    def draw_short(self) -> Workload:
        """As little as warms up whoever plays it."""
        stream = Prompt(STREAM_PROMPT, self.encode(STREAM_PROMPT), STREAM_BEFORE + 2)
        return Workload(stream, (self.of_length(PROMPT_TOKENS[0], max_tokens=2),))

    def of_length(self, num_tokens: int, max_tokens: int = OUTPUT_TOKENS) -> Prompt:
        """A message that is so many tokens long behind the template."""
        words = self.chance.choices(self.words, k=2 * num_tokens)
        num_words = num_tokens // 2
        while True:
            text = " ".join([*words[:2], WISH, *words[2:num_words]])
            tokens = self.encode(text)
            if len(tokens) == num_tokens:
                return Prompt(text, tokens, max_tokens)
            if len(tokens) > num_tokens:  # a word of several tokens stands where one is too many
                del words[num_words - 1]
                num_words -= 1
            else:
                num_words += max(1, (num_tokens - len(tokens)) // 2)

    def encode(self, text: str) -> tuple[int, ...]:
        """The tokens of a conversation of this one message."""
        found = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=False
        )
        return tuple(found)
