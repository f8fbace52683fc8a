"""What this process and this machine say of memory, through psutil."""

from dataclasses import dataclass
from functools import cache
from typing import Protocol

import psutil


class MachineUnreadable(Exception):
    """The system does not say how much memory there is. One line."""


@dataclass(frozen=True, slots=True)
class MachineReading:
    """Bytes: the process's resident memory, and what the machine could give without swapping."""

    process_bytes: int
    available_bytes: int


class Machine(Protocol):
    """Where readings come from; a simulation brings its own."""

    def read(self) -> MachineReading:
        """The numbers now, in well under a millisecond. Raises MachineUnreadable."""
        ...


class ThisMachine:
    """The machine that the process runs on."""

    def __init__(self) -> None:
        self._process = psutil.Process()

    def read(self) -> MachineReading:
        """See `Machine.read`."""
        try:
            return MachineReading(
                self._process.memory_info().rss, psutil.virtual_memory().available
            )
        except (psutil.Error, OSError) as error:
            raise MachineUnreadable(f"memory cannot be read: {error}") from error


@cache
def total_bytes() -> int:
    """All the memory that this machine has. Raises MachineUnreadable."""
    try:
        return psutil.virtual_memory().total
    except (psutil.Error, OSError) as error:
        raise MachineUnreadable(
            f"memory.ceiling is auto, and the machine's memory cannot be read ({error}): "
            "set it to a size"
        ) from error


def default_reserve_bytes() -> int:
    """What an automatic ceiling leaves to others: a tenth of the memory, at least 2 GB, which a
    system with an editor and a browser takes, and at most a quarter, so that a small machine can
    serve a small model. Raises MachineUnreadable.
    """
    ram_bytes = total_bytes()
    return min(max(ram_bytes // 10, 2 * 10**9), ram_bytes // 4)
