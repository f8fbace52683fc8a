"""Every cache class of mlx-lm has a verdict, and a class without one is refused by its name."""

import inspect
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models import cache as mlx_cache
from mlx_lm.models.cache import (
    ArraysCache,
    BatchKVCache,
    CacheList,
    KVCache,
    RotatingKVCache,
)

from scheduler.kvcache.codec import UnsupportedCache
from scheduler.kvcache.layout import layout_of
from scheduler.kvcache.verdicts import VERDICTS, Members, Refused
from tests.kvcache.models import CASES

pytestmark = pytest.mark.engine


def defined_in_mlx_lm() -> set[type]:
    """All classes of the module but those inside of others: a new one is looked at, whatever it
    derives from.
    """
    classes = inspect.getmembers(mlx_cache, inspect.isclass)
    return {kind for _, kind in classes if kind.__module__ == mlx_cache.__name__}


def test_every_class_has_a_verdict() -> None:
    assert set(VERDICTS) == defined_in_mlx_lm()


def test_every_class_that_is_not_refused_is_restored_in_a_test() -> None:
    def classes(caches: list[Any]) -> set[type]:
        inner = [member for cache in caches for member in getattr(cache, "caches", ())]
        return {type(cache) for cache in caches} | {type(member) for member in inner}

    tested = set[type]().union(*(classes(case.make_caches()) for case in CASES.values()))
    supported = {kind for kind, verdict in VERDICTS.items() if not isinstance(verdict, Refused)}
    assert tested == supported
    assert isinstance(VERDICTS[CacheList], Members)


class Homemade(KVCache):
    """A class that a model could bring along."""


def fed_list() -> Any:
    return CacheList(fed(KVCache()), fed(Homemade()))


def fed(cache: Any, num_tokens: int = 3) -> Any:
    keys = mx.ones((1, 1, num_tokens, 8))
    cache.update_and_fetch(keys, keys)
    return cache


def two_rows() -> Any:
    cache = KVCache()
    cache.update_and_fetch(mx.ones((2, 1, 3, 8)), mx.ones((2, 1, 3, 8)))
    return cache


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "left padding": (lambda: fed(BatchKVCache([0])), "layer 1 .* BatchKVCache.*padded"),
    "a class of the model's own": (lambda: fed(Homemade()), "layer 1 .* Homemade"),
    "inside a list": (fed_list, "layer 2 .* Homemade"),
    "no cache at all": (object, "layer 1 .* object"),
    "a layer that is not used": (KVCache, "KVCache.* 0 of 3 tokens"),
    "a layer that counts otherwise": (lambda: fed(KVCache(), 2), "KVCache.* 2 of 3 tokens"),
    "a window without tokens": (lambda: RotatingKVCache(8), "RotatingKVCache.* 0 of 3"),
    "a state that is not used": (lambda: ArraysCache(2), "ArraysCache.* holds nothing"),
    "several rows": (two_rows, "KVCache.* 2 rows"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_cache_that_cannot_be_saved_is_named(name: str) -> None:
    make, message = REFUSED[name]
    with pytest.raises(UnsupportedCache, match=message):
        layout_of([fed(KVCache()), make()], 3)
