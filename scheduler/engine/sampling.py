"""From logits to tokens.

A draw depends on the row's logits, its settings and (seed, output index), on nothing else: there is
no generator whose state would have to be kept, and a row's draws do not change with its neighbours.
So the whole state of a row's sampler is made again from its tokens.

Order: repetition penalty over prompt and output, as Keskar et al. (arXiv 1909.05858) put it;
presence and frequency penalty over the output and the bias, as OpenAI's API describes them; the
log-probabilities that are reported are those of the logits up to here. Then, where the temperature
is not 0: temperature, min-p, top-k, top-p, and the draw by inversion of the cumulated
probabilities. Temperature 0 takes the most likely token.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx

from scheduler.parameters import SamplingParameters

GREEDY_BELOW = 1e-4
"""A temperature under this is taken as 0: dividing by it would leave the range of float32."""


def uniform(seed: int, index: int) -> float:
    """A number in [0, 1) for the output token with this index, out of 23 hashed bits: exact in
    float32, and its product with a sum of probabilities stays below that sum.
    """
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 41) / (1 << 23)


class RowSampler:
    """One row's settings, and the counts of its tokens where penalties need them.

    `take` is called once for each output token, in order, with a token that may be lazy. Raises
    ValueError when the settings name a token that the model does not have.
    """

    def __init__(
        self,
        settings: SamplingParameters,
        num_vocabulary: int,
        prompt: Sequence[int],
        output: Sequence[int],
    ) -> None:
        self.settings = settings
        self.num_vocabulary = num_vocabulary
        self.index = len(output)
        self._bias = _dense_bias(settings.logit_bias, num_vocabulary)
        self._output_counts: mx.array | None = None
        self._all_counts: mx.array | None = None
        if settings.presence_penalty or settings.frequency_penalty:
            self._output_counts = _counts(output, num_vocabulary)
        if settings.repetition_penalty != 1.0:
            self._all_counts = _counts([*prompt, *output], num_vocabulary)

    @property
    def changes_logits(self) -> bool:
        """Whether `adjust` does anything."""
        return not (self._bias is None and self._output_counts is None and self._all_counts is None)

    def adjust(self, logits: mx.array) -> mx.array:
        """Applies penalties and bias to the row's logits, shape (vocabulary,), float32."""
        settings = self.settings
        if self._all_counts is not None:
            penalty = settings.repetition_penalty
            penalised = mx.where(logits < 0, logits * penalty, logits / penalty)
            logits = mx.where(self._all_counts > 0, penalised, logits)
        if self._output_counts is not None:
            counts = self._output_counts
            logits = logits - settings.frequency_penalty * counts
            logits = logits - settings.presence_penalty * (counts > 0)
        return logits if self._bias is None else logits + self._bias

    def take(self, token: mx.array) -> None:
        """Counts the token, shape (1,), that was drawn for the current index."""
        self.index += 1
        if self._output_counts is not None:
            self._output_counts = self._output_counts.at[token].add(1.0)
        if self._all_counts is not None:
            self._all_counts = self._all_counts.at[token].add(1.0)


def _dense_bias(logit_bias: dict[int, float], num_vocabulary: int) -> mx.array | None:
    if not logit_bias:
        return None
    bias = [0.0] * num_vocabulary
    for token, value in logit_bias.items():
        if not 0 <= token < num_vocabulary:
            raise ValueError(f"logit_bias names token {token}; the model has {num_vocabulary}")
        bias[token] = value
    return mx.array(bias, dtype=mx.float32)


def _counts(tokens: Sequence[int], num_vocabulary: int) -> mx.array:
    counts = [0.0] * num_vocabulary
    for token in tokens:
        counts[token] += 1.0
    return mx.array(counts, dtype=mx.float32)


@dataclass(frozen=True, slots=True)
class Draws:
    """The lazy outcome of one step for some rows.

    `tokens` and `normalizers` have the shape (rows,). A normalizer is the log of the sum of a
    row's exponentiated logits: not finite exactly when the logits are no numbers. `logprobs` is
    per row (chosen, top token ids, top values) where it was asked for.
    """

    tokens: mx.array
    normalizers: mx.array
    logprobs: tuple[tuple[mx.array, mx.array, mx.array] | None, ...]

    def arrays(self) -> list[mx.array]:
        """All that has to be evaluated before the outcome can be read."""
        asked = [array for logprobs in self.logprobs if logprobs for array in logprobs]
        return [self.tokens, self.normalizers, *asked]


