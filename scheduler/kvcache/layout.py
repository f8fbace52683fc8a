"""How a model's caches lie in blocks: which arrays there are, what is cut and what is saved whole.

All of it runs in the thread that owns the row, between two of its steps: what is cut must be
positions that hold, and state layers can only be had at the position where they are.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx

from scheduler.kvcache.arrays import Block, settle
from scheduler.kvcache.verdicts import (
    NUMBERS,
    Arrays,
    Cut,
    Members,
    Refused,
    Whole,
    verdict_of,
)

TOKENS = -1
"""Stands for the number of tokens in the shape of a spec."""

_TOKENS_AXIS = 2


class UnsupportedCache(Exception):
    """A layer's cache cannot be saved, so no KV of this model is. The text names the class."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of one layer. `name` is as in a block (`3.keys`), `shape` has `TOKENS` in it where
    the array grows.
    """

    name: str
    shape: tuple[int, ...]
    dtype: mx.Dtype

    def shape_of(self, num_tokens: int) -> tuple[int, ...]:
        """The shape with that many tokens."""
        return tuple(num_tokens if size == TOKENS else size for size in self.shape)

    def bytes_of(self, num_tokens: int) -> int:
        """The bytes with that many tokens."""
        return prod(self.shape_of(num_tokens)) * self.dtype.size

    def fits(self, array: mx.array) -> bool:
        """Whether an array is this one, with however many tokens."""
        if array.dtype != self.dtype or array.ndim != len(self.shape):
            return False
        sizes = zip(self.shape, array.shape, strict=True)
        return all(wanted in (TOKENS, found) for wanted, found in sizes)


@dataclass(frozen=True, slots=True)
class Layer:
    """One cache, or one member of a list of caches. `parameters` are those of its verdict, with
    their values.
    """

    number: int
    class_name: str
    verdict: Cut | Whole
    parameters: tuple[tuple[str, int], ...]
    specs: tuple[ArraySpec, ...]

    def named(self, arrays: Arrays) -> Arrays:
        """The arrays under their names in a block."""
        return {f"{self.number}.{name}": array for name, array in arrays.items()}

    def own(self, block: Block) -> Arrays:
        """This layer's arrays in a block, under the names that its verdict uses."""
        prefix = f"{self.number}."
        return {
            spec.name.removeprefix(prefix): block[spec.name]
            for spec in self.specs
            if spec.name in block
        }


@dataclass(frozen=True)
class Layout:
    """The layers of one model, as `layout_of` found them."""

    layers: tuple[Layer, ...]

    @property
    def digest(self) -> str:
        """64 hex digits for all that the meaning of a block's bytes depends on: classes, heads,
        sizes, number formats, bits and groups of quantised caches, windows.
        """
        described = [
            (
                layer.class_name,
                layer.parameters,
                [(spec.name, spec.shape, str(spec.dtype)) for spec in layer.specs],
            )
            for layer in self.layers
        ]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()

    @property
    def cut_layers(self) -> tuple[Layer, ...]:
        """The layers that blocks are made of."""
        return tuple(layer for layer in self.layers if isinstance(layer.verdict, Cut))

    @property
    def state_layers(self) -> tuple[Layer, ...]:
        """The layers that are saved whole. With any, a row can only be restored at a boundary."""
        return tuple(layer for layer in self.layers if isinstance(layer.verdict, Whole))

    @property
    def bytes_per_token(self) -> int:
        """The bytes of a block per token."""
        return sum(spec.bytes_of(1) for layer in self.cut_layers for spec in layer.specs)

    @property
    def state_bytes(self) -> int:
        """The bytes of a state, windows full. (A chunked cache may hold a prefill chunk more.)"""
        sizes = ((spec, _room_tokens(layer)) for layer in self.state_layers for spec in layer.specs)
        return sum(spec.bytes_of(room) for spec, room in sizes)

    def cut_block(self, caches: Sequence[Any], start: int, length: int) -> Block:
        """The row's positions `start` to `start + length`, without the state layers. The row must
        hold them.
        """
        return settle(self._positions(caches, start, length))

    def cut_state(self, caches: Sequence[Any], position: int) -> Block:
        """The state layers of a row that is exactly at this position."""
        return settle(self._states(caches, position))

    def cut_tail(self, caches: Sequence[Any], start: int, position: int) -> Block:
        """What a pause must save beyond the full blocks: the positions from `start` on, if there
        are any, and the state layers. The row is exactly at `position`.
        """
        arrays = self._states(caches, position)
        if start < position:
            arrays |= self._positions(caches, start, position - start)
        return settle(arrays)

    def pairs(self, caches: Sequence[Any]) -> Iterator[tuple[Layer, Any]]:
        """The layers, each with the row's own cache of it."""
        for layer, cache in zip(self.layers, flatten(caches), strict=True):
            assert type(cache).__name__ == layer.class_name, f"layer {layer.number} has changed"
            yield layer, cache

    def _positions(self, caches: Sequence[Any], start: int, length: int) -> Arrays:
        end = start + length
        arrays: Arrays = {}
        for layer, cache in self.pairs(caches):
            if isinstance(layer.verdict, Cut):
                assert 0 <= start < end <= cache.offset, f"{cache.offset} positions, not {end}"
                whole = layer.named(layer.verdict.get(cache))
                arrays |= {name: array[..., start:end, :] for name, array in whole.items()}
        return arrays

    def _states(self, caches: Sequence[Any], position: int) -> Arrays:
        arrays: Arrays = {}
        for layer, cache in self.pairs(caches):
            offset = getattr(cache, "offset", position)
            assert offset == position, f"layer {layer.number} is at {offset}, not at {position}"
            if isinstance(layer.verdict, Whole):
                arrays |= layer.named(layer.verdict.get(cache))
        return arrays


