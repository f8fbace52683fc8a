"""The codec of the fake engine's rows, whose KV is the tokens that were fed. Without mlx."""

import hashlib
import time
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field

from scheduler.kvcache.codec import Caches, Filler, WrongBlock
from scheduler.kvcache.fileformat import Tensor
from scheduler.kvcache.naming import KeptFile
from scheduler.kvcache.readahead import Read
from scheduler.kvcache.store import BlockStore, OpenFile, ReadFailed, Unreadable

STATE = "0.state"
TOKENS = "0.tokens"
STATE_NUMBERS = 2


@dataclass(frozen=True)
class FakeBlock:
    """Tokens, or the state at a position as that position and a digest, or both."""

    tokens: "array[int]" = field(default_factory=lambda: array("I"))
    state: "array[int]" = field(default_factory=lambda: array("I"))


class FakeFiller:
    """See `Filler`."""

    def __init__(self, caches: Caches) -> None:
        self._cache = caches[0]
        self._tokens = array("I")

    def fill(self, block: FakeBlock, length: int) -> None:
        if len(block.tokens) != length:
            raise WrongBlock(f"{len(block.tokens)} tokens instead of {length}")
        self._tokens.extend(block.tokens)

    def finish(self, position: int, state: FakeBlock | None = None) -> None:
        assert position <= len(self._tokens), f"{len(self._tokens)} positions, not {position}"
        if self._cache.state is not None:
            self._cache.state = digest_at(position, state)
        self._cache.tokens.extend(self._tokens[:position])


def digest_at(position: int, block: FakeBlock | None) -> int:
    """The digest in a state of this position."""
    state = array("I") if block is None else block.state
    if len(state) != STATE_NUMBERS or state[0] != position:
        raise WrongBlock(f"the state {state.tolist()} is not one at position {position}")
    return state[1]


class FakeCodec:
    """See `BlockCodec`."""

    def __init__(self) -> None:
        self.has_state = False

    def describe(self, caches: Caches, num_tokens: int) -> str:
        assert len(caches[0].tokens) == num_tokens, "the sample holds what it says"
        self.has_state = caches[0].state is not None
        text = b"the tokens and a digest" if self.has_state else b"the tokens themselves"
        return hashlib.sha256(text).hexdigest()

    def cut_block(self, caches: Caches, start: int, length: int) -> FakeBlock:
        cut = caches[0].tokens[start : start + length]
        assert len(cut) == length, f"{len(caches[0].tokens)} positions, not {start + length}"
        return FakeBlock(cut)

    def cut_state(self, caches: Caches, position: int) -> FakeBlock:
        assert len(caches[0].tokens) == position, f"{len(caches[0].tokens)}, not {position}"
        assert self.has_state, "all of this row can be cut"
        return FakeBlock(state=array("I", [position, caches[0].state]))

    def cut_tail(self, caches: Caches, start: int, position: int) -> FakeBlock:
        tokens = self.cut_block(caches, start, position - start).tokens
        state = self.cut_state(caches, position).state if self.has_state else array("I")
        return FakeBlock(tokens, state)

    def filler(self, caches: Caches, num_room_tokens: int) -> Filler:  # noqa: ARG002
        return FakeFiller(caches)

    def size_of(self, block: FakeBlock) -> int:
        return block.tokens.itemsize * (len(block.tokens) + len(block.state))

    def tensors(self, block: FakeBlock) -> Mapping[str, Tensor]:
        parts = {STATE: block.state, TOKENS: block.tokens}
        return {
            name: Tensor("U32", (len(part),), memoryview(part).cast("B"))
            for name, part in parts.items()
            if part
        }

    def read(self, store: BlockStore, file: KeptFile) -> Read | ReadFailed:
        begun_ns = time.monotonic_ns()
        try:
            with OpenFile(store, file) as opened:
                opened.check_data()
                data = store.path(file).read_bytes()[opened.header.header_bytes :]
                names = opened.header.names
        except Unreadable as error:
            return error.failed
        numbers = array("I", data)
        num_state = STATE_NUMBERS if STATE in names else 0
        block = FakeBlock(numbers[num_state:], numbers[:num_state])
        return Read(file, block, "ssd", time.monotonic_ns() - begun_ns, len(data))

    def end_thread(self) -> None:
        """Nothing is left behind in a thread."""
