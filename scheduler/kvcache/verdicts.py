"""What may be done with each cache class of mlx-lm: cut it at a token, save it whole, or neither.

The table has a verdict for every class in `mlx_lm.models.cache` (0.32.2); a test compares it with
the module. Verdicts go by the exact class: a class that a model brings along, or that derives from
one of these, may keep its tokens in another way, so it is refused until somebody has looked.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import mlx.core as mx
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.cache import (
    ArraysCache,
    CacheList,
    ChunkedKVCache,
    ConcatenateKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

Arrays = dict[str, mx.array]

NUMBERS = "numbers"
"""The name of the array that holds a state layer's counters."""


@dataclass(frozen=True, slots=True)
class Cut:
    """A cache that can be cut at any token: position p of every array is token p.

    `get` returns its whole buffers, shape (1, heads, room, size), tokens on the third axis; `put`
    gives it such buffers and says how many positions hold. With `grows_by_step` the buffers may be
    longer than what holds, and grow in multiples of the class's `step`. `parameters` are
    attributes that the meaning of the bytes depends on.
    """

    get: Callable[[Any], Arrays]
    put: Callable[[Any, Arrays, int], None]
    parameters: tuple[str, ...] = ()
    grows_by_step: bool = True


@dataclass(frozen=True, slots=True)
class Whole:
    """A cache that can only be saved as it is at one position.

    `get` returns its arrays in the order of time, with its counters; `put` brings an empty cache
    of the same class to where it was. `room_tokens` names the attribute that bounds its tokens,
    where it has any.
    """

    get: Callable[[Any], Arrays]
    put: Callable[[Any, Arrays], None]
    parameters: tuple[str, ...] = ()
    room_tokens: str | None = None


@dataclass(frozen=True, slots=True)
class Members:
    """A list of caches: each of its members has the verdict of its own class.

    So the keys and values of a list that also holds a state are still saved once, in blocks, and
    not whole at each boundary.
    """


@dataclass(frozen=True, slots=True)
class Refused:
    """A cache whose content is not saved; a model that uses it gets no KV on SSD."""

    reason: str


Verdict = Cut | Whole | Members | Refused


def _get_keys_values(cache: Any) -> Arrays:
    return {"keys": cache.keys, "values": cache.values}


def _put_keys_values(cache: Any, arrays: Arrays, num_tokens: int) -> None:
    cache.keys, cache.values, cache.offset = arrays["keys"], arrays["values"], num_tokens


def _put_exactly(cache: Any, arrays: Arrays, num_tokens: int) -> None:
    """For the class whose offset is the length of its arrays, with no room to grow into."""
    if num_tokens < arrays["keys"].shape[2]:
        arrays = {name: array[..., :num_tokens, :] for name, array in arrays.items()}
    _put_keys_values(cache, arrays, num_tokens)


_QUANTIZED_PARTS = ("codes", "scales", "biases")


def _get_quantized(cache: Any) -> Arrays:
    return {
        f"{side}.{part}": array
        for side in ("keys", "values")
        for part, array in zip(_QUANTIZED_PARTS, getattr(cache, side), strict=True)
    }


def _put_quantized(cache: Any, arrays: Arrays, num_tokens: int) -> None:
    cache.keys = tuple(arrays[f"keys.{part}"] for part in _QUANTIZED_PARTS)
    cache.values = tuple(arrays[f"values.{part}"] for part in _QUANTIZED_PARTS)
    cache.offset = num_tokens


def _get_entries(cache: Any) -> Arrays:
    assert cache.lengths is None, "a row has no padding"
    assert cache.left_padding is None, "a row has no padding"
    return {str(number): entry for number, entry in enumerate(cache.cache) if entry is not None}


def _put_entries(cache: Any, arrays: Arrays) -> None:
    cache.cache = [arrays.get(str(number)) for number in range(len(cache.cache))]


def _get_rotating(cache: Any) -> Arrays:
    """The last `max_size` positions in the order of time (the first `keep` come first), and where
    the ring was about to be written.

    A prefill leaves more than the window behind; the next token cuts that off (`_trim`), so it is
    not part of what counts.
    """
    keys, values, offset, keep, max_size, index = cache.state
    room = keys.shape[2]
    if room > max_size:
        older = room - max_size
        spans = [(0, keep), (keep + older, room)]
        index = max_size
    elif index < offset and index < room:
        spans = [(0, keep), (index, room), (keep, index)]
    else:
        spans = [(0, index)]
    return {
        "keys": _join(keys, spans),
        "values": _join(values, spans),
        NUMBERS: mx.array([offset, index], dtype=mx.int64),
    }


def _put_rotating(cache: Any, arrays: Arrays) -> None:
    """Turns the ring back to where it was: attention then adds up in the same order, to the bit."""
    offset, index = integers(arrays[NUMBERS])
    keys, values, keep = arrays["keys"], arrays["values"], cache.keep
    room = keys.shape[2]
    if index < room:
        newest = room - (index - keep)
        spans = [(0, keep), (newest, room), (keep, newest)]
        keys, values = _join(keys, spans), _join(values, spans)
    cache.state = (keys, values, offset, keep, cache.max_size, index)


def _get_chunked(cache: Any) -> Arrays:
    keys, values, offset, _, start = cache.state
    return {
        "keys": keys[..., : offset - start, :],
        "values": values[..., : offset - start, :],
        NUMBERS: mx.array([offset, start], dtype=mx.int64),
    }


def _put_chunked(cache: Any, arrays: Arrays) -> None:
    offset, start = integers(arrays[NUMBERS])
    cache.state = (arrays["keys"], arrays["values"], offset, cache.chunk_size, start)


def _join(array: mx.array, spans: list[tuple[int, int]]) -> mx.array:
    """The spans of tokens one after the other."""
    parts = [array[..., start:end, :] for start, end in spans if start < end]
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=2)


def integers(array: mx.array) -> list[int]:
    """The counters of a state layer; the first is its position."""
    return cast("list[int]", array.tolist())


_LEFT_PADDED = Refused("it holds several rows, padded on the left; a row owns its caches here")
_NO_ROW = Refused("it is not a layer's cache of a row")

VERDICTS: dict[type, Verdict] = {
    KVCache: Cut(_get_keys_values, _put_keys_values),
    ConcatenateKVCache: Cut(_get_keys_values, _put_exactly, grows_by_step=False),
    QuantizedKVCache: Cut(_get_quantized, _put_quantized, ("group_size", "bits")),
    ArraysCache: Whole(_get_entries, _put_entries),
    RotatingKVCache: Whole(_get_rotating, _put_rotating, ("keep", "max_size"), "max_size"),
    ChunkedKVCache: Whole(_get_chunked, _put_chunked, ("chunk_size",), "chunk_size"),
    CacheList: Members(),
    mlx_cache.BatchKVCache: _LEFT_PADDED,
    mlx_cache.BatchRotatingKVCache: _LEFT_PADDED,
    mlx_cache._BaseCache: _NO_ROW,
    mlx_cache.TokenBuffer: _NO_ROW,
    mlx_cache.PromptTrie: _NO_ROW,
    mlx_cache.PromptTrieResult: _NO_ROW,
    mlx_cache.LRUPromptCache: _NO_ROW,
}


def verdict_of(cache: Any) -> Verdict:
    """The verdict on the cache's own class."""
    unknown = Refused("nobody has decided how it can be saved")
    return VERDICTS.get(type(cache), unknown)
