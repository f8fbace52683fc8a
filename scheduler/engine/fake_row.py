"""A row of the fake engine: tokens that can be told from any others, and KV that is the tokens
that were fed.
"""

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Literal
from zlib import crc32

from scheduler.engine.base import EndReason, StartRow, TokenLogprobs
from scheduler.engine.fake_tokenizer import FakeTokenizer
from scheduler.engine.text import TextStream

CHARACTERS = bytes(range(0x20, 0x7F))
TWO_BYTES = {7: 0xC3, 8: 0xA9}
"""At these places of every 16 output tokens stand the two halves of one character (é)."""


def prompt_digest(prompt: Iterable[int]) -> bytes:
    """What of the prompt the tokens depend on."""
    return sha256(array("I", prompt).tobytes()).digest()


def draw(digest: bytes, index: int, nonce: int) -> int:
    """64 bits for the output token at this index."""
    seed = digest + index.to_bytes(8, "little") + nonce.to_bytes(8, "little")
    return int.from_bytes(sha256(seed).digest()[:8], "little")


def fake_token(digest: bytes, index: int, nonce: int) -> int:
    """A printable byte, or half of a character of two bytes."""
    half = TWO_BYTES.get(index % 16)
    return half if half is not None else CHARACTERS[draw(digest, index, nonce) % len(CHARACTERS)]


def fake_logprobs(token: int, drawn: int, num_top: int) -> TokenLogprobs:
    """Values that a float32 holds exactly, the most likely first, the token itself among them."""
    chosen = -(drawn % 512) / 512
    others = ((32 + (token + 1 + i) % 95, chosen - (i + 1) / 512) for i in range(num_top - 1))
    return TokenLogprobs(chosen, ((token, chosen), *others) if num_top else ())


Phase = Literal["start", "prefill", "decode"]


@dataclass(slots=True)
class Failure:
    """A failure to come: of row `number`, in this work, once `at` tokens are cached or put out."""

    number: int
    during: Phase
    at: int = 0
    error: str = "a scripted failure"


@dataclass(slots=True)
class FakeCache:
    """A fake row's KV: the tokens that were fed, so that what is saved and restored can be told
    from anything else. `state` stands for layers that cannot be cut, where the model has any: a
    digest of all tokens so far, which only goes forward.
    """

    tokens: "array[int]" = field(default_factory=lambda: array("I"))
    state: int | None = None

    def feed(self, tokens: "array[int]") -> None:
        """The next positions."""
        self.tokens.extend(tokens)
        if self.state is not None:
            self.state = crc32(tokens.tobytes(), self.state)


@dataclass(slots=True)
class FakeRow:
    """A row: its known tokens, and its caches, the first `num_checked` of which were compared with
    them: a long row must not be compared anew for each token. Its caches have room for
    `room_tokens` positions at least, and take `held_bytes`.
    """

    number: int
    tokens: list[int]
    num_prompt_tokens: int
    max_tokens: int
    digest: bytes
    text: TextStream
    ends_turn: bool
    num_top: int | None
    caches: list[FakeCache]
    ended: EndReason | None = None
    failed: bool = False
    num_checked: int = 0
    room_tokens: int = 0
    held_bytes: int = 0

    @property
    def num_cached_tokens(self) -> int:
        """The positions that its caches hold."""
        return len(self.caches[0].tokens)

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens) - self.num_prompt_tokens

    def feed(self, end: int) -> None:
        """Its caches hold the first `end` tokens from here on."""
        cache, num_kept = self.caches[0], self.num_cached_tokens
        if self.num_checked < num_kept:
            known = array("I", self.tokens[:num_kept])
            assert cache.tokens == known, f"row {self.number} holds other tokens' KV"
            state = None if cache.state is None else crc32(known.tobytes())
            assert cache.state == state, f"row {self.number} holds the state of other tokens"
        cache.feed(array("I", self.tokens[num_kept:end]))
        self.num_checked = self.num_cached_tokens

    @property
    def decodes(self) -> bool:
        return self.ended is None and not self.failed


def make_row(command: StartRow, turn_tokens: int, cache: FakeCache) -> FakeRow:
    """A row with this empty cache, whose text has seen the output so far."""
    tokenizer = FakeTokenizer()
    sampling = command.sampling
    ends = () if sampling.ignore_end_of_turn else tuple(tokenizer.end_of_turn_ids)
    text = TextStream(tokenizer.detokenizer, sampling.stop, ends)
    for token in command.token_ids[command.num_prompt_tokens :]:
        text.add(token)
    return FakeRow(
        number=command.number,
        tokens=list(command.token_ids),
        num_prompt_tokens=command.num_prompt_tokens,
        max_tokens=command.max_tokens,
        digest=prompt_digest(command.token_ids[: command.num_prompt_tokens]),
        text=text,
        ends_turn=turn_tokens > 0 and not sampling.ignore_end_of_turn,
        num_top=sampling.top_logprobs if sampling.logprobs else None,
        caches=[cache],
    )


def assert_boundary(row: FakeRow) -> None:
    """The last known token is pending: drawn, not fed."""
    assert row.num_cached_tokens == len(row.tokens) - 1, (
        f"row {row.number}: {row.num_cached_tokens} cached of {len(row.tokens)} known tokens"
    )
