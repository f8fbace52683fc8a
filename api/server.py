"""The HTTP server's life: it serves as long as the scheduler does, and ends after it.

uvicorn is run by this code: with a socket that listens already, without signal handlers of its own,
and without a lifespan, because the scheduler's end is what decides.
"""

import asyncio
import contextlib
import socket
from collections.abc import Generator

import uvicorn

from api.app import close_app, create_app
from api.protocol import Protocol
from api.settings import BACKLOG, CLOSE_WAIT_S, KEEP_ALIVE_S
from scheduler.run import Exit
from scheduler.service import Service


class Server(uvicorn.Server):
    """Leaves signals to the process that it runs in."""

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        """Captures none."""
        yield


class HttpServer:
    """One server over one service and one listening socket."""

    def __init__(self, service: Service, listener: socket.socket) -> None:
        self._service = service
        self._listener = listener
        self._app = create_app(service)
        self._server = Server(
            uvicorn.Config(
                self._app,
                http=Protocol,
                ws="none",
                loop="asyncio",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=CLOSE_WAIT_S,
            )
        )

    async def serve(self) -> Exit:
        """Starts the service, and serves until it has ended, for whatever reason. Answers that are
        whole by then are sent; the others were cut.
        """
        self._service.start()
        try:
            serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener]))
            outcome = await self._service.ended()
            self._server.should_exit = True
            await serving
        finally:
            close_app(self._app)
        return outcome