def layout_of(caches: Sequence[Any], num_tokens: int) -> Layout:
    """The layout of a model, from a row of it that was fed `num_tokens` tokens (at least one).

    Raises UnsupportedCache for a class that is refused, and for a layer that holds nothing, or
    another number of tokens: what it would mean to restore such a layer is not known.
    """
    layers = (_layer(number, cache, num_tokens) for number, cache in enumerate(flatten(caches)))
    return Layout(tuple(layers))


def flatten(caches: Iterable[Any]) -> Iterator[Any]:
    """The caches in order, lists replaced by their members."""
    for cache in caches:
        if isinstance(verdict_of(cache), Members):
            yield from flatten(cache.caches)
        else:
            yield cache


def _layer(number: int, cache: Any, num_tokens: int) -> Layer:
    class_name, verdict = type(cache).__name__, verdict_of(cache)
    where = f"layer {number} keeps its tokens in {class_name}"
    if isinstance(verdict, Refused):
        raise UnsupportedCache(f"{where}: {verdict.reason}")
    assert not isinstance(verdict, Members), "lists are flattened"
    offset = getattr(cache, "offset", num_tokens)
    if offset != num_tokens:
        raise UnsupportedCache(f"{where}, which holds {offset} of {num_tokens} tokens")
    found = verdict.get(cache)
    specs = tuple(_spec(f"{number}.{name}", array, verdict) for name, array in found.items())
    if not specs:
        raise UnsupportedCache(f"{where}, which holds nothing after {num_tokens} tokens")
    num_rows = {spec.shape[0] for spec in specs if not spec.name.endswith(NUMBERS)}
    if num_rows != {1}:
        raise UnsupportedCache(f"{where}, which holds {max(num_rows)} rows")
    parameters = tuple((name, int(getattr(cache, name))) for name in verdict.parameters)
    return Layer(number, class_name, verdict, parameters, specs)


def _spec(name: str, array: mx.array, verdict: Cut | Whole) -> ArraySpec:
    shape = array.shape
    has_tokens = isinstance(verdict, Cut) or verdict.room_tokens is not None
    if has_tokens and not name.endswith(NUMBERS):
        shape = (*shape[:_TOKENS_AXIS], TOKENS, *shape[_TOKENS_AXIS + 1 :])
    return ArraySpec(name, shape, array.dtype)


def _room_tokens(layer: Layer) -> int:
    assert isinstance(layer.verdict, Whole), "only state layers have a bound"
    return dict(layer.parameters).get(layer.verdict.room_tokens or "", 0)
