"""Rows that are decoded together equal rows that mlx-lm decodes alone: bit for bit on the stock CPU
wheel, else closely.
"""

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import base
from mlx_lm.models.cache import RotatingKVCache

from scheduler.engine import attention
from scheduler.parameters import SamplingParameters
from tests.engine.driver import Driver
from tests.engine.models import (
    STOCK,
    TOLERANCE,
    TinyModel,
    decode_alone,
    numbers,
    same_caches,
    same_logprobs,
)

pytestmark = pytest.mark.engine

MODELS = ("plain", "hybrid", "llama", "gemma3_text", "gpt_oss")
LENGTHS = {1: 3, 2: 41, 3: 17}
TOP = SamplingParameters(seed=1, logprobs=True, top_logprobs=20)


def check_row(driver: Driver, number: int, prompt: tuple[int, ...]) -> None:
    """The row has the tokens, log-probabilities and cache bytes that mlx-lm alone gives it, and
    holds all positions but that of its last token.
    """
    row = driver.row(number)
    tokens = driver.tokens(number)
    caches = row.caches
    assert attention.positions(caches) <= {row.cached}
    # A step that was launched ahead is among the positions, so it is computed alone, too.
    alone = decode_alone(driver.model.model, prompt, row.cached - len(prompt) + 1)
    assert alone.tokens[: len(tokens)] == tokens
    assert same_caches(caches, alone.caches)
    for index, found in enumerate(driver.logprobs(number)):
        expected = alone.logprobs[index]
        assert found.top[0] == (tokens[index], found.chosen)
        values = np.array([value for _, value in found.top])
        ids = mx.array([token for token, _ in found.top])
        assert np.allclose(values, np.array(expected[ids]), **TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_rows_of_different_lengths_equal_rows_alone(
    get_model: Callable[[str], TinyModel], name: str
) -> None:
    driver = Driver(get_model(name))
    prompts = {number: numbers(length, number) for number, length in LENGTHS.items()}
    for number, prompt in prompts.items():
        driver.add(number, prompt, sampling=TOP)
    driver.set_batch(*prompts)
    driver.steps(12)
    driver.worker.settle()
    for number, prompt in prompts.items():
        check_row(driver, number, prompt)


@pytest.mark.parametrize("name", MODELS)
def test_rows_that_join_and_leave_change_no_other_row(
    get_model: Callable[[str], TinyModel], name: str
) -> None:
    driver = Driver(get_model(name))
    prompts = {number: numbers(length, number) for number, length in LENGTHS.items()}
    for number, prompt in prompts.items():
        driver.add(number, prompt, sampling=TOP)
    for batch in ((2,), (1, 2), (1, 2, 3), (3, 2), (3,), (1, 3), (1, 2, 3)):
        driver.set_batch(*batch)
        driver.steps(3)
    driver.worker.settle()
    for number, prompt in prompts.items():
        assert len(driver.tokens(number)) >= 9
        check_row(driver, number, prompt)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 16])
@pytest.mark.parametrize("name", ["plain", "hybrid"])
def test_chunk_size_changes_no_cache(
    get_model: Callable[[str], TinyModel], name: str, chunk_tokens: int
) -> None:
    driver = Driver(get_model(name))
    prompt = numbers(33)
    driver.add(1, prompt, chunk_tokens=chunk_tokens)
    alone = decode_alone(driver.model.model, prompt, 1)
    driver.set_batch(1)
    driver.step()
    driver.set_batch()
    driver.worker.settle()
    assert driver.tokens(1) == alone.tokens
    check_row(driver, 1, prompt)


def take_up_again(model: TinyModel) -> tuple[Driver, Driver]:
    """A row of 14 tokens, and the same row made again after its sixth."""
    first = Driver(model)
    first.add(1, numbers(19), sampling=TOP)
    first.set_batch(1)
    first.steps(14)
    again = Driver(model)
    again.add(1, numbers(19), output=first.tokens(1)[:6], sampling=TOP)
    again.set_batch(1)
    again.steps(8)
    return first, again


