"""Clients that are lost, and what a server shows of their requests."""

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from journal import events
from scheduler.views import RequestView
from tests.integration.http_server import RunningServer
from tests.integration.kv_serving import recorded
from tests.integration.test_http_clients import send

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
ASKED: dict[str, Any] = {
    "model": "default",
    "prompt": "a prompt of more than one block: " * 10,
    "max_tokens": 40,
    "ignore_eos": True,
    "seed": 3,
}
SLOW: dict[str, Any] = {
    "fake": {"step_ms": 10, "prefill_tokens_per_s": 2_000},
    "scheduler": {"chunk_tokens": 32},
    "kv": {"memory_bytes": 0},
}
"""A server that is in no hurry, so that requests are met in each phase."""

CLIENT = """
import socket, sys, time
host, port, text = sys.argv[1:]
connection = socket.create_connection((host, int(port)))
connection.sendall(text.encode())
time.sleep(600)
"""


class ClientProcess:
    """A client in a process of its own, which can be killed."""

    def __init__(self, server: RunningServer, text: str) -> None:
        host, port = server.listener.getsockname()
        self.process = subprocess.Popen([sys.executable, "-c", CLIENT, host, str(port), text])

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()


def view_of(server: RunningServer, request_id: str) -> RequestView:
    """An open request, as the scheduler sees it."""
    return next(view for view in server.view().requests if view.id == request_id)


def shown(server: RunningServer, request_id: str) -> dict[str, Any]:
    """A request, open or ended, as HTTP shows it."""
    answer = server.http.get(f"/v1/requests/{request_id}")
    assert answer.status_code == 200, answer.text
    return answer.json()


def wait_for_orphan(server: RunningServer, request_id: str) -> None:
    """Returns once the request has no client."""
    server.wait_until(lambda _: not shown(server, request_id)["has_client"])


def wait_until_aside(server: RunningServer, request_id: str) -> None:
    """Returns once the request waits for a client, with no row."""
    server.wait_until(lambda _: (shown(server, request_id)["wait"] or {}).get("reason") == "client")


def sent_and_lost(
    server: RunningServer, body: dict[str, Any], phase: str = "decoding", path: str = TEXT
) -> str:
    """A request whose client is lost in this phase: its id, once it waits for another one."""
    connection = send(server, body, path)
    request_id = server.wait_for_phase(phase)
    connection.close()
    wait_until_aside(server, request_id)
    return request_id


def kinds(server: RunningServer, request_id: str) -> list[str]:
    """The kinds of a request's events."""
    found = server.http.get(f"/v1/requests/{request_id}/events").json()["data"]
    return [event["kind"] for event in found]


def num_fed(folder: Path) -> int:
    """The tokens that the engine has fed in chunks so far, whoever's they were."""
    return sum(event.length for event in recorded(folder, events.PrefillChunkDone))


def tail_of(connection: socket.socket) -> bytes:
    """All that is still to come."""
    received = b""
    while data := connection.recv(65_536):
        received += data
    return received
