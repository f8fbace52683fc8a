"""The seam: rows that own their caches are decoded together by mlx-lm's unchanged model code.

A batch is a view. For each layer the model gets one cache object that stands for that layer of
all rows. Projections and experts run on (rows, 1, hidden) as for any batch. Where the model
appends keys and values, each row's part goes into the row's own cache; what comes back is a
`RaggedRows`, which only the attention function of this module understands: it attends row by row,
each over its own length. Recurrent state, of fixed size, is gathered into one array when the batch
changes and written back when it changes again. So no row is ever padded, and memory is the sum of
the lengths.

mlx-lm's modules bind `scaled_dot_product_attention` by name. `install` rebinds that name in the
modules that the loaded model's layers come from; arrays pass through to the original.
"""

import sys
from collections.abc import Sequence
from typing import Any, cast

import mlx.core as mx
from mlx import nn
from mlx_lm.models import base
from mlx_lm.models.cache import ArraysCache, CacheList, KVCache, QuantizedKVCache, RotatingKVCache

Caches = list[Any]
"""One row's caches, one a layer, of mlx-lm's classes."""

_ATTENTION = "scaled_dot_product_attention"
ORIGINAL_ATTENTION = base.scaled_dot_product_attention


class SeamError(Exception):
    """The model cannot be decoded through the seam; the text says what stands in the way."""


class RaggedRows:
    """Keys, values or masks of one layer, one entry a row. Opaque to model code on purpose: a
    model that computes on them fails loudly in the self-test instead of attending wrongly.
    """

    __slots__ = ("caches", "rows")

    def __init__(self, rows: Sequence[Any], caches: Sequence[Any]) -> None:
        self.rows = rows
        self.caches = caches


class RaggedLayer:
    """Stands for one attention layer's caches of all rows, in the place of an mlx-lm cache."""

    def __init__(self, caches: Sequence[Any], offsets: "Offsets") -> None:
        self.caches = caches
        self._offsets = offsets

    @property
    def offset(self) -> mx.array:
        """The position of each row's next token, shape (rows,): rotary embeddings take it so."""
        return self._offsets.of(tuple(cache.offset for cache in self.caches))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[RaggedRows, RaggedRows]:
        """Appends to each row its part of `keys` and `values`, shape (rows, heads, 1, size)."""
        parts = zip(self.caches, _rows_of(keys), _rows_of(values), strict=True)
        pairs = [cache.update_and_fetch(key, value) for cache, key, value in parts]
        return (
            RaggedRows([key for key, _ in pairs], self.caches),
            RaggedRows([value for _, value in pairs], self.caches),
        )

    def make_mask(self, length: int, **options: Any) -> RaggedRows | None:
        """The masks of the rows, or none where no row needs one, as for a single token mostly."""
        masks = [cache.make_mask(length, **options) for cache in self.caches]
        if all(mask is None for mask in masks):
            return None
        return RaggedRows(masks, self.caches)


class Offsets:
    """The rows' positions as an array, made once a step instead of once a layer."""

    def __init__(self) -> None:
        self._key: tuple[int, ...] = ()
        self._array = mx.array([], dtype=mx.int32)

    def of(self, positions: tuple[int, ...]) -> mx.array:
        if positions != self._key:
            self._key = positions
            self._array = mx.array(positions, dtype=mx.int32)
        return self._array