def draw(logits: mx.array, samplers: Sequence[RowSampler]) -> Draws:
    """Chooses one token for each row of `logits`, shape (rows, vocabulary). Builds the graph only:
    nothing is evaluated.
    """
    logits = logits.astype(mx.float32)
    if any(sampler.changes_logits for sampler in samplers):
        rows = [sampler.adjust(logits[row]) for row, sampler in enumerate(samplers)]
        logits = mx.stack(rows)
    tokens = mx.argmax(logits, axis=-1)
    if any(sampler.settings.temperature >= GREEDY_BELOW for sampler in samplers):
        tokens = _draw_by_temperature(logits, tokens, samplers)
    tokens = tokens.astype(mx.uint32)
    normalizers = mx.logsumexp(logits, axis=-1)
    for row, sampler in enumerate(samplers):
        sampler.take(tokens[row : row + 1])
    logprobs = tuple(
        _logprobs(logits[row] - normalizers[row], tokens[row], sampler.settings)
        for row, sampler in enumerate(samplers)
    )
    return Draws(tokens, normalizers, logprobs)


def _logprobs(
    values: mx.array, token: mx.array, settings: SamplingParameters
) -> tuple[mx.array, mx.array, mx.array] | None:
    if not settings.logprobs:
        return None
    top = mx.argsort(-values)[: settings.top_logprobs].astype(mx.uint32)
    return values[token], top, values[top]


def _column(values: list[float]) -> mx.array:
    return mx.array(values, dtype=mx.float32)[:, None]


def _draw_by_temperature(
    logits: mx.array, greedy: mx.array, samplers: Sequence[RowSampler]
) -> mx.array:
    settings = [sampler.settings for sampler in samplers]
    greedy_rows = [one.temperature < GREEDY_BELOW for one in settings]
    scaled = logits / _column([max(one.temperature, GREEDY_BELOW) for one in settings])
    allowed = _nucleus(_min_p(scaled, settings), settings)
    cumulated = mx.cumsum(mx.softmax(allowed, axis=-1), axis=-1)
    marks = _column([uniform(sampler.settings.seed, sampler.index) for sampler in samplers])
    reached = (cumulated > marks * cumulated[:, -1:]).astype(mx.int32)
    return mx.where(mx.array(greedy_rows), greedy, mx.argmax(reached, axis=-1))


def _min_p(scaled: mx.array, settings: Sequence[SamplingParameters]) -> mx.array:
    """Leaves the tokens that are at least `min_p` times as likely as the most likely one."""
    if not any(one.min_p > 0 for one in settings):
        return scaled
    least = mx.log(_column([one.min_p for one in settings]))
    return mx.where(scaled < scaled.max(axis=-1, keepdims=True) + least, -mx.inf, scaled)


def _nucleus(scaled: mx.array, settings: Sequence[SamplingParameters]) -> mx.array:
    """Leaves the `top_k` most likely tokens, and of these the fewest that hold `top_p` together.

    Tokens that are as likely as the last one left are left, too.
    """
    if not any(one.top_k > 0 or one.top_p < 1 for one in settings):
        return scaled
    num_vocabulary = scaled.shape[-1]
    ordered = -mx.sort(-scaled, axis=-1)
    numbers = [one.top_k if one.top_k > 0 else num_vocabulary for one in settings]
    last = mx.array([min(number, num_vocabulary) - 1 for number in numbers], dtype=mx.int32)
    least = mx.take_along_axis(ordered, last[:, None], axis=-1)
    ordered = mx.where(ordered < least, -mx.inf, ordered)
    probabilities = mx.softmax(ordered, axis=-1)
    before = mx.cumsum(probabilities, axis=-1, inclusive=False)
    top_p = _column([one.top_p for one in settings])
    kept = mx.maximum((before < top_p).sum(axis=-1, keepdims=True), 1)
    edge = mx.take_along_axis(ordered, kept - 1, axis=-1)
    least = mx.maximum(least, mx.where(top_p < 1, edge, -mx.inf))
    return mx.where(scaled < least, -mx.inf, scaled)
