"""A real server in a thread: the scheduler on the fake engine, over HTTP on a free port."""

import asyncio
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from api.server import HttpServer
from journal.journal import Journal
from scheduler.engine.fake import FakeSource
from scheduler.engine.model import ModelSource
from scheduler.replay import Replay
from scheduler.run import Exit
from scheduler.service import Service
from scheduler.settings import Settings
from scheduler.views import ServerView
from scheduler.wiring import build

TIMEOUT_S = 20


class RunningServer:
    """Starts at once; it has no ceiling unless it is given one. `stop` ends it like a signal, and
    checks that its journal is decided again with no difference.
    """

    def __init__(self, folder: Path, source: ModelSource | None = None, **groups: object) -> None:
        self.folder = folder
        quiet = {"memory": {"ceiling": "none"}}
        self.settings = Settings.model_validate(
            {"model": "fake", "state": folder, **quiet, **groups}
        )
        self.source: ModelSource = source or FakeSource(self.settings.fake)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"
        self.http = httpx.Client(base_url=self.url, timeout=TIMEOUT_S)
        self.openai = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", timeout=TIMEOUT_S, max_retries=0
        )
        self.outcome: Exit | None = None
        self.built = threading.Event()
        self.thread = threading.Thread(target=lambda: asyncio.run(self.serve()))
        self.thread.start()
        assert self.built.wait(TIMEOUT_S)

    async def serve(self) -> None:
        """The thread's body."""
        self.loop = asyncio.get_running_loop()
        self.service: Service = build(self.settings, self.source)
        server = HttpServer(self.service, self.listener)
        self.built.set()
        self.outcome = await server.serve()

    def call(self, function: object, *arguments: object) -> None:
        """Calls something of the service on its own thread."""
        self.loop.call_soon_threadsafe(function, *arguments)  # pyright: ignore[reportArgumentType, reportCallIssue]

    def wait_for_phase(self, phase: str, num_requests: int = 1) -> str:
        """Returns the id of the first request once so many are in this phase."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            found = self.http.get(f"/v1/requests?state={phase}").json()["data"]
            if len(found) >= num_requests:
                return found[0]["id"]
        raise AssertionError(f"no request came to be {phase}")

    def view(self) -> ServerView:
        """All open requests, as the scheduler sees them."""
        return asyncio.run_coroutine_threadsafe(self.service.view(), self.loop).result(TIMEOUT_S)

    def wait_until(self, reached: Callable[[ServerView], bool]) -> None:
        """Returns once the scheduler's view is like this."""
        deadline = time.monotonic() + TIMEOUT_S
        while not reached(self.view()):
            assert time.monotonic() < deadline, "the server did not come to be so"

    def wait_for_end(self, request_id: str) -> dict[str, Any]:
        """Returns the request once it has ended."""
        deadline = time.monotonic() + TIMEOUT_S
        while time.monotonic() < deadline:
            found = self.http.get(f"/v1/requests/{request_id}").json()
            if found["ended_at_ns"] is not None:
                return found
        raise AssertionError(f"{request_id} did not end")

    def parameters(self, request_id: str) -> bytes:
        """What the journal keeps of a request's parameters."""
        with sqlite3.connect(self.folder / "journal.db") as database:
            query = "SELECT body FROM request_parameters WHERE request_id = ?"
            body = database.execute(query, (request_id,)).fetchone()[0]
        database.close()
        return body.encode() if isinstance(body, str) else body

    def samples(self) -> dict[str, float]:
        """All metrics, as Prometheus reads them, labels in the name."""
        text = self.http.get("/metrics").text
        return {
            sample.name + "".join(f",{value}" for value in sample.labels.values()): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def begin_stop(self) -> None:
        """The clean stop that a first signal begins."""
        self.call(self.service.stop, "test")

    def join(self) -> None:
        """Waits for the end that has begun; the journal must replay."""
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive(), "the server did not end"
        self.http.close()
        self.openai.close()
        assert self.outcome == Exit(0)
        assert_replays(self.folder)

    def close(self) -> None:
        """A stop that does not wait for rows, if it has not ended yet."""
        if self.thread.is_alive():
            self.begin_stop()
            self.begin_stop()
        self.join()


@contextmanager
def running(
    folder: Path, source: ModelSource | None = None, **groups: object
) -> Iterator[RunningServer]:
    """A server for a test."""
    server = RunningServer(folder, source, **groups)
    try:
        yield server
    finally:
        server.close()


def assert_replays(folder: Path) -> None:
    """The journal of a server that has ended gives the same decisions again."""
    journal = Journal.open(folder)
    try:
        replay = Replay(journal.read())
        assert list(replay.divergences()) == []
    finally:
        journal.close()