@pytest.mark.parametrize("name", ["plain", "hybrid", "llama"])
def test_row_taken_up_again_goes_on_as_if_never_left(
    get_model: Callable[[str], TinyModel], name: str
) -> None:
    first, again = take_up_again(get_model(name))
    assert again.tokens(1) == first.tokens(1)[6:]
    assert same_logprobs(again.logprobs(1), first.logprobs(1)[6:])
    assert same_caches(again.row(1).caches, first.row(1).caches)


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss"])
def test_row_with_windows_goes_on_as_closely_as_its_cache_allows(
    get_model: Callable[[str], TinyModel], name: str
) -> None:
    """A window's cache is a ring in decode and in order after a prefill: the sums of attention
    are taken in another order, so low bits may differ.
    """
    first, again = take_up_again(get_model(name))
    assert again.tokens(1) == first.tokens(1)[6:]
    for found, expected in zip(again.logprobs(1), first.logprobs(1)[6:], strict=True):
        assert found.chosen == pytest.approx(expected.chosen, abs=1e-4 if STOCK else 5e-3)


WARM = [
    SamplingParameters(seed=11, temperature=0.9, top_p=0.9, frequency_penalty=0.3, logprobs=True),
    SamplingParameters(seed=12, temperature=1.3, top_k=20, repetition_penalty=1.2, logprobs=True),
    SamplingParameters(seed=11, temperature=0.7, min_p=0.02, presence_penalty=0.5, logprobs=True),
]


def sampled(model: TinyModel, rows: Sequence[int], count: int) -> dict[int, Driver]:
    """Rows with random draws, decoded together, by their numbers."""
    driver = Driver(model)
    for number in rows:
        driver.add(number, numbers(10 + 9 * number), sampling=WARM[number])
    driver.set_batch(*rows)
    driver.steps(count)
    return dict.fromkeys(rows, driver)


@pytest.mark.parametrize("name", ["plain", "hybrid"])
def test_draws_of_a_row_do_not_change_with_its_neighbours(
    get_model: Callable[[str], TinyModel], name: str
) -> None:
    model = get_model(name)
    together = sampled(model, (0, 1, 2), 15)
    for number, driver in together.items():
        alone = sampled(model, (number,), 15)[number]
        assert driver.tokens(number) == alone.tokens(number)
        assert same_logprobs(driver.logprobs(number), alone.logprobs(number))
        greedy = decode_alone(model.model, numbers(10 + 9 * number), 15).tokens
        assert driver.tokens(number) != greedy


@pytest.mark.parametrize("number", range(3))
def test_draws_go_on_after_a_restart(get_model: Callable[[str], TinyModel], number: int) -> None:
    model = get_model("plain")
    whole = sampled(model, (number,), 15)[number]
    again = Driver(model)
    known = whole.tokens(number)[:5]
    again.add(number, numbers(10 + 9 * number), output=known, sampling=WARM[number])
    again.set_batch(number)
    again.steps(10)
    assert again.tokens(number) == whole.tokens(number)[5:]
    assert same_logprobs(again.logprobs(number), whole.logprobs(number)[5:])


def test_rows_attend_with_their_own_masks() -> None:
    """A window that is shorter than its ring needs a mask even for one token."""
    arrays = [mx.random.normal((2, 4, 1, 8), key=mx.random.key(index)) for index in range(3)]
    queries, keys, values = arrays

    def filled(length: int) -> RotatingKVCache:
        cache = RotatingKVCache(max_size=16)
        for index in range(length):
            more = mx.random.normal((1, 4, 1, 8), key=mx.random.key(index))
            cache.update_and_fetch(more, more)
        return cache

    lengths = (3, 21)
    batch = attention.RaggedBatch([[filled(length)] for length in lengths])
    layer = batch.layers[0]
    mask = layer.make_mask(1, window_size=8, return_array=False)
    own_keys, own_values = layer.update_and_fetch(keys, values)
    together = attention.ragged_attention(queries, own_keys, own_values, layer, 0.5, mask)
    for row, length in enumerate(lengths):
        cache = filled(length)
        part = slice(row, row + 1)
        own_mask: Any = cache.make_mask(1, window_size=8)
        key, value = cache.update_and_fetch(keys[part], values[part])
        alone = base.scaled_dot_product_attention(queries[part], key, value, cache, 0.5, own_mask)
        assert (own_mask is not None) == (length > 8)
        assert np.allclose(np.array(together[part]), np.array(alone), **TOLERANCE)


def test_model_that_fails_the_seam_is_decoded_row_by_row(
    get_model: Callable[[str], TinyModel],
) -> None:
    model = get_model("hybrid")
    driver = Driver(TinyModel(model.model, model.num_vocabulary, one_row_only=True))
    prompts = {number: numbers(length, number) for number, length in LENGTHS.items()}
    for number, prompt in prompts.items():
        driver.add(number, prompt, sampling=TOP)
    driver.set_batch(*prompts)
    driver.steps(5)
    driver.worker.settle()
    for number, prompt in prompts.items():
        check_row(driver, number, prompt)
