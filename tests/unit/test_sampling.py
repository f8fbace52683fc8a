"""Penalties and draws, against sums done by hand and against the distribution they promise."""

import math
from collections import Counter
from typing import Any

import mlx.core as mx
import pytest

from scheduler.engine.arrays import floats, integers, number
from scheduler.engine.sampling import RowSampler, draw, uniform
from scheduler.parameters import SamplingParameters

pytestmark = pytest.mark.engine

LOGITS = [2.0, 1.0, 0.5, -1.0, -3.0, 0.0]


def sampler(
    prompt: tuple[int, ...] = (), output: tuple[int, ...] = (), **settings: Any
) -> RowSampler:
    given: dict[str, Any] = {"seed": 5, **settings}
    return RowSampler(SamplingParameters(**given), len(LOGITS), prompt, output)


def adjusted(one: RowSampler) -> list[float]:
    return floats(one.adjust(mx.array(LOGITS)))


def draw_at(index: int, **settings: Any) -> int:
    """The token that the row draws as its output token with this index."""
    return tokens_of(mx.array([LOGITS]), [sampler(output=(0,) * index, **settings)])[0]


def tokens_of(logits: mx.array, samplers: list[RowSampler]) -> list[int]:
    return integers(draw(logits, samplers).tokens)


def probabilities(logits: list[float]) -> list[float]:
    total = sum(math.exp(value) for value in logits)
    return [math.exp(value) / total for value in logits]


def test_repetition_penalty_divides_what_is_above_zero_and_multiplies_what_is_below() -> None:
    found = adjusted(sampler(prompt=(0, 3), output=(1, 1), repetition_penalty=2.0))
    assert found == [1.0, 0.5, 0.5, -2.0, -3.0, 0.0]


def test_presence_penalty_counts_a_token_of_the_output_once() -> None:
    found = adjusted(sampler(prompt=(0,), output=(1, 1, 2), presence_penalty=0.25))
    assert found == [2.0, 0.75, 0.25, -1.0, -3.0, 0.0]


def test_frequency_penalty_counts_it_each_time() -> None:
    found = adjusted(sampler(prompt=(0,), output=(1, 1, 2), frequency_penalty=0.25))
    assert found == [2.0, 0.5, 0.25, -1.0, -3.0, 0.0]


def test_bias_is_added_after_the_penalties() -> None:
    found = adjusted(sampler(output=(0,), repetition_penalty=2.0, logit_bias={0: 8.0, 4: -1.0}))
    assert found == [9.0, 1.0, 0.5, -1.0, -4.0, 0.0]


def test_drawn_tokens_count_like_known_ones() -> None:
    settings = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.5}
    grown = sampler(prompt=(2,), output=(1,), **settings)
    grown.take(mx.array([4]))
    grown.take(mx.array([1]))
    known = sampler(prompt=(2,), output=(1, 4, 1), **settings)
    assert grown.index == known.index == 3
    assert adjusted(grown) == adjusted(known)


def test_bias_for_an_unknown_token_is_refused() -> None:
    with pytest.raises(ValueError, match="token 6"):
        sampler(logit_bias={6: 1.0})


def test_no_temperature_takes_the_most_likely_token() -> None:
    assert {draw_at(index) for index in range(20)} == {0}
    assert {draw_at(index, temperature=1e-12) for index in range(20)} == {0}


def test_draws_follow_the_distribution() -> None:
    count = 4000
    rows = [sampler(seed=index, temperature=1.5) for index in range(count)]
    drawn = Counter(tokens_of(mx.array([LOGITS] * count), rows))
    for token, share in enumerate(probabilities([value / 1.5 for value in LOGITS])):
        deviation = math.sqrt(share * (1 - share) / count)
        assert drawn[token] / count == pytest.approx(share, abs=5 * deviation)


@pytest.mark.parametrize(
    ("settings", "allowed"),
    [
        ({"top_k": 2}, {0, 1}),
        ({"top_k": 100}, set(range(6))),
        # 0.53, 0.19, 0.12, 0.07 and little: the fewest that hold the share together.
        ({"top_p": 0.5}, {0}),
        ({"top_p": 0.7}, {0, 1}),
        ({"top_p": 0.8}, {0, 1, 2}),
        ({"min_p": 0.3}, {0, 1}),
        ({"min_p": 0.2}, {0, 1, 2}),
        ({"top_k": 3, "top_p": 0.8}, {0, 1}),
        ({"top_p": 1e-9}, {0}),
    ],
)
def test_filters_leave_these_tokens(settings: dict[str, Any], allowed: set[int]) -> None:
    rows = [sampler(seed=seed, temperature=1.0, **settings) for seed in range(1500)]
    assert set(tokens_of(mx.array([LOGITS] * len(rows)), rows)) == allowed


def test_draw_depends_on_seed_and_index_and_not_on_the_neighbours() -> None:
    logits = mx.random.normal((40, 50), key=mx.random.key(3))
    settings = [
        SamplingParameters(
            seed=row,
            temperature=0.5 * (row % 3),
            top_p=(1.0, 0.7)[row % 2],
            top_k=(0, 5, 20)[row % 3],
            min_p=(0.0, 0.05)[row // 20],
            presence_penalty=float(row % 5 == 0),
        )
        for row in range(40)
    ]

    def rows(which: range) -> list[RowSampler]:
        return [RowSampler(settings[row], 50, (1, 2), (3,) * row) for row in which]

    together = tokens_of(logits, rows(range(40)))
    alone = [tokens_of(logits[row : row + 1], rows(range(row, row + 1))) for row in range(40)]
    assert [[token] for token in together] == alone
    assert len(set(together)) > 10


def test_each_index_has_its_own_draw() -> None:
    assert {draw_at(index, temperature=1.5) for index in range(200)} == set(range(6))


def test_uniform_numbers_are_spread_over_the_unit_interval() -> None:
    values = [uniform(seed, index) for seed in range(50) for index in range(50)]
    assert all(0 <= value < 1 for value in values)
    assert len(set(values)) == len(values)
    assert sum(values) / len(values) == pytest.approx(0.5, abs=0.03)
    assert uniform(1, 23) != uniform(12, 3)


def test_logprobs_are_those_of_the_logits_after_the_penalties() -> None:
    one = sampler(output=(0,), logprobs=True, top_logprobs=3, frequency_penalty=4.0)
    drawn = draw(mx.array([LOGITS]), [one])
    assert drawn.logprobs[0] is not None
    chosen, top, values = drawn.logprobs[0]
    expected = [math.log(share) for share in probabilities([-2.0, *LOGITS[1:]])]
    assert integers(top) == [1, 2, 5]
    assert floats(values) == pytest.approx([expected[token] for token in (1, 2, 5)], abs=1e-6)
    assert number(chosen) == pytest.approx(expected[1], abs=1e-6)


def test_not_a_number_shows_in_the_normalizer_of_its_row_only() -> None:
    logits = mx.array([LOGITS, [*LOGITS[:-1], float("nan")], LOGITS])
    normalizers = floats(draw(logits, [sampler(), sampler(), sampler()]).normalizers)
    assert [math.isfinite(one) for one in normalizers] == [True, False, True]
