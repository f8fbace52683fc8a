"""Clients that leave, where nobody is waited for: noticed in every phase, for both kinds of answer;
nothing stays of them. What becomes of them where somebody is: test_http_orphans.py.
"""

import json
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.integration.http_server import RunningServer, running

CHAT = "/v1/chat/completions"
LONG: dict[str, Any] = {
    "model": "default",
    "messages": [{"role": "user", "content": "hello " * 20}],
    "max_tokens": 50_000,
    "ignore_eos": True,
}


AT_ONCE: dict[str, Any] = {"orphan_grace_s": 0}
"""Requests whose client is lost end at once."""


def send(server: RunningServer, body: dict[str, Any], path: str = CHAT) -> socket.socket:
    """A client of its own that has sent a request and reads nothing."""
    content = json.dumps(body).encode()
    connection = socket.create_connection(server.listener.getsockname(), timeout=10)
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n"
    connection.sendall(head.encode() + content)
    return connection


def assert_cancelled(server: RunningServer, request_id: str) -> None:
    """The request ends because its client left, and nothing of it stays."""
    ended = server.wait_for_end(request_id)
    assert (ended["state"], ended["reason"]) == ("cancelled", "client_gone")


def assert_empty(server: RunningServer) -> None:
    """No request is open, and no memory is held for one."""
    server.wait_until(lambda view: view.leaving_bytes == 0)
    view = server.view()
    assert view.requests == []
    assert (view.num_waiting, view.num_admitted, view.reserved_bytes) == (0, 0, 0)
    assert (view.num_held, view.num_pausing, view.memory.reliefs) == (0, 0, [])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefilling", "decoding"])
def test_client_that_leaves_ends_its_request(tmp_path: Path, phase: str, stream: bool) -> None:
    speed = {"prefill_tokens_per_s": 100 if phase == "prefilling" else 0, "step_ms": 5}
    with running(tmp_path, fake=speed, scheduler={"chunk_tokens": 16}, requests=AT_ONCE) as server:
        connection = send(server, LONG | {"stream": stream})
        request_id = server.wait_for_phase(phase)
        connection.close()
        assert_cancelled(server, request_id)
        assert_empty(server)


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_the_queue_ends_its_request(tmp_path: Path, stream: bool) -> None:
    with running(
        tmp_path, fake={"step_ms": 5}, scheduler={"max_rows": 1}, requests=AT_ONCE
    ) as server:
        holder = send(server, LONG)
        holder_id = server.wait_for_phase("decoding")
        connection = send(server, LONG | {"stream": stream})
        request_id = server.wait_for_phase("waiting")
        connection.close()
        assert_cancelled(server, request_id)
        assert server.http.get(f"/v1/requests/{holder_id}").json()["state"] == "decoding"
        holder.close()
        assert_cancelled(server, holder_id)
        assert_empty(server)


def test_client_that_leaves_while_the_model_loads_ends_its_request(tmp_path: Path) -> None:
    with running(tmp_path, fake={"load_ms": 60_000}, requests=AT_ONCE) as server:
        connection = send(server, LONG)
        request_id = server.wait_for_phase("waiting")
        connection.close()
        assert_cancelled(server, request_id)


def test_client_that_stops_reading_and_leaves_is_noticed(tmp_path: Path) -> None:
    with running(tmp_path, requests=AT_ONCE) as server:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connection = send(server, LONG | {"stream": True})
        request_id = server.wait_for_phase("decoding")
        # Nothing is read, so the buffers fill up; the request goes on without its reader.
        server.wait_until(lambda view: any(r.num_output_tokens > 2000 for r in view.requests))
        connection.close()
        assert_cancelled(server, request_id)
        assert_empty(server)


def test_client_that_leaves_within_its_body_leaves_nothing(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        connection = socket.create_connection(server.listener.getsockname(), timeout=10)
        head = f"POST {CHAT} HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n\r\n" + '{"model"'
        connection.sendall(head.encode())
        connection.close()
        answer = server.http.post(CHAT, json=LONG | {"max_tokens": 1})
        assert answer.status_code == 200
        assert server.service.metrics.requests_received == 1


def test_reader_that_leaves_does_not_end_the_request(tmp_path: Path) -> None:
    with running(tmp_path, fake={"step_ms": 5}) as server:
        connection = send(server, LONG | {"max_tokens": 60})
        request_id = server.wait_for_phase("decoding")
        with server.http.stream("GET", f"/v1/requests/{request_id}/stream") as reader:
            next(reader.iter_lines())
        assert server.wait_for_end(request_id)["state"] == "finished"
        connection.close()
