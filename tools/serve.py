"""`fermata serve`: one server process, from its socket to its exit status.

The socket listens before anything heavy is imported, so that clients of a server that died find
somebody at the address again at once; they wait until the model is described.
"""

import asyncio
import logging
import math
import os
import signal
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import structlog

from api.settings import BACKLOG
from journal.files import is_bundle_file, journal_file, make_durable_folder
from scheduler.engine.model import ModelError, ModelSource
from scheduler.engine.models import resolve
from scheduler.kvcache.naming import KEY_FILE, KeyDamaged, read_key
from scheduler.settings import ConfigurationError, Settings, load_settings
from tools.server_file import ServerFile, remove_server_file, write_server_file

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)


if TYPE_CHECKING:  # Both are heavy, and imported once the socket listens.
    from scheduler.service import Service


class StartError(Exception):
    """The server cannot start. One line that says what to do; exit status 2."""


def run(config: Path | None, overrides: Mapping[str, object]) -> int:
    """Serves until a signal or a failure ends it; returns the exit status: 0 after a clean stop, 1
    for a bug, 2 when it cannot start, 3 when the journal cannot be written, 4 when the engine died.
    """
    signals = catch_signals()
    configure_logging()
    try:
        settings = load_settings(config, overrides)
        source = resolve(settings)
        refuse_bundle(settings.state)
        make_state_folder(settings.state)
        check_key(settings)
        listener = listen(settings.server.host, settings.server.port)
    except (ConfigurationError, ModelError, StartError) as error:
        return fail(str(error))
    with listener:
        address = address_of(listener)
        print(f"listening on {address}", flush=True)
        try:
            service = make_service(settings, source)
            return asyncio.run(serve(service, listener, address, signals))
        except StartError as error:
            return fail(str(error))


def catch_signals() -> list[str]:
    """From here on a signal to stop is only written down, until somebody can act on it."""
    caught: list[str] = []

    def write_down(number: int, _: FrameType | None) -> None:
        caught.append(signal.Signals(number).name)

    for number in STOP_SIGNALS:
        signal.signal(number, write_down)
    return caught


def ignore_signals(loop: asyncio.AbstractEventLoop) -> None:
    """Nothing is left to stop. One more signal must not change the exit status, neither now nor
    while Python ends, which gives signals their usual meaning back unless they are ignored.
    """
    for number in STOP_SIGNALS:
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_IGN)


def make_service(settings: Settings, source: ModelSource) -> "Service":
    """The scheduler over its journal. Raises StartError when it cannot be had."""
    from journal.errors import JournalError
    from scheduler.wiring import build

    try:
        return build(settings, source)
    except (JournalError, KeyDamaged) as error:
        raise StartError(str(error)) from error
    except OSError as error:
        key = settings.state / KEY_FILE
        raise StartError(
            f"{key}, the installation's key, cannot be made ({error.strerror})"
        ) from error


def configure_logging() -> None:
    """Everything that is logged goes to stderr, one line an entry."""
    shared: list[structlog.types.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso"),
    ]
    structlog.configure(
        processors=[
            *shared,
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    formatter = structlog.stdlib.ProcessorFormatter(
        processors=[
            *shared,
            structlog.stdlib.ProcessorFormatter.remove_processors_meta,
            structlog.processors.format_exc_info,
            structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"]),
        ],
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(formatter)
    logging.basicConfig(handlers=[handler], level=logging.WARNING)


async def serve(
    service: "Service", listener: socket.socket, address: str, signals: list[str]
) -> int:
    """Serves HTTP over the service; returns the exit status. `signals` came before this."""
    from api.server import HttpServer

    server = HttpServer(service, listener)
    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        # The first begins a clean stop, the second ends it at once.
        loop.add_signal_handler(number, service.stop, number.name)
    name_server(service, address)
    try:
        serving = asyncio.ensure_future(server.serve())
        for name in signals:
            service.stop(name)
        numbering = asyncio.ensure_future(number_run(service, address))
        outcome = await serving
        numbering.cancel()
    finally:
        remove_server_file(service.settings.state)
        ignore_signals(loop)
    return fail(outcome.message, outcome.status) if outcome.status else 0


def name_server(service: "Service", address: str) -> None:
    """Says in the state folder where the server is. Its run is 0 until it has a number. Raises
    StartError.
    """
    state = service.settings.state
    server = ServerFile(address=address, pid=os.getpid(), run=service.run_id)
    try:
        write_server_file(state, server)
    except OSError as error:
        raise StartError(f"{state} cannot be written ({error.strerror}): make space") from error


async def number_run(service: "Service", address: str) -> None:
    """Names the server again once its run has its number: when the model is described."""
    if await service.served_model(math.inf) is not None:
        name_server(service, address)


def fail(message: str, status: int = 2) -> int:
    """One line on stderr."""
    print(f"fermata: {message}", file=sys.stderr, flush=True)
    return status


def refuse_bundle(state: Path) -> None:
    """Raises StartError where the journal is somebody's bundle, before anything is written."""
    file = journal_file(state)
    if is_bundle_file(file):
        raise StartError(
            f"{file}: a bundle, which is read and not served; choose another --state folder"
        )


def make_state_folder(state: Path) -> None:
    """The state folder, for its owner only, proven to be writable. Raises StartError."""
    probe = state / f".probe-{os.getpid()}"
    try:
        make_durable_folder(state)
        probe.touch(mode=0o600)
        probe.unlink()
    except OSError as error:
        raise StartError(
            f"the state folder {state} cannot be written ({error.strerror}): "
            "name another with --state"
        ) from error


def check_key(settings: Settings) -> None:
    """If there is a key of the installation, it can be used. Raises StartError."""
    key = settings.state / KEY_FILE
    if not key.exists():
        return
    try:
        read_key(key)
    except KeyDamaged as error:
        raise StartError(str(error)) from error
    except OSError as error:
        raise StartError(
            f"{key}, the installation's key, cannot be read ({error.strerror}): let it be read"
        ) from error


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises StartError for an address that cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError as error:
        raise StartError(f"--host {host}: {error.strerror}") from error
    listener = socket.socket(family, kind, protocol)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise StartError(
            f"cannot listen on {host} port {port} ({error.strerror}): name another with --port, "
            "or --port 0 for any free one"
        ) from error
    return listener


def address_of(listener: socket.socket) -> str:
    """Where it listens, as a URL. The port is the real one, also when any was asked for."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
