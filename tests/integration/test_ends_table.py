"""Every way in which a request can be ended from outside, in every phase that the transition table
has: one terminal event, and nothing of the request stays.
"""

import socket
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import api.holding
from journal import events
from journal.reader import JournalReader
from scheduler.clock import SystemClock
from scheduler.evolve import fold
from scheduler.request import TRANSITIONS, Phase
from scheduler.state import SchedulerState
from tests.integration.http_server import RunningServer
from tests.integration.pressed import pressed
from tests.integration.test_http_clients import assert_empty, send

PHASES = [phase for phase, kind in TRANSITIONS if kind == "request_cancelled"]
HOUR_NS = 3_600 * 10**9
GRACE_S = 600
PATH = "/v1/completions"


@dataclass
class Ahead:
    """How far the wall clock of the server is ahead."""

    ns: int = 0


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Ahead:
    """Sets the server's clock, which is the machine's."""
    found = Ahead()
    monkeypatch.setattr(SystemClock, "wall_ns", lambda _: time.time_ns() + found.ns)
    monkeypatch.setattr(api.holding, "HOLD_WAIT_S", 0.0)
    return found


def asked(**more: Any) -> dict[str, Any]:
    """A request that would run for long."""
    prompt = "a prompt of more than one block: " * 10
    common = {"model": "default", "max_tokens": 10_000, "ignore_eos": True}
    return common | {"prompt": prompt} | more


def bring_into(phase: Phase, server: RunningServer, writers: threading.Event) -> None:
    """Brings the request there from where it is by itself."""
    if phase not in (Phase.PAUSING, Phase.PAUSED, Phase.RESUMING):
        return
    request_id = server.wait_for_phase("decoding")
    server.http.post(f"/v1/requests/{request_id}/pause").raise_for_status()
    server.wait_for_phase("pausing")
    if phase is Phase.PAUSING:
        return
    writers.set()
    server.wait_for_phase("paused")
    if phase is Phase.RESUMING:
        server.http.post(f"/v1/requests/{request_id}/resume").raise_for_status()


def end(
    way: str, server: RunningServer, client: socket.socket, request_id: str, ahead: Ahead
) -> None:
    """Ends it in this way."""
    if way == "cancel_requested":
        server.http.delete(f"/v1/requests/{request_id}").raise_for_status()
    elif way == "client_gone":
        client.close()
    elif way == "nobody_came":
        client.close()
        server.wait_until(lambda view: any(r.orphaned_by for r in view.requests))
        ahead.ns = GRACE_S * 10**9
    else:
        ahead.ns = HOUR_NS


def final_state(folder: Path) -> SchedulerState:
    """All that the journal says, folded."""
    state = SchedulerState()
    with JournalReader.open(folder) as reader:
        fold(state, reader.read())
    return state


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["cancel_requested", "client_gone", "nobody_came", "deadline"])
@pytest.mark.parametrize("phase", PHASES)
def test_a_request_ends_once_and_nothing_of_it_stays(  # noqa: PLR0917
    tmp_path: Path,
    phase: Phase,
    way: str,
    stream: bool,
    ahead: Ahead,
    held_writers: threading.Event,
    held_readers: threading.Event,
) -> None:
    groups = {
        "memory": {"ceiling": "none"},
        "requests": {
            "max_age_s": 3_600,
            "orphan_grace_s": 0 if way == "client_gone" else GRACE_S,
        },
        "scheduler": {"chunk_tokens": 16, "max_rows": 1},
    }
    with pressed(tmp_path, **groups) as pressed_server:
        server = pressed_server.server
        if phase is Phase.PREFILLING:
            pressed_server.engine.gate.clear()
        first = None
        if phase is Phase.WAITING:
            first = send(server, asked(prompt="the one before"), PATH)
            server.wait_for_phase("decoding")
        client = send(server, asked(stream=stream), PATH)
        bring_into(phase, server, held_writers)
        request_id = server.wait_for_phase(phase.value)
        end(way, server, client, request_id, ahead)
        ended = server.wait_for_end(request_id)
        reason = "client_gone" if way == "nobody_came" else way
        assert (ended["state"], ended["reason"]) == ("cancelled", reason)
        held_readers.set()  # a row that is being filled is let go between two files
        pressed_server.engine.gate.set()
        if first is not None:
            ahead.ns = HOUR_NS
            server.wait_until(lambda view: view.requests == [])
            first.close()
        assert_empty(server)
        assert pressed_server.engine.read_memory().active_bytes == 1_000_000
        client.close()
        held_writers.set()
        server.wait_until(lambda _: not server.http.get("/v1/cache").json()["writing_bytes"])
    assert [end.request_id for end in all_ends(tmp_path)].count(request_id) == 1
    state = final_state(tmp_path)
    blocks = state.index.blocks.values()
    assert not any(block.leases or block.pins for block in blocks)
    assert (state.index.tails, state.index.writing_bytes) == ({}, 0)


def all_ends(folder: Path) -> list[Any]:
    """Every end that was recorded."""
    kinds = events.RequestFinished | events.RequestCancelled | events.RequestAborted
    with JournalReader.open(folder) as reader:
        return [record.event for record in reader.read() if isinstance(record.event, kinds)]
