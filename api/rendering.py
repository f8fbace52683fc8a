"""Text and log-probabilities of an answer by position, as a pure function of its tokens.

A reader that begins after position N feeds the tokens up to N again and shows nothing of them, so
what it shows after N is what an uninterrupted reader sees there.
"""

from dataclasses import dataclass

from scheduler.engine.model import Tokenizer
from scheduler.engine.text import TextStream
from scheduler.streams import RequestStream

LEAST_LOGPROB = -9999.0
"""Stands for minus infinity, which JSON does not have; OpenAI's API uses the same number."""


@dataclass(frozen=True, slots=True)
class ShownToken:
    """One output token with what the answer tells of its probability, as text. `offset` is the
    number of characters of all tokens before it.
    """

    offset: int
    text: str
    logprob: float
    top: tuple[tuple[str, float], ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """What may be shown of the tokens up to `position`, since the piece before. `tokens` is null
    when no log-probabilities were asked for.
    """

    position: int
    text: str
    tokens: list[ShownToken] | None


class Progress:
    """One reader's way through a stream. It shows nothing up to position `after`."""

    def __init__(self, stream: RequestStream, tokenizer: Tokenizer, after: int = 0) -> None:
        sampling = stream.parameters.sampling
        end_tokens = () if sampling.ignore_end_of_turn else tokenizer.end_of_turn_ids
        self._stream = stream
        self._tokenizer = tokenizer
        self._text = TextStream(tokenizer.detokenizer, sampling.stop, end_tokens)
        self._after = after
        self._finished = False
        self._held: list[ShownToken] | None = [] if sampling.logprobs else None
        self._num_characters = 0
        self.position = 0

    def take(self, limit: int) -> Piece | None:
        """Feeds up to `limit` tokens that the stream has; returns what may be shown now, or null.

        Tokens that show nothing yet (half a character, what may become a stop string) are kept
        for the next piece.
        """
        text = ""
        for _ in range(min(limit, len(self._stream.tokens) - self.position)):
            text += self._feed()
        text += self._finish()
        if not text and not (self._finished and self._held):
            return None
        held = self._held
        self._held = None if held is None else []
        return Piece(self.position, text, held)

    @property
    def behind(self) -> bool:
        """Whether the stream has tokens that were not fed yet."""
        return self.position < len(self._stream.tokens)

    @property
    def asked_logprobs(self) -> bool:
        """Whether the request asked for log-probabilities."""
        return self._held is not None

    def _feed(self) -> str:
        index = self.position
        token = self._stream.tokens[index]
        self.position += 1
        text = self._text.add(token)
        shown = self._shown(index) if self._held is not None else None
        if self.position <= self._after:
            return ""
        if shown is not None and self._held is not None and self._text.ended != "end_of_turn":
            self._held.append(shown)
        return text

    def _finish(self) -> str:
        """What was held back, once the last token was fed and the answer is known to be whole."""
        end = self._stream.end
        if self._finished or end is None or end.kind != "finished" or self.behind:
            return ""
        self._finished = True
        released = "" if self._text.ended else self._text.finish()
        return released if self.position > self._after else ""

    def _shown(self, index: int) -> ShownToken:
        logprobs = self._stream.logprobs
        assert logprobs is not None, "log-probabilities were asked for and are missing"
        text = self._word(self._stream.tokens[index])
        offset, self._num_characters = self._num_characters, self._num_characters + len(text)
        top = tuple((self._word(other), finite(value)) for other, value in logprobs[index].top)
        return ShownToken(offset, text, finite(logprobs[index].chosen), top)

    def _word(self, token: int) -> str:
        """The text of one token by itself; half a character is the replacement character."""
        detokenizer = self._tokenizer.detokenizer
        detokenizer.add_token(token)
        detokenizer.finalize()
        return detokenizer.last_segment


def finite(logprob: float) -> float:
    """The value as JSON can hold it."""
    return max(logprob, LEAST_LOGPROB)
