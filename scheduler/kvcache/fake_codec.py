"""The codec of the fake engine's rows, whose KV is the tokens that were fed. Without mlx."""

import hashlib
import time
from array import array
from collections.abc import Mapping
from typing import Any

from scheduler.kvcache.codec import Caches, Filler, WrongBlock
from scheduler.kvcache.fileformat import Tensor
from scheduler.kvcache.naming import KeptFile
from scheduler.kvcache.readahead import Read
from scheduler.kvcache.store import BlockStore, OpenFile, ReadFailed, Unreadable

TENSOR = "0.tokens"


class FakeFiller:
    """See `Filler`."""

    def __init__(self, caches: Caches) -> None:
        self._cache = caches[0]
        self._tokens = array("I")

    def fill(self, block: "array[int]", length: int) -> None:
        if len(block) != length:
            raise WrongBlock(f"{len(block)} tokens instead of {length}")
        self._tokens.extend(block)

    def finish(self, position: int, state: Any = None) -> None:
        assert state is None, "all of a fake row can be cut"
        self._cache.tokens.extend(self._tokens[:position])


class FakeCodec:
    """See `BlockCodec`."""

    def describe(self, caches: Caches, num_tokens: int) -> str:
        assert len(caches[0].tokens) == num_tokens, "the sample holds what it says"
        return hashlib.sha256(b"the tokens themselves").hexdigest()

    def cut_block(self, caches: Caches, start: int, length: int) -> "array[int]":
        cut = caches[0].tokens[start : start + length]
        assert len(cut) == length, f"{len(caches[0].tokens)} positions, not {start + length}"
        return cut

    def cut_state(self, caches: Caches, position: int) -> Any:  # noqa: ARG002
        raise AssertionError("all of a fake row can be cut")

    def filler(self, caches: Caches, num_room_tokens: int) -> Filler:  # noqa: ARG002
        return FakeFiller(caches)

    def size_of(self, block: "array[int]") -> int:
        return len(block) * block.itemsize

    def tensors(self, block: "array[int]") -> Mapping[str, Tensor]:
        return {TENSOR: Tensor("U32", (len(block),), memoryview(block).cast("B"))}

    def read(self, store: BlockStore, file: KeptFile) -> Read | ReadFailed:
        begun_ns = time.monotonic_ns()
        try:
            with OpenFile(store, file) as opened:
                opened.check_data()
                data = store.path(file).read_bytes()[opened.header.header_bytes :]
        except Unreadable as error:
            return error.failed
        return Read(file, array("I", data), "ssd", time.monotonic_ns() - begun_ns, len(data))

    def end_thread(self) -> None:
        """Nothing is left behind in a thread."""
