"""What a client was sent of one answer, against the tokens that the journal has of it."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scheduler.engine.text import Detokenizer
from tools.crash_clients import Attempt


@dataclass(frozen=True)
class Output:
    """A request's output. `texts` is what may be shown of its first n tokens, for each n, and
    `whole` what is shown once it is known that no more come: half a character is one that is none.
    """

    texts: Sequence[str]
    whole: str
    logprobs: Sequence[float] | None = None

    @classmethod
    def of(
        cls, tokens: Sequence[int], logprobs: Sequence[float] | None, detokenizer: Detokenizer
    ) -> "Output":
        """That of these tokens, which came to no stop string. `detokenizer` is fresh."""
        texts = [""]
        for token in tokens:
            detokenizer.add_token(token)
            texts.append(texts[-1] + detokenizer.last_segment)
        detokenizer.finalize()
        return cls(texts, texts[-1] + detokenizer.last_segment, logprobs)

    @property
    def num_tokens(self) -> int:
        return len(self.texts) - 1

    def may_be(self, sent: str, position: int) -> bool:
        """Whether this may have been sent up to a position."""
        return sent == self.texts[position] or (position == self.num_tokens and sent == self.whole)


def problems_of_delivery(attempt: Attempt, known: Output) -> Iterator[str]:
    """What differs, one line each."""
    sent, last = "", 0
    for position, piece in attempt.pieces:
        sent += piece
        if position <= last:
            yield f"position {position} after {last}"
        if position > known.num_tokens:
            yield f"position {position}, but only {known.num_tokens} tokens are known"
            return
        if not known.may_be(sent, position):
            expected = known.texts[position]
            yield f"up to position {position} {sent[-40:]!r} was sent, not {expected[-40:]!r}"
            return
        last = position
    if attempt.is_done and attempt.error is None:
        yield from problems_of_end(attempt, sent, known)


def problems_of_end(attempt: Attempt, sent: str, known: Output) -> Iterator[str]:
    """What is wrong with an answer that came to its end."""
    if attempt.finish is None:
        yield "no finish reason was sent"
    if sent != known.whole:
        yield f"the whole answer is {known.whole[-40:]!r}, sent was {sent[-40:]!r}"
    if known.logprobs is not None:
        values = [value for _, value in attempt.tokens]
        if values != list(known.logprobs):
            yield f"{len(values)} log-probabilities were sent, not the {len(known.logprobs)}"


@dataclass
class Tally:
    """Tokens by what became of them on their way. A piece that differs counts with all its
    tokens.
    """

    num_tokens: int = 0
    num_lost: int = 0
    num_changed: int = 0
    num_doubled: int = 0

    @property
    def num_bad(self) -> int:
        return self.num_lost + self.num_changed + self.num_doubled

    def add(self, attempt: Attempt, known: Output) -> None:
        """One answer."""
        last = 0
        for position, piece in attempt.pieces:
            if position <= last:
                self.num_doubled += last - position + 1
                continue
            self.num_tokens += position - last
            if position > known.num_tokens or not known.may_be(known.texts[last] + piece, position):
                self.num_changed += position - last
            last = position
        is_whole = attempt.is_done and attempt.error is None
        if is_whole and not known.may_be(known.whole, last):
            self.num_lost += known.num_tokens - last