class RaggedBatch:
    """The view of some rows as a batch. While it lives the recurrent state of the rows is here,
    not in their caches; `dissolve` puts it back.
    """

    def __init__(self, rows: Sequence[Caches]) -> None:
        offsets = Offsets()
        self._states: list[tuple[ArraysCache, Sequence[ArraysCache]]] = []
        self.layers = [self._view(caches, offsets) for caches in zip(*rows, strict=True)]

    def dissolve(self) -> list[mx.array]:
        """Gives each row its recurrent state back, as arrays of its own: a slice would keep the
        state of all rows alive, and so would `mx.contiguous` where they are small. So does an array
        that is still lazy: the caller evaluates what is returned.
        """
        given_back: list[mx.array] = []
        for gathered, caches in self._states:
            for row, cache in enumerate(caches):
                index = mx.array([row])
                cache.cache = [
                    None if array is None else mx.take(array, index, axis=0)
                    for array in gathered.cache
                ]
                given_back += [array for array in cache.cache if array is not None]
        self._states = []
        return given_back

    def _view(self, caches: Sequence[Any], offsets: Offsets) -> Any:
        kind = type(caches[0])
        if kind in (KVCache, RotatingKVCache, QuantizedKVCache):
            return RaggedLayer(caches, offsets)
        if kind is ArraysCache:
            gathered = _gather_state(caches)
            self._states.append((gathered, caches))
            return gathered
        if kind is CacheList:
            parts = zip(*(cache.caches for cache in caches), strict=True)
            return CacheList(*(self._view(part, offsets) for part in parts))
        raise SeamError(f"the model uses {kind.__name__}, for which there is no batch view")


def _gather_state(caches: Sequence[ArraysCache]) -> ArraysCache:
    entries = list(zip(*(cache.cache for cache in caches), strict=True))
    gathered = ArraysCache(len(entries))
    gathered.cache = [
        None if entry[0] is None else mx.concatenate(list(entry), axis=0) for entry in entries
    ]
    return gathered


def ragged_attention(  # noqa: PLR0917 - the signature is mlx-lm's
    queries: mx.array,
    keys: Any,
    values: Any,
    cache: Any,
    scale: float,
    mask: Any,
    sinks: mx.array | None = None,
) -> mx.array:
    """mlx-lm's attention function, but over each row's own keys and values if they are ragged.

    `queries` has the shape (rows, heads, 1, size), and so has the result.
    """
    if not isinstance(keys, RaggedRows):
        return ORIGINAL_ATTENTION(queries, keys, values, cache, scale, mask, sinks)
    masks = mask.rows if isinstance(mask, RaggedRows) else [mask] * len(keys.rows)
    parts = zip(_rows_of(queries), keys.rows, values.rows, keys.caches, masks, strict=True)
    return mx.concatenate(
        [
            ORIGINAL_ATTENTION(query, key, value, own, scale, own_mask, sinks)
            for query, key, value, own, own_mask in parts
        ],
        axis=0,
    )


def _rows_of(array: mx.array) -> Sequence[mx.array]:
    """One array a row. A split is one operation for all rows, where slices would be one each."""
    return cast("list[mx.array]", mx.split(array, len(array)))


def install(model: nn.Module) -> None:
    """Rebinds the attention function in every module that a layer of `model` was defined in."""
    names = {kind.__module__ for module in model.modules() for kind in type(module).__mro__}
    for name in sorted(names):
        module = sys.modules[name]
        if getattr(module, _ATTENTION, None) is ORIGINAL_ATTENTION and module is not base:
            setattr(module, _ATTENTION, ragged_attention)


def positions(caches: Caches) -> set[int]:
    """How many tokens the caches hold, by layer: one value, unless a step broke off inside a
    model. Recurrent state does not count its tokens.
    """
    return {int(cache.offset) for cache in leaves(caches) if hasattr(cache, "offset")}


def can_cut(caches: Caches) -> bool:
    """Whether the last tokens can be taken back: only caches that hold nothing but positions."""
    return all(cache.is_trimmable() for cache in caches)


def cut(caches: Caches, num_tokens: int) -> None:
    """Takes back all after the first `num_tokens` positions, layer by layer."""
    for cache in leaves(caches):
        cache.trim(max(0, cache.offset - num_tokens))


def leaves(caches: Sequence[Any]) -> list[Any]:
    """The caches with those that are kept in lists."""
    return [
        leaf
        for cache in caches
        for leaf in (leaves(cache.caches) if isinstance(cache, CacheList) else [cache])
    ]
