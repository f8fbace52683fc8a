"""Clients that are lost, where somebody is waited for: their requests are held at once, in every
phase, and end when nobody has come.
"""

import json
import socket
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import api.sse
from journal import events
from scheduler.clock import SystemClock
from tests.integration.http_server import RunningServer, running
from tests.integration.kv_serving import recorded
from tests.integration.leaving import (
    ASKED,
    SLOW,
    TEXT,
    ClientProcess,
    num_fed,
    sent_and_lost,
    shown,
    view_of,
    wait_until_aside,
)
from tests.integration.test_http_clients import assert_empty, send

HIGH_WATER_BYTES = 64 * 2**10
"""Beyond so much that is not taken yet a connection is given no more."""

NOTICED_S = 3.0
"""How long a server may take to see that a client is gone."""


def raw(body: dict[str, Any]) -> str:
    """The POST as bytes on the wire."""
    content = json.dumps(body)
    return f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n{content}"


def begun(server: RunningServer, phase: str) -> str:
    """The newest request, once it is in this phase; it is held by hand if it must be."""
    if phase != "paused":
        return server.wait_for_phase(phase)
    request_id = server.wait_for_phase("decoding")
    assert server.http.post(f"/v1/requests/{request_id}/pause").json()["state"] == "paused"
    return request_id


