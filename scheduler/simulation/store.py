"""Saved KV in virtual time: what `KvStore` is to the loop and the engine, with a disk that takes as
long as it costs.

A saved block holds the tokens whose KV it would be, a state the digest of all tokens up to it, so
that a row that was filled from the wrong file is caught.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from pathlib import PurePath
from typing import Literal

from journal import events
from journal.events import Fact, ModelFacts, PlannedBlock
from scheduler.effects import RemoveFiles
from scheduler.engine.base import BadFile, Caches, RestoreRow, RowRestored, SaveTail
from scheduler.kvcache.naming import SUFFIX, BlockNamer, domain_digest
from scheduler.prefix import STATE_SUFFIX, is_tail, tail_name
from scheduler.settings import KvSettings
from scheduler.simulation.disk import File, SimulatedDisk

SECRET = bytes(32)

Part = Literal["block", "state", "tail"]


def state_of(tokens: "array[int]") -> bytes:
    """What a state says of all that went into it."""
    return sha256(tokens.tobytes()).digest()


class SimulatedStore:
    """See the module's text. The sizes of files are those that the model's facts give."""

    def __init__(
        self,
        facts: ModelFacts,
        settings: KvSettings,
        disk: SimulatedDisk,
        deliver: Callable[[Fact], None],
        nudge: Callable[[], None],
    ) -> None:
        limits = settings.limits(facts)
        assert limits is not None, "there is a store where something is saved"
        self.facts = facts
        self.limits = limits
        self.disk = disk
        self.timeline = disk.timeline
        self.deliver = deliver
        self.nudge = nudge
        self.block_tokens = limits.block_tokens
        self.domain = domain_digest(facts.fingerprint, "simulated", limits.block_tokens)
        self.tier: OrderedDict[str, File] = OrderedDict()
        self.tier_bytes = 0
        self.writing_bytes = 0
        self.stopped_ns: int | None = None

    # What the engine calls

    def describe(self, caches: Caches, num_tokens: int) -> str:  # noqa: ARG002
        """See `KvPort.describe`."""
        return self.domain

    def save(self, caches: Caches, blocks: Sequence[PlannedBlock]) -> None:
        """See `KvPort.save`."""
        for planned in blocks:
            file = self.cut(caches, planned)
            name = planned.hash + (STATE_SUFFIX if planned.part == "state" else "")
            if self.limits.memory_bytes:
                self.keep(name, file)
            if self.stopped_ns is not None:
                self.deliver(not_saved(planned, "given_up"))
            elif self.writing_bytes + file.num_bytes > 2 * self.limits.writing_bytes:
                self.deliver(not_saved(planned, "not_taken"))
            else:
                fact = partial(saved, planned, file)
                self.write(name, file, fact, not_saved(planned, "disk_full"))

    def cut(self, caches: Caches, planned: PlannedBlock) -> File:
        """The block's tokens, or the state at its end."""
        kept: array[int] = caches[0].tokens
        end = (planned.index + 1) * self.block_tokens
        if planned.part == "block":
            tokens = kept[end - self.block_tokens : end]
            assert len(tokens) == self.block_tokens, "the row holds what is saved of it"
            return File(tokens, b"", self.block_tokens * self.facts.kv_bytes_per_token)
        assert len(kept) == end, "a state is that of the row's own position"
        return File(array("I"), state_of(kept), self.facts.state_bytes)

    def write(self, name: str, file: File, fact: Callable[[int], Fact], failed: Fact) -> None:
        """Hands a file to the disk; its bytes are in a writer's hands until it is durable, or has
        failed.
        """
        self.writing_bytes += file.num_bytes

        def done(is_there: bool, duration_ns: int) -> None:
            self.writing_bytes -= file.num_bytes
            if not is_there and self.stopped_ns is None:
                self.stopped_ns = self.timeline.now_ns
                self.deliver(events.SavingStopped(reason="disk_full", detail=""))
            self.deliver(fact(duration_ns) if is_there else failed)

        self.disk.write(name, file, done)

    def probe(self) -> None:
        """The disk has room again, and saving goes on."""
        if self.stopped_ns is not None:
            stopped_ns = self.timeline.now_ns - self.stopped_ns
            self.stopped_ns = None
            self.deliver(events.SavingResumed(stopped_ns=stopped_ns))

    def refuse(self, blocks: Sequence[PlannedBlock]) -> None:
        """See `KvPort.refuse`."""
        for planned in blocks:
            self.deliver(not_saved(planned, "not_taken"))

    def save_tail(self, caches: Caches, command: SaveTail, end: int) -> None:
        """See `KvPort.save_tail`."""
        kept: array[int] = caches[0].tokens
        assert len(kept) == end, "a tail ends where the row is"
        tokens = kept[command.tail_start : end]
        if not tokens and not self.facts.state_bytes:
            self.deliver(tail_saved(command, end, 0, 0))
            return
        num_bytes = len(tokens) * self.facts.kv_bytes_per_token + self.facts.state_bytes
        file = File(tokens, state_of(kept) if self.facts.state_bytes else b"", num_bytes)
        name = tail_name(command.request_id, end)
        if self.stopped_ns is not None:
            self.deliver(tail_failed(command, "disk_full", ""))
            return
        fact = partial(tail_saved, command, end, num_bytes)
        self.write(name, file, fact, tail_failed(command, "disk_full", ""))

    def refuse_tail(self, command: SaveTail, reason: str) -> None:
        """See `KvPort.refuse_tail`."""
        self.deliver(tail_failed(command, "not_taken", reason))

    def restore(
        self, caches: Caches, command: RestoreRow, num_room_tokens: int, ready: Callable[[], None]
    ) -> "SimulatedRestore":
        """See `KvPort.restore`."""
        del num_room_tokens, ready
        return SimulatedRestore(self, caches, command)

    # What the loop calls

    def names(self) -> tuple[BlockNamer, int]:
        """As `KvStore.names`."""
        return BlockNamer(SECRET, self.domain), self.block_tokens

    def begin(self, known: Mapping[str, int]) -> None:
        """As `KvStore.begin`: what no event knows is swept, and what is not there is told."""
        names = dict.fromkeys(PurePath(path).name.removesuffix(SUFFIX) for path in known)
        missing = [name for name in names if name not in self.disk.files]
        if missing:
            self.deliver(lost(missing))
        swept = [name for name in self.disk.files if name not in names]
        swept_bytes = sum(self.disk.files.pop(name).num_bytes for name in swept)
        self.deliver(
            events.StoreMeasured(
                free_bytes=self.disk.free_bytes, num_swept=len(swept), swept_bytes=swept_bytes
            )
        )

    def remove(self, effect: RemoveFiles) -> None:
        """As `KvStore.remove`."""
        states = [name + STATE_SUFFIX for name in effect.states]
        for name in (*effect.hashes, *states, *effect.tails):
            self.forget(name)
            self.disk.files.pop(name, None)

    def shrink(self, names: Iterable[str]) -> None:
        """As `KvStore.shrink`."""
        for name in names:
            self.forget(name)

    # The memory tier

    def keep(self, name: str, file: File) -> None:
        """Keeps it in memory; what was used least recently goes when there is no room."""
        self.forget(name)
        self.tier[name] = file
        self.tier_bytes += file.num_bytes
        while self.tier_bytes > self.limits.memory_bytes:
            self.forget(next(iter(self.tier)))

    def forget(self, name: str) -> None:
        file = self.tier.pop(name, None)
        self.tier_bytes -= 0 if file is None else file.num_bytes

    def held_bytes(self) -> int:
        """What its blocks in memory and in writers' hands take of the allocator."""
        return self.tier_bytes + self.writing_bytes


