"""Saved KV in the engine's thread: blocks are cut out of rows, and rows are filled from them."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

from scheduler.engine.base import Deliver, KvPort, RestoreRow, Restoring, SaveBlocks, SaveTail
from scheduler.engine.decoding import ROW_ERRORS
from scheduler.engine.rows import Row

Fail = Callable[[Row, Literal["start", "prefill", "decode"], Exception], None]


@dataclass(frozen=True, slots=True)
class Ready:
    """A block has been read for this row: the engine's own note to itself."""

    number: int


def ignore(_: Ready) -> None:
    """Nobody is there to be woken yet."""


class SavedKv:
    """`wake` is called in a reader's thread when a row can be filled on; `fail` of a row whose work
    raised.
    """

    def __init__(self, port: KvPort | None, deliver: Deliver, fail: Fail) -> None:
        self._port = port
        self._deliver = deliver
        self._fail = fail
        self._restores: dict[int, tuple[Row, Restoring]] = {}
        self.wake: Callable[[Ready], None] = ignore

    @property
    def port(self) -> KvPort:
        """The store that a command about blocks needs."""
        assert self._port is not None, "blocks are saved where there is a store"
        return self._port

    def save(self, row: Row, command: SaveBlocks) -> None:
        """Cuts blocks out of a row, unless its work has raised meanwhile."""
        if row.broken:
            self.port.refuse(command.blocks)
            return
        try:
            self.port.save(row.caches, command.blocks)
        except ROW_ERRORS as error:
            self._fail(row, "prefill", error)

    def save_tail(self, row: Row, command: SaveTail) -> None:
        """Cuts the tail out of a row that has come to rest."""
        try:
            self.port.save_tail(row.caches, command, row.cached)
        except ROW_ERRORS as error:
            self._fail(row, "decode", error)

    def restore(self, row: Row, command: RestoreRow) -> None:
        """Begins to fill a row. What has been read is copied as it comes, between two steps."""
        if row.ended:
            return
        ready = partial(self.wake, Ready(row.number))
        try:
            restoring = self.port.restore(row.caches, command, len(row.tokens), ready)
        except ROW_ERRORS as error:
            self._fail(row, "start", error)
            return
        self._restores[row.number] = (row, restoring)

    def advance(self, number: int) -> None:
        """Copies the block that has been read, unless the row was dropped meanwhile."""
        if number not in self._restores:
            return
        row, restoring = self._restores[number]
        try:
            result = restoring.advance(wait=False)
        except ROW_ERRORS as error:
            self.close(number)
            self._fail(row, "start", error)
            return
        if result is not None:
            self.close(number)
            row.cached = result.num_tokens
            self._deliver(result)

    def close(self, number: int) -> None:
        """Gives up the restore of this row, if there is one."""
        if number in self._restores:
            self._restores.pop(number)[1].close()
