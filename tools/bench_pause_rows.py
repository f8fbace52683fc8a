"""Rows of real size without a model: what the benchmark of pauses holds and lets go on.

The engine is the fake one, whose tokens cost nothing; the caches are mlx-lm's own, filled with
numbers that their position and layer determine, so that what comes back can be told from anything
else. Cutting, saving, restoring and letting go are those of a served model.
"""

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from math import prod
from typing import Any, Literal, cast

import mlx.core as mx
from mlx_lm.models.cache import ArraysCache, KVCache

from scheduler.engine.base import EngineLoaded, StartRow
from scheduler.engine.fake import FakeEngine, FakeSource
from scheduler.engine.fake_row import FakeCache, FakeRow, make_row
from scheduler.engine.fake_settings import FakeSettings
from scheduler.engine.model import ModelDescription

REPEATED_TOKENS = 2_048
"""The numbers of a layer come again after so many positions."""

STATE_NUMBER = mx.float32


class RowChanged(Exception):
    """What was restored is not what was saved."""


@dataclass(frozen=True, slots=True)
class Shape:
    """The caches of a model: layers with keys and values of 16 bits, and layers with a recurrent
    state of 32 bits, `state_shape` each.
    """

    name: str
    num_layers: int
    num_heads: int
    head_size: int
    num_states: int = 0
    state_shape: tuple[int, ...] = ()

    @property
    def bytes_per_token(self) -> int:
        """Of all layers with keys and values."""
        return 2 * 2 * self.num_layers * self.num_heads * self.head_size

    @property
    def state_bytes(self) -> int:
        """Of all layers with a state."""
        return self.num_states * prod(self.state_shape) * STATE_NUMBER.size

    def make_caches(self) -> list[Any]:
        """Those of an empty row."""
        states = [ArraysCache(1) for _ in range(self.num_states)]
        return [*states, *(KVCache() for _ in range(self.num_layers))]


HYBRID = Shape("hybrid", 16, 4, 256, num_states=48, state_shape=(1, 48, 128, 128))
"""27 billion parameters in 64 layers, like Qwen3.5-27B: 65,536 bytes a token, a state of 151 MB."""

PLAIN = Shape("plain", 36, 8, 128)
"""8 billion parameters in 36 layers that can be cut, like Qwen3-8B: 147,456 bytes a token."""


class Content:
    """What caches of a shape hold, by layer and position. Made and used in the engine's thread.

    `rest_s`: the first step of a row that has come back takes so long, so that the disk that it was
    read from is at rest when the row is held again.
    """

    def __init__(self, shape: Shape, seed: int, rest_s: float = 0.0) -> None:
        self.shape = shape
        self.rest_s = rest_s
        sizes = (1, shape.num_heads, REPEATED_TOKENS, shape.head_size)
        key = mx.random.key(seed)
        self.base = mx.random.randint(0, 2**15, sizes, dtype=mx.uint16, key=key)
        self.state = mx.random.uniform(shape=shape.state_shape or (1,), key=key)
        mx.eval(self.base, self.state)

    def keys_and_values(self, layer: int, start: int, end: int) -> tuple[mx.array, mx.array]:
        """Of these positions of a layer."""
        there = self.base[:, :, mx.arange(start, end) % REPEATED_TOKENS]
        first = 2 * layer
        return (there + first).view(mx.bfloat16), (there + first + 1).view(mx.bfloat16)

    def feed(self, caches: Sequence[Any], start: int, end: int) -> None:
        """The caches hold these positions too. A layer at a time, as it takes the least memory."""
        for number, cache in enumerate(caches):
            if isinstance(cache, KVCache):
                cache.update_and_fetch(*self.keys_and_values(number, start, end))
                mx.eval(cache.keys, cache.values)
            elif not start:
                cache[0] = self.state + number
                mx.eval(cache[0])
            if end - start > 1:
                mx.clear_cache()  # it has grown into new arrays, and the old ones are of no use

    def check(self, caches: Sequence[Any], num_tokens: int) -> None:
        """Compares the states, and of the layers with keys and values the first and the last.
        Raises RowChanged.
        """
        states = [mx.array_equal(self.state + n, caches[n][0]) for n in range(self.num_states)]
        equal = [bool(same.item()) for same in states]
        for number in (self.num_states, len(caches) - 1):
            held = cast("tuple[mx.array, mx.array]", caches[number].keys_and_values())
            for one, other in zip(self.keys_and_values(number, 0, num_tokens), held, strict=True):
                found = other[..., :num_tokens, :]
                same = mx.array_equal(one.view(mx.uint16), found.view(mx.uint16))
                equal.append(bool(same.item()))
        if not all(equal):
            raise RowChanged(f"a row of {num_tokens} positions came back with other numbers")

    @property
    def num_states(self) -> int:
        """The layers that come first."""
        return self.shape.num_states


@dataclass(slots=True, kw_only=True)
class SizedRow(FakeRow):
    """A fake row whose caches take real memory."""

    caches: list[Any]
    content: Content

    @property
    def num_cached_tokens(self) -> int:
        """The positions that its caches hold."""
        return self.caches[-1].offset

    def feed(self, end: int) -> None:
        """Its caches hold the first `end` positions from here on. What was restored is compared
        before it is added to.
        """
        num_kept = self.num_cached_tokens
        if self.num_checked < num_kept:
            self.content.check(self.caches, num_kept)
            time.sleep(self.content.rest_s)
        self.content.feed(self.caches, num_kept, end)
        self.num_checked = end


@dataclass
class SizedEngine(FakeEngine):
    """The fake engine with such rows."""

    shape: Shape = HYBRID
    rest_s: float = 0.0
    freeing_s: float = 0.0

    def run(self) -> None:
        """The thread. The scheduler hears of its death, and says so."""
        try:
            with suppress(RowChanged):
                super().run()
        finally:
            mx.clear_streams()

    def load(self) -> bool:
        assert self.kv is not None, "what is measured is saving"
        self.content = Content(self.shape, 1, self.rest_s)
        sample = self.shape.make_caches()
        self.content.feed(sample, 0, 1)
        domain = self.kv.describe(sample, 1)
        self.loaded = True
        self.deliver(EngineLoaded(self.facts, False, note="", load_ns=0, kv_domain=domain))
        return True

    def start_row(self, command: StartRow) -> None:
        fake = make_row(command, self.settings.turn_tokens, FakeCache())
        found = {part.name: getattr(fake, part.name) for part in fields(fake)}
        found["caches"] = self.shape.make_caches()
        self.rows[command.number] = SizedRow(**found, content=self.content)

    def drop_row(self, number: int) -> None:
        """The memory is let go before that is reported. How long the allocator takes for it is kept
        in `freeing_s`, for whoever held the row.
        """
        row = self.rows.get(number)
        begun = time.perf_counter()
        if row is not None:
            row.caches.clear()
        self.freeing_s = time.perf_counter() - begun
        super().drop_row(number)


@dataclass(frozen=True)
class SizedSource:
    """A model that is nothing but the size of its caches."""

    shape: Shape
    rest_s: float = 0.0
    settings: FakeSettings = field(default_factory=FakeSettings)
    caches: Literal["mlx", "fake"] = "mlx"

    def describe(self) -> ModelDescription:
        return FakeSource(self.settings).describe()

    def make_engine(self, description: ModelDescription, nonce: int) -> SizedEngine:
        facts, shape = description.facts, self.shape
        return SizedEngine(facts, nonce, self.settings, shape=shape, rest_s=self.rest_s)
