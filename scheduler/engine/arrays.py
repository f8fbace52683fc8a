"""Evaluated arrays as Python numbers, with the types that mlx leaves open."""

from typing import cast

import mlx.core as mx


def integers(array: mx.array) -> list[int]:
    """The values of an array of one dimension and an integer type."""
    return cast("list[int]", array.tolist())


def floats(array: mx.array) -> list[float]:
    """The values of an array of one dimension and a real type."""
    return cast("list[float]", array.tolist())


def number(array: mx.array) -> float:
    """The value of an array with a single real element."""
    return cast("float", array.item())
