"""DIR/server.json: where the server of a state folder listens.

The server writes it when it listens and removes it at a clean stop; commands that talk to a server
read it. After a death it stays behind: then nobody answers at its address, or the process is gone.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

NAME = "server.json"


class ServerFileError(Exception):
    """There is no such file, or it is not ours. One line that says what to do."""


@dataclass(frozen=True, slots=True)
class ServerFile:
    """`address` is `http://HOST:PORT`, `pid` the server's process, `run` its run in the journal."""

    address: str
    pid: int
    run: int


def write_server_file(state: Path, server: ServerFile) -> None:
    """Writes it whole or not at all, for the owner's eyes only. Raises OSError."""
    unfinished = state / f"{NAME}.{os.getpid()}"
    descriptor = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w") as file:
        json.dump(asdict(server), file)
    unfinished.replace(state / NAME)


def remove_server_file(state: Path) -> None:
    """Removes it. One that is gone already is no error."""
    (state / NAME).unlink(missing_ok=True)


def read_server_file(state: Path) -> ServerFile:
    """Reads it. Raises ServerFileError when it is missing or holds something else."""
    path = state / NAME
    try:
        body = json.loads(path.read_text())
        return ServerFile(address=str(body["address"]), pid=int(body["pid"]), run=int(body["run"]))
    except FileNotFoundError as error:
        raise ServerFileError(
            f"no server runs on {state}: start one with `fermata serve --state {state}`, "
            "or name another with --state or --url"
        ) from error
    except NotADirectoryError as error:
        raise ServerFileError(f"{state} is no folder: --state takes a server's folder") from error
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ServerFileError(f"{path} cannot be read ({error}): remove it") from error
