"""A disk in virtual time: files that are entries of a table."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from scheduler.simulation.cost import DiskCost
from scheduler.simulation.timeline import Timeline


@dataclass(frozen=True, slots=True)
class File:
    """One file: the tokens it holds, the digest of the state behind them, and its size."""

    tokens: "array[int]"
    state: bytes
    num_bytes: int


class SimulatedDisk:
    """Files by name, and when its two ends are free. While it `is_full` nothing can be written."""

    def __init__(self, timeline: Timeline, cost: DiskCost, capacity_bytes: int) -> None:
        self.timeline = timeline
        self.cost = cost
        self.capacity_bytes = capacity_bytes
        self.files: dict[str, File] = {}
        self.is_full = False
        self.write_free_ns = 0
        self.read_free_ns = 0
        self.written_bytes = 0
        self.read_bytes = 0

    @property
    def free_bytes(self) -> int:
        return self.capacity_bytes - sum(file.num_bytes for file in self.files.values())

    def write(self, name: str, file: File, done: Callable[[bool, int], None]) -> None:
        """Writes behind all that is being written; `done` hears whether the file is there, and how
        long it took, flush included.
        """
        begun_ns = self.timeline.now_ns
        self.write_free_ns = max(self.write_free_ns, begun_ns) + self.cost.write_ns(file.num_bytes)
        self.written_bytes += file.num_bytes

        def finish() -> None:
            is_there = not self.is_full
            if is_there:
                self.files[name] = file
            done(is_there, self.timeline.now_ns - begun_ns)

        self.timeline.at(self.write_free_ns + self.cost.flush_ns, finish)

    def lose_power(self) -> None:
        """What was being written is not there, and nobody reads."""
        self.write_free_ns = self.read_free_ns = self.timeline.now_ns

    def read_until(self, num_bytes: int) -> int:
        """Reads behind all that is being read; when it will be there."""
        self.read_bytes += num_bytes
        begin_ns = max(self.read_free_ns, self.timeline.now_ns)
        self.read_free_ns = begin_ns + self.cost.read_ns(num_bytes)
        return self.read_free_ns