@pytest.mark.parametrize(
    ("phase", "stream"),
    [
        ("waiting", True),
        ("prefilling", False),
        ("decoding", False),
        ("decoding", True),
        ("paused", True),
    ],
)
def test_client_that_is_killed_is_noticed_and_its_request_computes_nothing_more(
    tmp_path: Path, phase: str, stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: dict[str, Any] = SLOW | {"scheduler": {"chunk_tokens": 32, "max_rows": 1}}
    with running(tmp_path, **groups) as server:
        before = None
        if phase == "waiting":
            before = send(server, ASKED | {"prompt": "the one before", "max_tokens": 10_000}, TEXT)
            server.wait_for_phase("decoding")
        client = ClientProcess(server, raw(ASKED | {"max_tokens": 10_000, "stream": stream}))
        request_id = begun(server, phase)
        client.kill()
        killed_at = time.monotonic()
        server.wait_until(lambda _: not shown(server, request_id)["has_client"])
        assert time.monotonic() - killed_at < NOTICED_S
        wait_until_aside(server, request_id)
        lost = shown(server, request_id)
        assert (lost["orphaned_by"], lost["row_bytes"], lost["keyed"]) == ("client_gone", 0, False)
        assert lost["state"] == ("waiting" if phase == "waiting" else "paused")
        assert lost["num_saved_tokens"] > 0 or phase == "waiting"
        server.wait_until(lambda view: view.leaving_bytes == 0)
        assert view_of(server, request_id).reserved_bytes == 0
        assert server.samples()["fermata_orphans"] == 1
        if before is not None:
            assert server.view().num_admitted == 1, "others go on"
            before.close()
        assert shown(server, request_id)["num_output_tokens"] == lost["num_output_tokens"]
        fed = num_fed(tmp_path)
        monkeypatch.setattr(SystemClock, "wall_ns", lambda _: time.time_ns() + 61 * 10**9)
        ended = server.wait_for_end(request_id)
        assert (ended["state"], ended["reason"]) == ("cancelled", "client_gone")
        server.wait_until(lambda view: view.requests == [])
        assert_empty(server)
        assert num_fed(tmp_path) == fed
        samples = server.samples()
        assert samples["fermata_orphans"] == 0
        assert samples["fermata_orphans_expired_total"] == 1 + (before is not None)
        cache = server.http.get("/v1/cache").json()
        assert cache["num_used_blocks"] < max(1, cache["num_blocks"]), "nothing is pinned"


def test_others_take_the_row_of_one_that_has_no_client(tmp_path: Path) -> None:
    groups: dict[str, Any] = SLOW | {"scheduler": {"chunk_tokens": 32, "max_rows": 1}}
    with running(tmp_path, **groups) as server:
        lost = sent_and_lost(server, ASKED | {"max_tokens": 10_000})
        other = server.http.post(TEXT, json=ASKED | {"prompt": "another"})
        assert other.status_code == 200
        assert shown(server, lost)["state"] == "paused", "not because there is room"
        server.http.delete(f"/v1/requests/{lost}").raise_for_status()


def test_stopped_prefills_take_no_slot_with_them(tmp_path: Path) -> None:
    groups: dict[str, Any] = SLOW | {"scheduler": {"chunk_tokens": 32, "max_rows": 2}}
    with running(tmp_path, **groups) as server:
        for number in range(12):
            long = {"prompt": [(i * 7 + number) % 250 for i in range(2_000)], "stream": True}
            sent_and_lost(server, ASKED | long, "prefilling")
        assert len(server.view().requests) == 12
        assert server.http.post(TEXT, json=ASKED).status_code == 200
        for view in server.view().requests:
            server.http.delete(f"/v1/requests/{view.id}").raise_for_status()
        server.wait_until(lambda view: view.requests == [])
        assert_empty(server)


def test_reader_that_stays_keeps_a_request_whose_sender_is_lost(tmp_path: Path) -> None:
    with running(tmp_path, **SLOW) as server:
        sender = send(server, ASKED | {"max_tokens": 10_000, "stream": True}, TEXT)
        request_id = server.wait_for_phase("decoding")
        with server.http.stream("GET", f"/v1/requests/{request_id}/stream?after=0") as reader:
            lines = reader.iter_lines()
            next(lines)
            sender.close()
            before = shown(server, request_id)["num_output_tokens"]
            server.wait_until(
                lambda _: shown(server, request_id)["num_output_tokens"] > before + 20
            )
            assert shown(server, request_id)["has_client"] is True
            assert server.samples()["fermata_http_clients_gone_total"] == 1
        wait_until_aside(server, request_id)
        with server.http.stream("GET", f"/v1/requests/{request_id}/stream?after=0") as reader:
            lines = reader.iter_lines()
            next(lines)
            server.wait_until(lambda _: shown(server, request_id)["state"] == "decoding")
            assert shown(server, request_id)["orphaned_by"] is None
        wait_until_aside(server, request_id)
        gone = recorded(tmp_path, events.ClientGone)
        assert len(gone) == 2, "only the last one that leaves counts"
        server.http.delete(f"/v1/requests/{request_id}").raise_for_status()


def test_operator_may_let_an_orphan_go_on(tmp_path: Path) -> None:
    with running(tmp_path, **SLOW) as server:
        request_id = sent_and_lost(server, ASKED)
        released = server.http.post(f"/v1/requests/{request_id}/resume")
        assert released.status_code == 200, released.text
        assert released.json()["has_client"] is False
        ended = server.wait_for_end(request_id)
        assert (ended["state"], ended["num_output_tokens"]) == ("finished", 40)


def attempt(server: RunningServer, body: dict[str, Any], enough: int) -> int:
    """A client that waits until so many tokens of its prompt are done, and leaves: how many then
    were.
    """
    client = send(server, body, TEXT)
    server.wait_until(lambda view: any(r.num_cached_tokens >= enough for r in view.requests))
    client.close()
    server.wait_until(lambda view: view.num_admitted == 0 and view.leaving_bytes == 0)
    done = [max(r.num_saved_tokens, r.num_cached_tokens) for r in server.view().requests]
    return max(done, default=0)


@pytest.mark.parametrize("grace_s", [60, 0])
def test_attempts_at_a_long_prompt_strictly_advance_until_it_is_done(
    tmp_path: Path, grace_s: int
) -> None:
    body = ASKED | {"prompt": [i * 7 % 250 for i in range(1_500)], "max_tokens": 4}
    groups: dict[str, Any] = SLOW | {"requests": {"orphan_grace_s": grace_s}}
    groups["fake"] = {"prefill_tokens_per_s": 4_000}
    with running(tmp_path, **groups) as server:
        enough = 200
        for _ in range(4):
            done = attempt(server, body, enough)
            assert done >= enough or grace_s == 0
            server.wait_until(lambda _: not server.http.get("/v1/cache").json()["writing_bytes"])
            enough += 250
        answer = server.http.post(TEXT, json=body)
        assert answer.status_code == 200
        usage = answer.json()["usage"]
    received = recorded(tmp_path, events.RequestReceived)
    assert len(received) == 5
    if grace_s:
        assert num_fed(tmp_path) == 1_499, "nothing is computed twice"
        assert len(recorded(tmp_path, events.RequestAdopted)) == 4
        assert usage["completion_tokens"] == 4
        return
    # Each attempt is a request of its own, and starts from the blocks that those before it saved.
    found = [event.num_cached_tokens for event in recorded(tmp_path, events.RequestAdmitted)]
    assert found[0] == 0
    assert all(one < following for one, following in pairwise(found)), found
    assert usage["prompt_tokens_details"]["cached_tokens"] == found[-1] >= 900


def test_client_that_stops_reading_holds_nobody_up(
    tmp_path: Path, stuck_buffers: list[Any], made: list[int]
) -> None:
    with running(tmp_path, fake={"step_ms": 0}, kv={"enabled": False}) as server:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        stuck = socket.socket()
        stuck.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        stuck.connect(server.listener.getsockname())
        stuck.sendall(raw(ASKED | {"max_tokens": 100_000, "stream": True}).encode())
        request_id = server.wait_for_phase("decoding")
        server.wait_until(lambda _: any(size() > HIGH_WATER_BYTES for size in stuck_buffers))
        other = server.http.post(TEXT, json=ASKED | {"prompt": "b", "max_tokens": 2_000})
        assert other.status_code == 200, "the engine goes on, and so do others"
        before = shown(server, request_id)["num_output_tokens"]
        num_made = len(made)
        server.wait_until(lambda _: shown(server, request_id)["num_output_tokens"] > before + 500)
        assert max(size() for size in stuck_buffers) < 2 * HIGH_WATER_BYTES
        assert len(made) <= num_made + 1, "nothing is made for who does not take it"
        assert shown(server, request_id)["has_client"] is True, "it may go on reading"
        stuck.close()
        wait_until_aside(server, request_id)
        server.http.delete(f"/v1/requests/{request_id}").raise_for_status()


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of all events that were made."""
    lengths: list[int] = []
    event = api.sse.event

    def noted(data: object, position: int | None) -> bytes:
        found = event(data, position)
        lengths.append(len(found))
        return found

    monkeypatch.setattr(api.sse, "event", noted)
    return lengths


@pytest.fixture
def stuck_buffers(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Of each connection, how many bytes wait for its client."""
    from api.protocol import Protocol

    sizes: list[Any] = []
    connect = Protocol.connection_made

    def noted(protocol: Protocol, transport: Any) -> None:
        sizes.append(transport.get_write_buffer_size)
        connect(protocol, transport)

    monkeypatch.setattr(Protocol, "connection_made", noted)
    return sizes
