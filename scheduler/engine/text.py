"""Text from tokens: what may be shown, and when a stop string ends it.

The engine uses it to see stops, HTTP to render. Both feed one token after the other, so that the
piece that belongs to a token is a pure function of the tokens up to it: feeding them again after a
restart gives the same pieces at the same indexes.
"""

from collections.abc import Collection, Sequence
from typing import Literal, Protocol


class Detokenizer(Protocol):
    """A streaming detokenizer as mlx-lm's tokenizer wrapper hands out: fresh at each access.

    It holds incomplete characters back by itself until `finalize`.
    """

    def add_token(self, token: int) -> None: ...

    def finalize(self) -> None: ...

    @property
    def last_segment(self) -> str:
        """What became readable since this property was read last."""
        ...


class StopMatcher:
    """Cuts a text before the first stop string in it, and holds back what may become one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(string for string in stop if string)
        self._held = ""
        self.matched = False

    def feed(self, piece: str) -> str:
        """Takes the next piece of text; returns what may be shown of it and of what was held."""
        assert not self.matched, "text after a stop string was matched"
        text = self._held + piece
        starts = [start for string in self._stop if (start := text.find(string)) >= 0]
        if starts:
            self.matched = True
            self._held = ""
            return text[: min(starts)]
        shown = len(text) - self._num_held(text)
        self._held = text[shown:]
        return text[:shown]

    def release(self) -> str:
        """What is still held back: the text ended, so it is no stop string any more."""
        held, self._held = self._held, ""
        return held

    def _num_held(self, text: str) -> int:
        """The length of the longest end of `text` that begins a stop string."""
        longest = 0
        for string in self._stop:
            for length in range(min(len(string) - 1, len(text)), longest, -1):
                if text.endswith(string[:length]):
                    longest = length
                    break
        return longest


class TextStream:
    """The text of one answer, token by token. `ended` says why it is over, if a token ended it.

    A token of `end_tokens` ends the turn and is not shown.
    """

    def __init__(
        self, detokenizer: Detokenizer, stop: Sequence[str] = (), end_tokens: Collection[int] = ()
    ) -> None:
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(stop)
        self._end_tokens = frozenset(end_tokens)
        self.ended: Literal["stop", "end_of_turn"] | None = None

    def add(self, token: int) -> str:
        """Takes the next output token; returns the text that may be shown since the one before."""
        assert self.ended is None, f"token {token} after the text ended by {self.ended}"
        if token in self._end_tokens:
            shown = self.finish()
            self.ended = "end_of_turn"
            return shown
        self._detokenizer.add_token(token)
        shown = self._matcher.feed(self._detokenizer.last_segment)
        if self._matcher.matched:
            self.ended = "stop"
        return shown

    def finish(self) -> str:
        """No token follows: returns what was held back, up to a stop string that it completes.

        Empty after a stop.
        """
        if self._matcher.matched:
            return ""
        self._detokenizer.finalize()
        shown = self._matcher.feed(self._detokenizer.last_segment)
        return shown if self._matcher.matched else shown + self._matcher.release()
