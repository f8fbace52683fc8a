"""`fermata serve` as a real process, for the commands that start servers of their own."""

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import IO

LISTENING = "listening on "
START_LIMIT_S = 60
STOP_LIMIT_S = 30
LOG_LINES = 20
"""Lines of the server's own log that are kept, for the case that it ends by itself."""


class ServerFailed(Exception):
    """The server did not start, ended by itself or did not stop. Its log says why."""


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """The user's environment, with these settings of Fermata instead of the user's own."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("FERMATA_")}
    return kept | dict(settings)


def command(*arguments: str) -> list[str]:
    """`fermata` in this environment. `-P` keeps the current folder off the import path."""
    return [sys.executable, "-P", "-m", "tools.cli", *arguments]


class ServerProcess:
    """One life of the server. It has a process group of its own, so that Ctrl-C reaches
    the command alone, which then ends it.
    """

    def __init__(self, model: str, state: Path, settings: Mapping[str, str]) -> None:
        self.log: deque[str] = deque(maxlen=LOG_LINES)
        self.lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.process = subprocess.Popen(
            command("serve", "--model", model, "--port", "0", "--state", str(state)),
            env=environment(settings),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        assert self.process.stderr is not None
        self.readers = [
            threading.Thread(target=self.read_lines, args=(self.process.stdout,), daemon=True),
            threading.Thread(target=self.read_log, args=(self.process.stderr,), daemon=True),
        ]
        for reader in self.readers:
            reader.start()

    @property
    def pid(self) -> int:
        return self.process.pid

    def read_lines(self, stdout: IO[str]) -> None:
        """Hands on what the server prints; an empty line says that there is no more."""
        for line in stdout:
            self.lines.put(line.strip())
        self.lines.put("")

    def read_log(self, stderr: IO[str]) -> None:
        """Keeps the last lines of the log, and the pipe empty."""
        self.log.extend(line.rstrip() for line in stderr)

    def address(self) -> str:
        """Where it listens, as soon as it does. Raises ServerFailed."""
        while True:
            try:
                line = self.lines.get(timeout=START_LIMIT_S)
            except queue.Empty:
                raise ServerFailed(f"the server does not listen after {START_LIMIT_S} s") from None
            if line.startswith(LISTENING):
                return line.removeprefix(LISTENING)
            if not line:
                raise ServerFailed(f"the server ended with status {self.process.wait()}")

    def kill(self) -> None:
        """SIGKILL, and its end."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """A clean stop; returns the exit status. Raises ServerFailed when it does not end."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(timeout=STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            raise ServerFailed(f"the server does not stop within {STOP_LIMIT_S} s") from None

    def close(self) -> None:
        """Whatever happened: the process is gone and its pipes are closed."""
        if self.process.poll() is None:
            self.kill()
        for reader in self.readers:
            reader.join()
        for pipe in (self.process.stdout, self.process.stderr):
            with contextlib.suppress(OSError):
                pipe.close()  # pyright: ignore[reportOptionalMemberAccess]
