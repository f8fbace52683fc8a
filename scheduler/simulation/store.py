"""Saved KV in virtual time: what `KvStore` is to the loop and the engine, with a disk that takes as
long as it costs.

A saved block holds the tokens whose KV it would be, a state the digest of all tokens up to it, so
that a row that was filled from the wrong file is caught.
"""

from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import PurePath
from typing import Literal

from journal import events
from journal.events import Fact, ModelFacts, PlannedBlock
from scheduler.effects import RemoveFiles
from scheduler.engine.base import Caches, RestoreRow, SaveTail
from scheduler.keptfiles import lost, tail_not_saved, tail_saved
from scheduler.kvcache.naming import SUFFIX, BlockNamer, domain_digest
from scheduler.prefix import STATE_SUFFIX, tail_name
from scheduler.settings import KvSettings
from scheduler.simulation.disk import Damage, File, SimulatedDisk, WriteTrouble
from scheduler.simulation.restore import SimulatedRestore, state_of

SECRET = bytes(32)

Failure = Literal["disk_full", "io_error", "given_up", "not_taken"]
Outcome = Callable[[Failure | None, int], Fact]


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
        self.stopped: WriteTrouble | None = None
        self.outcomes: dict[str, tuple[int, Outcome]] = {}

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
                self.write(name, file, partial(block_outcome, planned, file))

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

    def write(self, name: str, file: File, outcome: Outcome) -> None:
        """Hands a file to the disk; its bytes are in a writer's hands until it is durable, or has
        failed. Then what has not begun to be written is given up, and nothing is taken.
        """
        assert name not in self.outcomes, f"{name} is being written already"
        self.writing_bytes += file.num_bytes
        self.outcomes[name] = (file.num_bytes, outcome)

        def done(trouble: WriteTrouble | None, duration_ns: int) -> None:
            self.tell(name, trouble, duration_ns)
            if trouble is not None and self.stopped_ns is None:
                self.stopped_ns = self.timeline.now_ns
                self.stopped = trouble
                self.deliver(events.SavingStopped(reason=trouble, detail=""))
                for waiting in self.disk.give_up():
                    self.tell(waiting, "given_up", 0)

        self.disk.write(name, file, done)

    def tell(self, name: str, failure: Failure | None, duration_ns: int) -> None:
        """What came of a file that was to be written."""
        num_bytes, outcome = self.outcomes.pop(name)
        self.writing_bytes -= num_bytes
        self.deliver(outcome(failure, duration_ns))

    def probe(self) -> None:
        """The disk has room again, and saving goes on."""
        if self.stopped_ns is not None:
            stopped_ns = self.timeline.now_ns - self.stopped_ns
            self.stopped_ns = self.stopped = None
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
        if name in self.outcomes:
            self.refuse_tail(command, "an older one of this name is still being written")
        elif self.stopped is not None:
            self.deliver(tail_not_saved(command, self.stopped, ""))
        elif self.writing_bytes + num_bytes > 2 * self.limits.writing_bytes:
            self.refuse_tail(command, "the writers have no room for it")
        else:
            there = partial(tail_saved, command, end, num_bytes)
            self.write(name, file, partial(self.tail_outcome, command, there))

    def tail_outcome(
        self,
        command: SaveTail,
        there: Callable[[int], Fact],
        failure: Failure | None,
        duration_ns: int,
    ) -> Fact:
        """What came of a tail. Given up with others, it has failed as they did."""
        match failure:
            case None:
                return there(duration_ns)
            case "disk_full" | "io_error" | "not_taken":
                return tail_not_saved(command, failure, "")
            case "given_up":
                return tail_not_saved(command, self.stopped or "not_taken", "")

    def refuse_tail(self, command: SaveTail, reason: str) -> None:
        """See `KvPort.refuse_tail`."""
        self.deliver(tail_not_saved(command, "not_taken", reason))

    def restore(
        self, caches: Caches, command: RestoreRow, num_room_tokens: int, ready: Callable[[], None]
    ) -> SimulatedRestore:
        """See `KvPort.restore`."""
        del num_room_tokens, ready
        return SimulatedRestore(self, caches, command)

    # What the loop calls

    def names(self) -> tuple[BlockNamer, int]:
        """As `KvStore.names`."""
        return BlockNamer(SECRET, self.domain), self.block_tokens

    def begin(self, known: Mapping[str, int]) -> None:
        """As `KvStore.begin`: what no event knows is swept, and what is not there, or has another
        size, is told.
        """
        names = dict.fromkeys(PurePath(path).name.removesuffix(SUFFIX) for path in known)
        missing = [name for name in names if name not in self.disk.files]
        resized = [name for name in names if name in self.disk.cut]
        if missing:
            self.deliver(lost(missing, "missing"))
        if resized:
            self.deliver(lost(resized, "corrupt"))
        swept = [name for name in self.disk.files if name not in names]
        swept_bytes = sum(self.disk.remove(name) for name in swept)
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
            self.disk.remove(name)

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

    def damage_of(self, name: str) -> Damage | None:
        """What is wrong with a file for somebody who needs it: nothing, where memory has it."""
        return None if name in self.tier else self.disk.look_at(name)

    def damage_on_disk(self, name: str) -> Damage | None:
        """What a look at the file itself shows. Where it has none memory lets go of it as well."""
        damage = self.disk.look_at(name)
        if damage == "io_error":
            return None
        if damage is not None:
            self.forget(name)
        return damage

    def held_bytes(self) -> int:
        """What its blocks in memory and in writers' hands take of the allocator."""
        return self.tier_bytes + self.writing_bytes


def block_outcome(
    planned: PlannedBlock, file: File, failure: Failure | None, duration_ns: int
) -> Fact:
    """What came of a block, or of a state."""
    return not_saved(planned, failure) if failure else saved(planned, file, duration_ns)


def not_saved(planned: PlannedBlock, reason: Failure) -> Fact:
    """The fact of a block, or of a state, of which there is no file."""
    return events.BlockSaveFailed(hash=planned.hash, part=planned.part, reason=reason, detail="")


def saved(planned: PlannedBlock, file: File, duration_ns: int) -> Fact:
    """The fact of a block, or of a state, that is durable."""
    return events.BlockSaved(
        hash=planned.hash,
        part=planned.part,
        saved_bytes=file.num_bytes,
        duration_ns=duration_ns,
    )
