"""One request's row in the engine: its tokens, its caches, its sampler and its stop matcher.

A row is a function of its tokens. `cached` counts the positions that its caches hold; the token
behind them is pending. While a step is launched and not yet read, the pending token is a lazy
array.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from scheduler.engine import attention
from scheduler.engine.arrays import floats, integers, number
from scheduler.engine.base import EndReason, RowTokens, StartRow, TokenLogprobs
from scheduler.engine.model import Tokenizer
from scheduler.engine.sampling import RowSampler
from scheduler.engine.text import TextStream
from scheduler.parameters import SamplingParameters


@dataclass(eq=False)
class Row:
    """Made by `make_row`. Rows are compared by identity: a number can come back after a failure."""

    number: int
    start: StartRow
    tokens: list[int]
    caches: attention.Caches
    sampler: RowSampler
    text: TextStream | None
    end_tokens: frozenset[int]
    cached: int = 0
    pending: mx.array | None = None
    ended: bool = False
    """No token of it is wanted any more: it ended, failed or was dropped."""
    dropped: bool = False
    broken: bool = False
    """Its work raised: what its caches hold is not to be believed."""

    @classmethod
    def failed(cls, start: StartRow) -> "Row":
        """A row that could not be made: it stands for its number until it is dropped."""
        sampler = RowSampler(SamplingParameters(seed=0), 0, (), ())
        row = cls(start.number, start, list(start.token_ids), [], sampler, None, frozenset())
        row.ended = row.broken = True
        return row

    @property
    def num_output_tokens(self) -> int:
        """The output tokens that are known; `sampler.index` also counts those launched."""
        return len(self.tokens) - self.start.num_prompt_tokens

    @property
    def may_launch(self) -> bool:
        """Whether another decode step may feed its pending token."""
        return not self.ended and self.sampler.index < self.start.max_tokens

    def accept(self, token: int) -> EndReason | None:
        """Takes an output token that has been read; says whether it ends the row, and why."""
        self.tokens.append(token)
        reason = self._reason(token)
        self.ended = reason is not None
        return reason

    def _reason(self, token: int) -> EndReason | None:
        if token in self.end_tokens:
            return "end_of_turn"
        if self.text is not None:
            self.text.add(token)
            if self.text.ended is not None:
                return self.text.ended
        if self.num_output_tokens >= self.start.max_tokens:
            return "length"
        return None

    def pending_array(self) -> mx.array:
        """The token that the next decode step feeds, shape (1,); lazy while its step computes."""
        if self.pending is not None:
            return self.pending
        return mx.array(self.tokens[-1:], dtype=mx.uint32)

    def release(self) -> None:
        """Lets go of the row's arrays; it is not used after that."""
        self.caches, self.pending = [], None
        self.ended = self.dropped = True

    def settle(self) -> None:
        """Sets sampler and pending token to what the known tokens say, after a broken step."""
        self.sampler = _make_sampler(self.start, self.tokens, self.sampler.num_vocabulary)
        self.pending = None


def make_row(
    start: StartRow,
    caches: attention.Caches,
    num_vocabulary: int,
    tokenizer: Tokenizer,
) -> Row:
    """The row with empty caches that `start` describes. Raises ValueError when it names tokens
    that the model does not have, or when its output is complete already.
    """
    unknown = [token for token in start.token_ids if not 0 <= token < num_vocabulary]
    if unknown:
        raise ValueError(f"token {unknown[0]} is not among the model's {num_vocabulary}")
    output = start.token_ids[start.num_prompt_tokens :]
    ends = () if start.sampling.ignore_end_of_turn else tokenizer.end_of_turn_ids
    stop = start.sampling.stop
    row = Row(
        number=start.number,
        start=start,
        tokens=list(start.token_ids[: start.num_prompt_tokens]),
        caches=caches,
        sampler=_make_sampler(start, start.token_ids, num_vocabulary),
        text=TextStream(tokenizer.detokenizer, stop) if stop else None,
        end_tokens=frozenset(ends),
    )
    for token in output:
        if row.accept(token) is not None:
            raise ValueError(f"the output of {start.request_id} is complete, nothing is to decode")
    return row


def _make_sampler(start: StartRow, tokens: Sequence[int], num_vocabulary: int) -> RowSampler:
    prompt, output = tokens[: start.num_prompt_tokens], tokens[start.num_prompt_tokens :]
    return RowSampler(start.sampling, num_vocabulary, prompt, output)


def row_tokens(
    row: Row,
    token: int,
    reason: EndReason | None,
    logprobs: tuple[mx.array, mx.array, mx.array] | None,
) -> RowTokens:
    """The result for one token; `logprobs` as in `sampling.Draws`, evaluated."""
    read = None
    if logprobs is not None:
        chosen, top, values = logprobs
        pairs = zip(integers(top), floats(values), strict=True)
        read = (TokenLogprobs(number(chosen), tuple(pairs)),)
    return RowTokens(row.number, (token,), reason, read)
