"""From a request's words to token ids, in one thread of its own.

Tokenizing half a megabyte takes a fifth of a second, so it never happens on the event loop; the
tokenizer is not made for several threads, so there is only one.
"""

import asyncio
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from api.errors import ApiError, invalid
from api.messages import CanonicalMessage
from api.template import count_suffix_tokens, keeps_answer, suffix_of
from scheduler.engine.model import Tokenizer

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in tokens. See `Arrival` for what the other two say of its end and its answer."""

    token_ids: "array[int]"
    num_suffix_tokens: int = 0
    keep_output: bool = True


class Preparer:
    """The tokenizer's thread, and how many requests may be on their way to it."""

    def __init__(self, max_preparing: int) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        self.turns = asyncio.Semaphore(max_preparing)

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, called in the tokenizer's thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def close(self) -> None:
        """Ends the thread after what it is doing; what waits for it is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)


def chat_prompt(
    tokenizer: Tokenizer,
    messages: list[CanonicalMessage],
    tools: list[dict[str, object]] | None,
) -> Prompt:
    """A conversation, up to where the answer begins. Tokenizer's thread.

    Raises ApiError for messages that the model's chat template refuses.
    """
    try:
        text = tokenizer.render_chat(messages, tools=tools or None, add_generation_prompt=True)
        closed = tokenizer.render_chat(messages, tools=tools or None, add_generation_prompt=False)
    except ValueError as error:
        raise invalid("messages", str(error)) from error
    token_ids = token_array(tokenizer.encode(text), "messages")
    suffix = suffix_of(text, closed)
    return Prompt(
        token_ids,
        count_suffix_tokens(tokenizer, text, suffix, token_ids),
        keeps_answer(tokenizer, suffix, has_tools=bool(tools)),
    )


def text_prompt(tokenizer: Tokenizer, text: str) -> Prompt:
    """A plain prompt. Tokenizer's thread."""
    return Prompt(token_array(tokenizer.encode(text), "prompt"))


def token_prompt(tokenizer: Tokenizer, token_ids: list[int]) -> Prompt:
    """A prompt that came as token ids. Raises ApiError for one that the model does not have."""
    for index, token in enumerate(token_ids):
        if not 0 <= token < tokenizer.vocab_size:
            most = tokenizer.vocab_size - 1
            raise invalid(f"prompt[{index}]", f"this is no token id of the model (0 to {most})")
    return Prompt(token_array(token_ids, "prompt"))


def token_array(token_ids: list[int], param: str) -> "array[int]":
    """Token ids in their compact form. Raises ApiError when there are none."""
    if not token_ids:
        raise empty_prompt(param)
    return array("I", token_ids)


def empty_prompt(param: str) -> ApiError:
    """The 400 for a prompt of no tokens: there is nothing to go on from."""
    return invalid(param, "the prompt has no tokens")
