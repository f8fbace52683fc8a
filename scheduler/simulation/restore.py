"""A row that is filled from saved files in virtual time."""

from array import array
from collections import OrderedDict
from hashlib import sha256
from typing import Literal, Protocol

from journal.events import ModelFacts
from scheduler.engine.base import BadFile, Caches, RestoreRow, RowRestored
from scheduler.prefix import STATE_SUFFIX, is_tail, tail_name
from scheduler.simulation.disk import Damage, File, SimulatedDisk
from scheduler.simulation.timeline import Timeline

Part = Literal["block", "state", "tail"]


class Store(Protocol):
    """What a restore needs of the store."""

    facts: ModelFacts
    disk: SimulatedDisk
    timeline: Timeline
    block_tokens: int
    tier: OrderedDict[str, File]

    def nudge(self) -> None:
        """Tells the engine that a file has been read."""
        ...

    def damage_of(self, name: str) -> Damage | None: ...

    def damage_on_disk(self, name: str) -> Damage | None: ...


def state_of(tokens: "array[int]") -> bytes:
    """What a state says of all that went into it."""
    return sha256(tokens.tobytes()).digest()


class SimulatedRestore:
    """One row being filled. Its files are read one behind the other from the start on."""

    def __init__(self, store: Store, caches: Caches, command: RestoreRow) -> None:
        self.store = store
        self.cache = caches[0]
        self.kept = array("I")
        self.command = command
        self.begun_ns = store.timeline.now_ns
        self.num_filled = 0
        self.read_bytes = 0
        self.num_memory_tokens = 0
        self.bad: list[BadFile] = []
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
        damage = self.store.damage_of(name)
        if damage is not None:
            self.bad.append(bad_file(name, damage))
            return self.stop_before()
        file = self.store.tier.get(name) or self.store.disk.files[name]
        self.kept.extend(file.tokens)
        if file.state:
            assert state_of(self.kept) == file.state, f"{name} is another row's state"
        self.num_filled += 1
        if self.num_filled < len(self.parts):
            return None
        return self.result(self.command.num_tokens)

    def close(self) -> None:
        """See `Restoring.close`."""

    def stop_before(self) -> RowRestored:
        """The row from what is good before a file that is not."""
        num_blocks = min(self.num_filled, len(self.command.hashes))
        if not self.store.facts.state_bytes:
            return self.result(num_blocks * self.store.block_tokens)
        for depth in reversed(self.command.states):
            if depth <= num_blocks and self.has_state(depth):
                return self.result(depth * self.store.block_tokens)
        return self.result(0)

    def has_state(self, depth: int) -> bool:
        """Whether the state at a boundary is good. One that is not is bad too."""
        name = self.command.hashes[depth - 1] + STATE_SUFFIX
        damage = self.store.damage_of(name)
        if damage is None:
            return True
        bad = bad_file(name, damage)
        if bad not in self.bad:
            self.bad.append(bad)
        return False

    def also_lost(self) -> list[BadFile]:
        """Other files of the chain that are not as they were, once one was found bad."""
        if not self.bad:
            return []
        states = [self.command.hashes[depth - 1] + STATE_SUFFIX for depth in self.command.states]
        names = dict.fromkeys((*self.parts, *states))
        found: list[tuple[str, Damage | None]] = [
            (name, self.store.damage_on_disk(name)) for name in names
        ]
        looked = [bad_file(name, damage) for name, damage in found if damage is not None]
        told = {(bad.hash, bad.part) for bad in self.bad}
        return [lost for lost in looked if (lost.hash, lost.part) not in told]

    def result(self, position: int) -> RowRestored:
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
            bad=tuple(self.bad),
            lost=tuple(self.also_lost()),
        )


def parts_of(command: RestoreRow) -> list[str]:
    """The files of a restore in their order: blocks, then the tail or the deepest state."""
    names = list(command.hashes)
    if command.tail is not None:
        names.append(tail_name(command.tail.request_id, command.tail.end))
    elif command.states:
        names.append(command.hashes[command.states[-1] - 1] + STATE_SUFFIX)
    return names


def bad_file(name: str, damage: Damage) -> BadFile:
    """A file that is of no use, as a restore reports it."""
    if name.endswith(STATE_SUFFIX):
        return BadFile(name.removesuffix(STATE_SUFFIX), "state", damage, "")
    part: Part = "tail" if is_tail(name) else "block"
    return BadFile(name, part, damage, "")
