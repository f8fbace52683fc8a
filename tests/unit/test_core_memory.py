"""Sums of bytes, by hand, and the largest context that fits."""

import msgspec
import pytest

from journal.events import CapacityNumbers, Limits, ModelFacts, WindowLayers
from scheduler.memory import (
    capacity_numbers,
    chunk_bytes,
    max_context_tokens,
    round_up,
    row_bytes,
    rows_capacity_bytes,
    size_text,
)
from tests.unit.core_driver import LIMITS, MODEL

HYBRID = msgspec.structs.replace(
    MODEL,
    state_bytes=500,
    window_layers=(
        WindowLayers(bytes_per_token=10, window_tokens=300),
        WindowLayers(bytes_per_token=3, window_tokens=100),
    ),
)


def under(ceiling_bytes: int | None) -> Limits:
    return msgspec.structs.replace(LIMITS, ceiling_bytes=ceiling_bytes)


def test_round_up() -> None:
    assert [round_up(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (0, 0),
        (1, 256_000),
        (256, 256_000),
        (257, 512_000),
    ],
)
def test_row_of_plain_model(num_tokens: int, expected: int) -> None:
    assert row_bytes(MODEL, num_tokens) == expected


@pytest.mark.parametrize(
    ("num_tokens", "expected"),
    [
        (0, 500),
        (1, 500 + 256_000 + 10 * 256 + 3 * 256),
        # The first window ends at 300 tokens, which are kept in 512 positions; the second in 256.
        (257, 500 + 512_000 + 10 * 512 + 3 * 256),
        (1_000, 500 + 1_024_000 + 10 * 512 + 3 * 256),
    ],
)
def test_row_of_hybrid_model(num_tokens: int, expected: int) -> None:
    assert row_bytes(HYBRID, num_tokens) == expected


@pytest.mark.parametrize("model", [MODEL, HYBRID], ids=["plain", "hybrid"])
def test_row_grows_with_its_tokens(model: ModelFacts) -> None:
    sums = [row_bytes(model, n) for n in range(1_500)]
    assert sums == sorted(sums)


def test_room_for_rows_is_the_ceiling_less_weights_and_one_chunk() -> None:
    assert chunk_bytes(MODEL, LIMITS) == 5_120
    assert rows_capacity_bytes(MODEL, under(2_000_000)) == 2_000_000 - 1_000_000 - 5_120
    assert rows_capacity_bytes(MODEL, under(1_000_000)) == -5_120
    assert rows_capacity_bytes(MODEL, under(None)) is None


def test_room_is_kept_for_whichever_chunk_is_larger() -> None:
    limits = msgspec.structs.replace(LIMITS, chunk_tokens_beside_rows=600)
    assert chunk_bytes(MODEL, limits) == 6_000


@pytest.mark.parametrize(
    ("ceiling_bytes", "expected"),
    [
        (None, 8_192),
        (1_005_120 + 8_192_000, 8_192),
        (1_005_120 + 8_191_999, 7_936),
        (1_005_120 + 256_000, 256),
        (1_005_120 + 255_999, 0),
        (1_000, 0),
    ],
)
def test_largest_context(ceiling_bytes: int | None, expected: int) -> None:
    assert max_context_tokens(MODEL, under(ceiling_bytes)) == expected


@pytest.mark.parametrize("context_tokens", [1, 2, 255, 256, 257, 1_000])
@pytest.mark.parametrize("step", [1, 7, 256])
def test_largest_context_is_exactly_the_largest_that_fits(context_tokens: int, step: int) -> None:
    model = msgspec.structs.replace(HYBRID, context_tokens=context_tokens, kv_step_tokens=step)
    for room in range(0, 1_200_000, 37_123):
        limits = under(1_005_120 + room)
        fitting = [n for n in range(1, context_tokens + 1) if row_bytes(model, n) <= room]
        assert max_context_tokens(model, limits) == max(fitting, default=0)


def test_seven_numbers_of_a_refusal() -> None:
    assert capacity_numbers(HYBRID, under(2_000_000), 1_000, 24) == CapacityNumbers(
        prompt_tokens=1_000,
        max_tokens=24,
        required_bytes=1_000_000 + 5_120 + 500 + 1_024_000 + 10 * 512 + 3 * 256,
        capacity_bytes=2_000_000,
        weights_bytes=1_000_000,
        kv_bytes_per_token=1_000,
        max_context_tokens=768,
    )


def test_sizes_for_people_are_rounded_down() -> None:
    assert [size_text(n) for n in (0, 999, 1_000, 1_299_999, 48 * 10**9)] == [
        "0B",
        "999B",
        "1.0KB",
        "1.2MB",
        "48.0GB",
    ]
