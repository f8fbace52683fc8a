"""A disk in virtual time: files that are entries of a table, and all that can go wrong with it."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Literal

from scheduler.simulation.cost import DiskCost
from scheduler.simulation.timeline import Timeline

WriteTrouble = Literal["disk_full", "io_error"]
Damage = Literal["missing", "corrupt", "io_error"]


@dataclass(frozen=True, slots=True)
class File:
    """One file: the tokens it holds, the digest of the state behind them, and its size."""

    tokens: "array[int]"
    state: bytes
    num_bytes: int


@dataclass(slots=True)
class Write:
    """A file on its way to the disk. `given_up`: nobody writes it any more."""

    name: str
    file: File
    begins_ns: int
    given_up: bool = False


@dataclass
class SimulatedDisk:
    """Files by name, and when its two ends are free.

    `trouble` is why nothing can be written, `reads_fail` whether nothing can be read. The bytes of
    a file in `damaged` are not what was written, and one in `cut` has lost some: the first is seen
    when it is read, the second by its size. `was_damaged`: since then nobody can count on a file.
    `slowdown` makes reading and writing as often slower, and with `jitter` a flush takes up to four
    times as long, so that files are not durable in the order in which they were written.
    """

    timeline: Timeline
    cost: DiskCost
    capacity_bytes: int
    files: dict[str, File] = field(default_factory=dict[str, File])
    trouble: WriteTrouble | None = None
    reads_fail: bool = False
    damaged: set[str] = field(default_factory=set[str])
    cut: set[str] = field(default_factory=set[str])
    was_damaged: bool = False
    slowdown: int = 1
    jitter: Random | None = None
    used_bytes: int = 0
    write_free_ns: int = 0
    read_free_ns: int = 0
    written_bytes: int = 0
    read_bytes: int = 0

    def __post_init__(self) -> None:
        self.under_way: list[Write] = []
        self.unlinked: dict[str, File] = {}

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - self.used_bytes

    # Files

    def put(self, name: str, file: File) -> None:
        """The file is there, whole and durable."""
        self.remove(name)
        self.unlinked.pop(name, None)
        self.files[name] = file
        self.used_bytes += file.num_bytes

    def remove(self, name: str) -> int:
        """Unlinks a file, if it is there, and returns its bytes. Who flushes the folder is not
        known: after a loss of power it may be there again.
        """
        self.damaged.discard(name)
        self.cut.discard(name)
        file = self.files.pop(name, None)
        if file is None:
            return 0
        self.unlinked[name] = file
        self.used_bytes -= file.num_bytes
        return file.num_bytes

    def damage(self, name: str, how: Literal["missing", "corrupt", "cut"]) -> None:
        """A file is lost, has other bytes, or fewer."""
        self.was_damaged = True
        match how:
            case "missing":
                self.remove(name)
            case "corrupt":
                self.damaged.add(name)
            case "cut":
                self.cut.add(name)

    def fail_reads(self) -> None:
        """From here on nothing can be read."""
        self.was_damaged = self.reads_fail = True

    def look_at(self, name: str) -> Damage | None:
        """What is wrong with a file that is read."""
        if name not in self.files:
            return "missing"
        if self.reads_fail:
            return "io_error"
        return "corrupt" if name in self.damaged or name in self.cut else None

    # Time

    def write(
        self, name: str, file: File, done: Callable[[WriteTrouble | None, int], None]
    ) -> None:
        """Writes behind all that is being written; `done` hears why the file is not there, if it
        is not, and how long it took, flush included.
        """
        begun_ns = self.timeline.now_ns
        write = Write(name, file, max(self.write_free_ns, begun_ns))
        self.under_way.append(write)
        duration_ns = self.cost.write_ns(file.num_bytes) * self.slowdown
        self.write_free_ns = write.begins_ns + duration_ns
        self.written_bytes += file.num_bytes

        def finish() -> None:
            if write.given_up:
                return
            self.under_way.remove(write)
            trouble = self.trouble
            if trouble is None and file.num_bytes > self.free_bytes:
                trouble = "disk_full"
            if trouble is None:
                self.put(name, file)
            done(trouble, self.timeline.now_ns - begun_ns)

        times = self.slowdown * (1 if self.jitter is None else self.jitter.randint(1, 4))
        self.timeline.at(self.write_free_ns + self.cost.flush_ns * times, finish)

    def give_up(self) -> list[str]:
        """What waits to be written will not be. Returns the names of these files."""
        now_ns = self.timeline.now_ns
        waiting = [write for write in self.under_way if write.begins_ns > now_ns]
        for write in waiting:
            write.given_up = True
            self.under_way.remove(write)
        return [write.name for write in waiting]

    def read_until(self, num_bytes: int) -> int:
        """Reads behind all that is being read; when it will be there."""
        self.read_bytes += num_bytes
        begin_ns = max(self.read_free_ns, self.timeline.now_ns)
        self.read_free_ns = begin_ns + self.cost.read_ns(num_bytes) * self.slowdown
        return self.read_free_ns

    # The death of who uses it

    def lose_process(self, random: Random) -> None:
        """Of what was being written some files are there, and nobody has heard of it."""
        now_ns = self.timeline.now_ns
        for write in self.under_way:
            if self.trouble is None and write.begins_ns < now_ns and random.random() < 0.5:
                self.put(write.name, write.file)
        self.under_way = []
        self.write_free_ns = self.read_free_ns = self.timeline.now_ns

    def lose_power(self, random: Random) -> None:
        """What was being written is not there, and some files that were unlinked are."""
        self.was_damaged = True  # a tail may be unlinked, and the event that said so lost
        self.under_way = []
        self.write_free_ns = self.read_free_ns = self.timeline.now_ns
        for name, file in list(self.unlinked.items()):
            if random.random() < 0.5:
                self.put(name, file)
        self.unlinked = {}

    def slow_down(self, times: int) -> None:
        """Everything takes so many times as long from here on."""
        self.slowdown = times

    def heal(self) -> None:
        """It works again. What is damaged stays so."""
        self.trouble = None
        self.reads_fail = False
        self.slowdown = 1
