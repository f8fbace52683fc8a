"""Restores a row: memory for all of it at once, filled block by block.

Joining blocks would need the row twice. Here it is the row, and the block that is being copied.
"""

import threading
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from scheduler.kvcache.arrays import Block, widest
from scheduler.kvcache.codec import WrongBlock
from scheduler.kvcache.layout import ArraySpec, Layout
from scheduler.kvcache.verdicts import NUMBERS, Cut, integers


class RowFiller:
    """Fills the caches of one row, which are empty until `finish`.

    `caches` come from the model; `num_tokens` is how many positions to make room for: those that
    will be restored, or more, for the tokens that are prefilled next. Used in the row's thread.
    """

    def __init__(self, layout: Layout, caches: Sequence[Any], num_tokens: int) -> None:
        self._pairs = list(layout.pairs(caches))
        self._num_filled = 0
        self._buffers: dict[str, mx.array] = {}
        streams = _streams()
        for layer, cache in self._pairs:
            if isinstance(layer.verdict, Cut):
                step = cache.step if layer.verdict.grows_by_step else 1
                room = -(-num_tokens // step) * step
                for spec in layer.specs:
                    stream = streams[len(self._buffers) % len(streams)]
                    buffer = _make_buffer(spec.shape_of(room), spec.dtype, stream)
                    self._buffers[spec.name] = buffer
        mx.eval(self._buffers)

    @property
    def num_filled(self) -> int:
        """The positions that are restored so far."""
        return self._num_filled

    def fill(self, block: Block, length: int) -> None:
        """Copies the next `length` positions from a block or a tail.

        Raises WrongBlock, and then nothing has changed.
        """
        specs = [spec for layer, _ in self._pairs for spec in layer.specs]
        cut = [spec for spec in specs if spec.name in self._buffers]
        for spec in cut:
            _check(spec, block, spec.shape_of(length))
        start, end = self._num_filled, self._num_filled + length
        for spec in cut:
            # In place: nothing else may hold on to the buffer, or mlx copies all of it.
            buffer = self._buffers[spec.name]
            buffer[..., start:end, :] = block[spec.name].view(buffer.dtype)
        mx.eval(self._buffers)
        self._num_filled = end

    def finish(self, position: int, state: Block | None = None) -> None:
        """Hands the caches what they hold at `position`, at most `num_filled`; where there are
        state layers, `state` was cut there. From here on the row goes on as if it had never been
        away, and the filler is done.

        Raises WrongBlock, and then the caches are still empty.
        """
        assert position <= self._num_filled, f"{self._num_filled} positions, not {position}"
        state = state or {}
        for layer, _ in self._pairs:
            if not isinstance(layer.verdict, Cut):
                _check_state(layer.specs, state, position)
        for layer, cache in self._pairs:
            if isinstance(layer.verdict, Cut):
                arrays = {spec.name: self._take_buffer(spec) for spec in layer.specs}
                layer.verdict.put(cache, layer.own(arrays), position)
            else:
                layer.verdict.put(cache, layer.own(state))
        mx.eval([cache.state for _, cache in self._pairs])

    def _take_buffer(self, spec: ArraySpec) -> mx.array:
        """The buffer as what it is, held by nobody else: so the row goes on writing in place."""
        return self._buffers.pop(spec.name).view(spec.dtype)


_of_this_thread = threading.local()


def _streams() -> tuple[mx.Stream, ...]:
    """Where the memory of a row is made. On a CPU most of that is the system's work on new memory,
    as long as reading the row takes: two threads halve it. A GPU needs no second one.
    """
    default = mx.default_stream(mx.default_device())
    if default.device != mx.Device(mx.cpu):
        return (default,)
    if not hasattr(_of_this_thread, "second"):
        _of_this_thread.second = mx.new_stream(mx.cpu)
    return default, _of_this_thread.second


def _make_buffer(shape: Sequence[int], dtype: mx.Dtype, stream: mx.Stream) -> mx.array:
    """Zeros in the form in which they are filled fastest."""
    wide = widest(shape[-1], dtype)
    numbers = shape[-1] * dtype.size // wide.size
    return mx.zeros((*shape[:-1], numbers), wide, stream=stream)


def _check(spec: ArraySpec, block: Block, shape: tuple[int, ...]) -> None:
    array = block.get(spec.name)
    if array is None:
        raise WrongBlock(f"{spec.name} is missing")
    if array.shape != shape or array.dtype != spec.dtype:
        found, wanted = f"{array.dtype} {array.shape}", f"{spec.dtype} {shape}"
        raise WrongBlock(f"{spec.name} is {found} and should be {wanted}")


def _check_state(specs: Sequence[ArraySpec], state: Block, position: int) -> None:
    for spec in specs:
        array = state.get(spec.name)
        if array is None or not spec.fits(array):
            raise WrongBlock(f"{spec.name} is missing or has another form")
        if spec.name.endswith(NUMBERS) and integers(array)[0] != position:
            raise WrongBlock(f"{spec.name} is {integers(array)}, the position is {position}")
