"""What a service is, whoever starts it."""

import sys
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path


class Kind(StrEnum):
    """Who starts the service."""

    SYSTEMD = "systemd"
    LAUNCHD = "launchd"


DEFAULT_KIND = Kind.LAUNCHD if sys.platform == "darwin" else Kind.SYSTEMD

MARGIN_S = 20
"""For what a stop does besides draining and holding: close files, end the streams of clients."""

OPEN_FILES = 65_536
"""A connection is a file, and so is each block that is read or written: many more than the usual
1,024, and far less than systems allow."""

FILE_MASK = 0o077
"""What the service writes is its user's alone."""


@dataclass(frozen=True, slots=True)
class Service:
    """One server. `paths` are what it reads and writes, `state` first. `user` runs it; without one
    it is a service of the user's own manager. `port` 0 is any free one. `stop_limit_s`: how long a
    clean stop may take before it is a kill.
    """

    command: tuple[str, ...]
    paths: tuple[Path, ...]
    home: Path
    user: str | None
    port: int
    stop_limit_s: int

    @property
    def state(self) -> Path:
        """The state folder."""
        return self.paths[0]
