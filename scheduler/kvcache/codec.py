"""What turns a row's caches into blocks and back. The store knows files and bytes only, so a fake
engine without mlx brings a codec of its own.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from scheduler.kvcache.fileformat import Tensor
from scheduler.kvcache.naming import KeptFile
from scheduler.kvcache.readahead import Read
from scheduler.kvcache.store import BlockStore, ReadFailed

Caches = Sequence[Any]


class WrongBlock(Exception):
    """A block that does not belong to this layout or position. To be treated as a damaged one."""


class Filler(Protocol):
    """Fills the caches of one new row. See `filling.RowFiller`."""

    def fill(self, block: Any, length: int) -> None:
        """Copies the next `length` positions. Raises WrongBlock, and then nothing has changed."""
        ...

    def finish(self, position: int, state: Any = None) -> None:
        """Hands the caches over at this position. Raises WrongBlock, and then they are empty."""
        ...


class BlockCodec(Protocol):
    """All but `size_of`, `tensors` and `read` is called in the engine's thread only."""

    def describe(self, caches: Caches, num_tokens: int) -> str:
        """The digest of how these caches lie, of a row that holds `num_tokens` tokens. Called
        once, before the others.

        Raises UnsupportedCache when one of them cannot be saved.
        """
        ...

    @property
    def has_state(self) -> bool:
        """Whether there are layers that cannot be cut, so that a row needs their state."""
        ...

    def cut_block(self, caches: Caches, start: int, length: int) -> Any:
        """The positions from `start` on of the layers that can be cut, evaluated and with memory
        of their own.
        """
        ...

    def cut_state(self, caches: Caches, position: int) -> Any:
        """The layers that cannot be cut, as they are at this position, which is the row's."""
        ...

    def cut_tail(self, caches: Caches, start: int, position: int) -> Any:
        """Both in one: the positions from `start` to `position`, which is the row's, of the layers
        that can be cut, if there are any such positions, and the layers that cannot be cut.
        """
        ...

    def filler(self, caches: Caches, num_room_tokens: int) -> Filler:
        """Fills these caches, which are empty, with room for so many positions."""
        ...

    def size_of(self, block: Any) -> int:
        """The bytes of memory that a block holds."""
        ...

    def tensors(self, block: Any) -> Mapping[str, Tensor]:
        """The block as bytes, without a copy."""
        ...

    def read(self, store: BlockStore, file: KeptFile) -> Read | ReadFailed:
        """A block from its file, with every bit checked. In any thread."""
        ...

    def end_thread(self) -> None:
        """The last thing that a thread does which has read blocks."""
        ...


class UnsupportedCache(Exception):
    """A layer's cache cannot be saved, so no KV of this model is. The text names the class."""