class SimulatedRestore:
    """One row being filled. Its files are read one behind the other from the start on."""

    def __init__(self, store: SimulatedStore, caches: Caches, command: RestoreRow) -> None:
        self.store = store
        self.cache = caches[0]
        self.kept = array("I")
        self.command = command
        self.begun_ns = store.timeline.now_ns
        self.num_filled = 0
        self.read_bytes = 0
        self.num_memory_tokens = 0
        self.parts = parts_of(command)
        self.ready_ns: list[int] = []
        for name in self.parts:
            self.ready_ns.append(self.read(name))
            store.timeline.at(self.ready_ns[-1], store.nudge)

    def read(self, name: str) -> int:
        """When the file will have been read."""
        before = self.ready_ns[-1] if self.ready_ns else self.begun_ns
        file = self.store.disk.files.get(name)
        if name in self.store.tier:
            self.store.tier.move_to_end(name)
            if not name.endswith(STATE_SUFFIX):
                self.num_memory_tokens += self.store.block_tokens
            return before
        if file is None:
            return before
        self.read_bytes += file.num_bytes
        return max(before, self.store.disk.read_until(file.num_bytes))

    def has_news(self) -> bool:
        """Whether the next file has been read."""
        return self.ready_ns[self.num_filled] <= self.store.timeline.now_ns

    def advance(self, *, wait: bool) -> RowRestored | None:
        """See `Restoring.advance`."""
        assert not wait, "virtual time is not waited for"
        if not self.has_news():
            return None
        name = self.parts[self.num_filled]
        file = self.store.tier.get(name) or self.store.disk.files.get(name)
        if file is None:
            return self.stop_before(name)
        self.kept.extend(file.tokens)
        if file.state:
            assert state_of(self.kept) == file.state, f"{name} is another row's state"
        self.num_filled += 1
        if self.num_filled < len(self.parts):
            return None
        return self.result(self.command.num_tokens, ())

    def close(self) -> None:
        """See `Restoring.close`."""

    def stop_before(self, name: str) -> RowRestored:
        """The row from what is good before a file that is not there."""
        block_tokens = self.store.block_tokens
        depths = self.command.states if self.store.facts.state_bytes else range(self.num_filled + 1)
        there = [d for d in depths if d <= self.num_filled and self.has_state(d)]
        return self.result(max(there, default=0) * block_tokens, (bad_file(name),))

    def has_state(self, depth: int) -> bool:
        if not self.store.facts.state_bytes or depth == 0:
            return True
        return self.command.hashes[depth - 1] + STATE_SUFFIX in self.store.disk.files

    def result(self, position: int, bad: tuple[BadFile, ...]) -> RowRestored:
        """What came of it."""
        self.cache.feed(self.kept[:position])
        memory = min(self.num_memory_tokens, position)
        return RowRestored(
            number=self.command.number,
            num_tokens=position,
            num_memory_tokens=memory,
            num_disk_tokens=position - memory,
            read_bytes=self.read_bytes,
            duration_ns=self.store.timeline.now_ns - self.begun_ns,
            bad=bad,
        )


