"""The codec of rows whose caches are mlx arrays."""

from collections.abc import Mapping
from typing import Any

import mlx.core as mx

from scheduler.kvcache.arrays import Block, block_bytes, tensors
from scheduler.kvcache.codec import Caches, Filler
from scheduler.kvcache.fileformat import Tensor
from scheduler.kvcache.filling import RowFiller
from scheduler.kvcache.layout import Layout, layout_of
from scheduler.kvcache.naming import KeptFile
from scheduler.kvcache.readahead import Read
from scheduler.kvcache.reading import read
from scheduler.kvcache.store import BlockStore, ReadFailed


class MlxCodec:
    """See `BlockCodec`."""

    def __init__(self) -> None:
        self._layout: Layout | None = None

    def describe(self, caches: Caches, num_tokens: int) -> str:
        self._layout = layout_of(caches, num_tokens)
        return self._layout.digest

    @property
    def layout(self) -> Layout:
        """How the model's caches lie."""
        assert self._layout is not None, "`describe` comes first"
        return self._layout

    @property
    def has_state(self) -> bool:
        return bool(self.layout.state_layers)

    def cut_block(self, caches: Caches, start: int, length: int) -> Block:
        return self.layout.cut_block(caches, start, length)

    def cut_state(self, caches: Caches, position: int) -> Block:
        return self.layout.cut_state(caches, position)

    def cut_tail(self, caches: Caches, start: int, position: int) -> Block:
        return self.layout.cut_tail(caches, start, position)

    def filler(self, caches: Caches, num_room_tokens: int) -> Filler:
        return RowFiller(self.layout, caches, num_room_tokens)

    def size_of(self, block: Any) -> int:
        return block_bytes(block)

    def tensors(self, block: Any) -> Mapping[str, Tensor]:
        return tensors(block)

    def read(self, store: BlockStore, file: KeptFile) -> Read | ReadFailed:
        return read(store, file)

    def end_thread(self) -> None:
        mx.clear_streams()
