"""What a model's chat template does to the end of a prompt and to thinking in earlier turns.

Neither is known by the model's name: both are found out by rendering.
"""

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from scheduler.engine.model import Tokenizer

WINDOW_CHARACTERS = 256
"""Characters before the generation suffix that are tokenized again, to see where its tokens begin:
longer than any word, and most often with a special token inside.
"""

MAX_TOKENIZERS = 4
"""Tokenizers whose templates are remembered. A server has one; a test process has several."""

THINK, END_OF_THINKING = "<think>", "</think>"
THOUGHT, SAID = "a thought to look for", "an answer to look for"

Messages = Sequence[Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class ThinkingHabit:
    """Whether the template leaves the thinking of an earlier answer out: when a user speaks next,
    and when a tool does.
    """

    strips_before_user: bool
    strips_before_tool: bool


@lru_cache(MAX_TOKENIZERS)
def thinking_habit(tokenizer: Tokenizer) -> ThinkingHabit:
    """What the template does with a short conversation. Tokenizer's thread, once per model."""
    question = {"role": "user", "content": "a question"}
    answer = {"role": "assistant", "content": f"{THINK}\n{THOUGHT}\n{END_OF_THINKING}\n\n{SAID}"}
    call: dict[str, object] = {"type": "function", "function": {"name": "look", "arguments": {}}}
    result = {"role": "tool", "content": "a result"}
    return ThinkingHabit(
        strips(tokenizer, [question, answer, question]),
        strips(tokenizer, [question, {**answer, "tool_calls": [call]}, result]),
    )


def strips(tokenizer: Tokenizer, messages: Messages) -> bool:
    """Whether the answer is in the rendered text, and its thought is not. A template that refuses
    such messages has no habit.
    """
    try:
        text = tokenizer.render_chat(messages, add_generation_prompt=True)
    except ValueError:
        return False
    return SAID in text and THOUGHT not in text


def will_think(tokenizer: Tokenizer, suffix: str) -> bool:
    """Whether an answer that begins behind this suffix thinks first: the suffix opens the thinking
    and does not close it, or says nothing about it and the model has a token to open it with.
    """
    opened, closed = suffix.rfind(THINK), suffix.rfind(END_OF_THINKING)
    if max(opened, closed) >= 0:
        return opened > closed
    return len(tokenizer.encode(THINK)) == 1


def keeps_answer(tokenizer: Tokenizer, suffix: str, *, has_tools: bool) -> bool:
    """Whether a later prompt can hold the answer as it is put out. With tools the next turn may be
    a tool's, and many templates keep the thinking until the user speaks again.
    """
    habit = thinking_habit(tokenizer)
    stripped = habit.strips_before_tool if has_tools else habit.strips_before_user
    return not (stripped and will_think(tokenizer, suffix))


def num_shared(one: Sequence[object], other: Sequence[object]) -> int:
    """How far two sequences are the same."""
    pairs = zip(one, other, strict=False)
    return next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def suffix_of(text: str, closed: str) -> str:
    """What the template adds to open the answer: `text` was rendered with it, `closed` without."""
    shared = len(closed) if text.startswith(closed) else num_shared(text, closed)
    return text[shared:]


def count_suffix_tokens(
    tokenizer: Tokenizer, text: str, suffix: str, token_ids: "array[int]"
) -> int:
    """How many of the prompt's last tokens belong to the suffix. Only the end of the text is
    tokenized again; 0 where its tokens are not those at the prompt's end.
    """
    if not suffix:
        return 0
    begin = max(0, len(text) - len(suffix) - WINDOW_CHARACTERS)
    with_suffix = tokenizer.encode(text[begin:])
    without = tokenizer.encode(text[begin : len(text) - len(suffix)])
    tail = with_suffix[num_shared(with_suffix, without) :]
    return len(tail) if tail == token_ids[-len(tail) :].tolist() else 0