def parts_of(command: RestoreRow) -> list[str]:
    """The files of a restore in their order: blocks, then the tail or the deepest state."""
    names = list(command.hashes)
    if command.tail is not None:
        names.append(tail_name(command.tail.request_id, command.tail.end))
    elif command.states:
        names.append(command.hashes[command.states[-1] - 1] + STATE_SUFFIX)
    return names


def bad_file(name: str) -> BadFile:
    """A file that is missing, as a restore reports it."""
    if name.endswith(STATE_SUFFIX):
        return BadFile(name.removesuffix(STATE_SUFFIX), "state", "missing", "")
    part: Part = "tail" if is_tail(name) else "block"
    return BadFile(name, part, "missing", "")


def lost(names: Sequence[str]) -> Fact:
    """The fact of files that the journal knows and the disk has not."""
    states = [name for name in names if name.endswith(STATE_SUFFIX)]
    tails = [name for name in names if is_tail(name)]
    return events.BlocksLost(
        hashes=tuple(name for name in names if name not in states and name not in tails),
        states=tuple(name.removesuffix(STATE_SUFFIX) for name in states),
        reason="missing",
        tails=tuple(tails),
    )


def not_saved(planned: PlannedBlock, reason: Literal["disk_full", "given_up", "not_taken"]) -> Fact:
    """The fact of a block, or of a state, of which there is no file."""
    return events.BlockSaveFailed(hash=planned.hash, part=planned.part, reason=reason, detail="")


def tail_failed(command: SaveTail, reason: Literal["disk_full", "not_taken"], detail: str) -> Fact:
    """The fact of a tail of which there is no file."""
    return events.ChainSaveFailed(
        request_id=command.request_id, number=command.number, reason=reason, detail=detail
    )


def saved(planned: PlannedBlock, file: File, duration_ns: int) -> Fact:
    """The fact of a block, or of a state, that is durable."""
    return events.BlockSaved(
        hash=planned.hash,
        part=planned.part,
        saved_bytes=file.num_bytes,
        duration_ns=duration_ns,
    )


def tail_saved(command: SaveTail, end: int, num_bytes: int, duration_ns: int) -> Fact:
    """The fact of a tail that is durable, or of one that is nothing."""
    return events.ChainSaved(
        request_id=command.request_id,
        number=command.number,
        tail_start=command.tail_start,
        num_tokens=end,
        tail_bytes=num_bytes,
        duration_ns=duration_ns,
    )
