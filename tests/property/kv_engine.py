"""An engine whose rows are saved and restored, and a disk that keeps files, loses them, breaks them
and fills up.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from journal import events
from journal.events import AnyEvent, Part, PlannedBlock
from scheduler import effects
from tests.property.fake_engine import Command, FakeEngine, Row

HEADER_BYTES = 7
"""What a file has more than was planned for it."""

File = tuple[str, str, Part]
"""Domain, hash and part."""


@dataclass
class Disk:
    """Files, and two writers. `trouble` is why nothing can be written; `stopped` that it was seen.

    `lost` are files that vanished and of which the core has not heard.
    """

    sizes: dict[File, int] = field(default_factory=dict)
    broken: set[File] = field(default_factory=set)
    lost: set[File] = field(default_factory=set)
    queue: list[tuple[File, int]] = field(default_factory=list)
    trouble: Literal["", "disk_full", "io_error", "obstructed"] = ""
    stopped: bool = False
    results: deque[AnyEvent] = field(default_factory=deque)

    def offer(self, file: File, num_bytes: int) -> None:
        assert file not in [queued for queued, _ in self.queue], "a file is written once at a time"
        if self.stopped:
            self.fail(file, "given_up")
        else:
            self.queue.append((file, num_bytes))

    def fail(self, file: File, reason: str) -> None:
        self.results.append(
            msgspec.convert(
                {"hash": file[1], "part": file[2], "reason": reason, "detail": ""},
                events.BlockSaveFailed,
            )
        )

    def write(self, which: int) -> bool:
        """One of the two writers is done with what it had in hand."""
        if not self.queue:
            return False
        file, num_bytes = self.queue.pop(which % min(2, len(self.queue)))
        if self.trouble:
            self.fail(file, self.trouble)
            self.stop_if_needed()
            return True
        self.sizes[file] = num_bytes + HEADER_BYTES
        self.broken.discard(file)
        self.lost.discard(file)
        self.results.append(
            events.BlockSaved(
                hash=file[1], part=file[2], saved_bytes=num_bytes + HEADER_BYTES, duration_ns=1
            )
        )
        return True

    def stop_if_needed(self) -> None:
        if self.trouble in ("disk_full", "io_error") and not self.stopped:
            self.stopped = True
            self.results.append(events.SavingStopped(reason=self.trouble, detail=""))
            for file, _ in self.queue:
                self.fail(file, "given_up")
            self.queue.clear()

    def heal(self) -> None:
        """A probe comes through."""
        self.trouble = ""
        if self.stopped:
            self.stopped = False
            self.results.append(events.SavingResumed(stopped_ns=1))

    def remove(self, effect: effects.RemoveFiles) -> None:
        """Unlinks what the core has sent away."""
        for name in effect.hashes:
            self.unlink((effect.domain, name, "block"))
        for name in effect.states:
            self.unlink((effect.domain, name, "state"))

    def unlink(self, file: File) -> None:
        assert file not in [queued for queued, _ in self.queue], "nobody writes what goes"
        self.sizes.pop(file, None)
        self.broken.discard(file)
        self.lost.discard(file)

    def restart(self, known: set[File], num_done: int) -> list[AnyEvent]:
        """The process is gone with its writers: some files were just done. What nobody knows is
        swept.
        """
        self.results.clear()
        for file, num_bytes in self.queue[:num_done]:
            self.sizes[file] = num_bytes
        self.queue.clear()
        self.trouble, self.stopped = "", False
        for file in set(self.sizes) - known:
            del self.sizes[file]
            self.broken.discard(file)
        return self.verify(known, "missing")

    def verify(self, known: set[File], reason: Literal["missing", "corrupt"]) -> list[AnyEvent]:
        """What of the known files is not there, or is broken."""
        bad = known - set(self.sizes) if reason == "missing" else known & self.broken
        self.lost -= bad
        if not bad:
            return []
        blocks = tuple(sorted(name for _, name, part in bad if part == "block"))
        states = tuple(sorted(name for _, name, part in bad if part == "state"))
        return [events.BlocksLost(hashes=blocks, states=states, reason=reason)]


@dataclass
class KvEngine(FakeEngine):
    """Saves what it is told to, and fills rows from the disk, as far as it is good."""

    disk: Disk = field(default_factory=Disk)
    domain: str = ""
    block_tokens: int = 0
    sizes: dict[Part, int] = field(default_factory=dict)
    broken: set[int] = field(default_factory=set)

    def advance(self) -> bool:
        if self.loaded:
            return super().advance()
        super().advance()
        ready = self.results.pop()
        self.results.append(msgspec.structs.replace(ready, kv_domain=self.domain))
        return True

    def break_row(self, which: int, during: Literal["start", "prefill", "decode"]) -> None:
        super().break_row(which, during)
        if self.results and isinstance(self.results[-1], events.EngineFailed):
            self.broken.add(id(self.rows[self.results[-1].number]))

    def obey_about_blocks(self, command: Command) -> None:
        match command:
            case effects.SaveBlocks():
                for planned in command.blocks:
                    self.save(self.rows[command.number], planned)
            case effects.RestoreRow():
                self.restore(self.rows[command.number], command)
            case _:
                super().obey_about_blocks(command)

    def save(self, row: Row, planned: PlannedBlock) -> None:
        file: File = (self.domain, planned.hash, planned.part)
        if id(row) in self.broken:
            self.disk.fail(file, "not_taken")
            return
        end = (planned.index + 1) * self.block_tokens
        if planned.part == "block":
            assert end <= row.cached, "a block is saved that the row holds"
        else:
            assert end == row.cached, "a state is saved where the row is"
        self.disk.offer(file, self.sizes[planned.part])

    def restore(self, row: Row, command: effects.RestoreRow) -> None:
        if not row.runs:
            return
        bad: list[AnyEvent] = []
        good = 0
        for name in command.hashes:
            if not self.is_good(name, "block", bad):
                break
            good += 1
        if bad:
            bad += self.also_bad(command.hashes[good + 1 :])
        tokens = min(good * self.block_tokens, command.num_tokens)
        if command.states:
            depths = [d for d in reversed(command.states) if d <= good]
            usable = (d for d in depths if self.is_good(command.hashes[d - 1], "state", bad))
            tokens = next(usable, 0) * self.block_tokens
        row.cached = tokens
        memory = tokens // 2
        self.results.extend(bad)
        self.results.append(
            events.ChainRestored(
                request_id=row.request_id,
                number=command.number,
                num_tokens=tokens,
                num_memory_tokens=memory,
                num_disk_tokens=tokens - memory,
                read_bytes=0,
                duration_ns=1,
            )
        )

    def also_bad(self, names: Sequence[str]) -> list[AnyEvent]:
        """What a look at the blocks behind a bad one finds."""
        known: set[File] = {(self.domain, name, "block") for name in names}
        return [*self.disk.verify(known, "missing"), *self.disk.verify(known, "corrupt")]

    def is_good(self, name: str, part: Part, bad: list[AnyEvent]) -> bool:
        """Whether the file can be read; notes it otherwise."""
        file: File = (self.domain, name, part)
        if file in self.disk.sizes and file not in self.disk.broken:
            return True
        reason = "corrupt" if file in self.disk.sizes else "missing"
        self.disk.lost.discard(file)
        bad.append(events.BlockCorrupt(hash=name, part=part, reason=reason, detail=""))
        return False
