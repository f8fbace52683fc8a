"""One row being filled from saved blocks, in the engine's thread, a block at a time."""

import time
from collections.abc import Callable
from contextlib import ExitStack

from scheduler.engine.base import BadFile, RestoreRow, RowRestored
from scheduler.kvcache.codec import Filler, WrongBlock
from scheduler.kvcache.naming import BlockFile, KeptFile, StateFile, TailFile
from scheduler.kvcache.readahead import Announce, Examine, Fetch, Read, ReadAhead
from scheduler.kvcache.store import ReadFailed

MAX_BAD = 6
"""Files that one restore finds bad by reading them at most; after that the row begins empty."""


class Restore:
    """See the module's text. `make_filler` is called once, here; `used` is told of each block that
    the row was filled from.

    What a held request had behind its blocks, its tail, follows them; else, where layers cannot be
    cut (`has_state`), the state of the deepest boundary does. If a file is bad, the row goes on
    from the last position before it that it can: the end of the last good block, or the deepest
    good state. Then all files of the chain are examined, so that the row can save whatever is not
    there; else each request for the prompt would find one more.
    """

    def __init__(
        self,
        command: RestoreRow,
        make_filler: Callable[[], Filler],
        *,
        fetch: Fetch,
        used: Callable[[Read], None],
        files: Callable[[str, bool], KeptFile],
        domain: str,
        has_state: bool,
        block_tokens: int,
        ready: Callable[[], None],
        end_thread: Callable[[], None],
        announce: Announce,
        examine: Examine,
    ) -> None:
        self.command = command
        self.fetch = fetch
        self.used = used
        self.files = files
        self.has_state = has_state
        self.block_tokens = block_tokens
        self.begun_ns = time.monotonic_ns()
        self.from_memory: list[bool] = []
        self.read_bytes = 0
        self.bad: list[ReadFailed] = []
        wanted = [files(name, False) for name in command.hashes]
        tail = command.tail
        if tail is not None:
            assert tail.start == len(wanted) * block_tokens, "a tail follows whole blocks"
            assert tail.end == command.num_tokens, "the row ends with its tail"
            wanted.append(TailFile(domain, tail.request_id, tail.end))
        states = [files(command.hashes[depth - 1], True) for depth in command.states]
        if tail is None and states:
            wanted.append(states.pop())
        # The disk is busy already while the memory of the row is made ready, which takes as long.
        self.ahead = ReadAhead(
            fetch, wanted, ready, end_thread, announce=announce, examine=examine, others=states
        )
        with ExitStack() as if_it_fails:
            if_it_fails.callback(self.ahead.close)
            self.filler = make_filler()
            if_it_fails.pop_all()

    def advance(self, *, wait: bool) -> RowRestored | None:
        """See `Restoring.advance`."""
        found = self.ahead.take(wait=wait)
        if found is None:
            return None
        if isinstance(found, ReadFailed):
            self.bad.append(found)
            return self.finish_before()
        if isinstance(found.file, StateFile):
            return self.finish_at(self.command.states[-1], found)
        if isinstance(found.file, TailFile):
            return self.finish_with(found)
        if not self.fill(found):
            return self.finish_before()
        is_last = len(self.from_memory) == len(self.command.hashes)
        follows = self.command.tail is not None or self.command.states
        return self.finish_before() if is_last and not follows else None

    def close(self) -> None:
        """See `Restoring.close`."""
        self.ahead.close()

    def fill(self, found: Read) -> bool:
        """Copies one block. False, and nothing is changed, when it belongs to another layout."""
        try:
            self.filler.fill(found.block, self.block_tokens)
        except WrongBlock as error:
            self.bad.append(ReadFailed(found.file, "corrupt", str(error)))
            return False
        self.from_memory.append(found.tier == "memory")
        self.count(found)
        return True

    def count(self, found: Read) -> None:
        """Notes where a block came from, and that it was used."""
        if found.tier == "ssd":
            self.read_bytes += found.num_bytes
        self.used(found)

    def finish_before(self) -> RowRestored:
        """The row from what is good: all filled blocks, or the deepest state among them."""
        num_blocks = len(self.from_memory)
        if not self.has_state:
            most = num_blocks * self.block_tokens
            return self.finish(min(most, self.command.num_tokens))
        for depth in reversed(self.command.states):
            if len(self.bad) == MAX_BAD:
                break
            if depth > num_blocks or self.is_bad(depth):
                continue
            found = self.fetch(self.files(self.command.hashes[depth - 1], True))
            if isinstance(found, ReadFailed):
                self.bad.append(found)
                continue
            return self.finish_at(depth, found)
        return self.finish(0)

    def finish_at(self, depth: int, state: Read) -> RowRestored:
        """The row at a boundary, with its state; a shallower one when the state is another's."""
        try:
            self.filler.finish(depth * self.block_tokens, state.block)
        except WrongBlock as error:
            self.bad.append(ReadFailed(state.file, "corrupt", str(error)))
            return self.finish_before()
        self.count(state)
        return self.result(depth * self.block_tokens)

    def finish_with(self, tail: Read) -> RowRestored:
        """The row at the end of its tail; before it when the tail is another's. Memory does not
        hear of it: nobody else can use it.
        """
        assert self.command.tail is not None, "a tail is read where there is one"
        start, end = self.command.tail.start, self.command.tail.end
        try:
            if start < end:
                self.filler.fill(tail.block, end - start)
            self.filler.finish(end, tail.block)
        except WrongBlock as error:
            self.bad.append(ReadFailed(tail.file, "corrupt", str(error)))
            return self.finish_before()
        self.read_bytes += tail.num_bytes
        return self.result(end)

    def finish(self, position: int) -> RowRestored:
        """The row at this position, where all layers can be cut; empty at 0."""
        if position:
            self.filler.finish(position)
        return self.result(position)

    def is_bad(self, depth: int) -> bool:
        """Whether the state at this depth is known to be of no use."""
        state = self.files(self.command.hashes[depth - 1], True)
        return any(failed.file == state for failed in (*self.bad, *self.ahead.also_bad))

    def result(self, position: int) -> RowRestored:
        """What came of it, with the tokens of each tier up to the position."""
        self.ahead.close()
        memory = disk = 0
        for number, was_memory in enumerate(self.from_memory):
            tokens = max(0, min(self.block_tokens, position - number * self.block_tokens))
            memory, disk = memory + tokens * was_memory, disk + tokens * (not was_memory)
        disk += max(0, position - len(self.from_memory) * self.block_tokens)
        return RowRestored(
            number=self.command.number,
            num_tokens=position,
            num_memory_tokens=memory,
            num_disk_tokens=disk,
            read_bytes=self.read_bytes,
            duration_ns=time.monotonic_ns() - self.begun_ns,
            bad=tuple(bad_file(failed) for failed in self.bad),
            lost=tuple(bad_file(failed) for failed in self.ahead.also_bad),
        )


def bad_file(failed: ReadFailed) -> BadFile:
    """A file that cannot be used, as the engine says it."""
    file = failed.file
    match file:
        case BlockFile():
            return BadFile(file.hash, "block", failed.kind, failed.detail)
        case StateFile():
            return BadFile(file.hash, "state", failed.kind, failed.detail)
        case TailFile():
            return BadFile(file.name, "tail", failed.kind, failed.detail)
