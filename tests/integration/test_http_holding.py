"""Requests held by hand: over HTTP, in every phase, with streams that stay open."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import api.holding
from tests.integration.events import Event, parse_event, parse_stream
from tests.integration.http_server import RunningServer, running
from tests.integration.test_http_clients import AT_ONCE, assert_cancelled, assert_empty, send

TEXT = "/v1/completions"
ASKED: dict[str, Any] = {
    "model": "default",
    "prompt": "a prompt of more than one block: " * 10,
    "max_tokens": 40,
    "ignore_eos": True,
    "seed": 3,
}
GROUPS: dict[str, Any] = {
    "fake": {"step_ms": 10, "prefill_tokens_per_s": 2_000},
    "server": {"heartbeat_ms": 100},
    "scheduler": {"chunk_tokens": 32},
    "memory": {"ceiling": "none"},
    "kv": {"memory_bytes": 0},
    "requests": AT_ONCE,
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RunningServer]:
    with running(tmp_path, **GROUPS) as server:
        yield server


@pytest.fixture
def briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """What takes longer than a moment is answered at once."""
    monkeypatch.setattr(api.holding, "HOLD_WAIT_S", 0.0)


def hold(server: RunningServer, request_id: str) -> httpx.Response:
    return server.http.post(f"/v1/requests/{request_id}/pause")


def release(server: RunningServer, request_id: str) -> httpx.Response:
    return server.http.post(f"/v1/requests/{request_id}/resume")


def shown(server: RunningServer, request_id: str) -> dict[str, Any]:
    return server.http.get(f"/v1/requests/{request_id}").json()


def kinds(server: RunningServer, request_id: str) -> list[str]:
    found = server.http.get(f"/v1/requests/{request_id}/events").json()["data"]
    return [event["kind"] for event in found]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["prefilling", "decoding"])
def test_held_request_goes_on_to_the_end_that_it_would_have_had(
    server: RunningServer, phase: str, stream: bool
) -> None:
    expected = server.http.post(TEXT, json=ASKED).json()["choices"][0]["text"]
    server.http.post("/v1/cache/clear").raise_for_status()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.http.post, TEXT, json=ASKED | {"stream": stream})
        request_id = server.wait_for_phase(phase)
        assert hold(server, request_id).json()["state"] == "paused"
        again = hold(server, request_id)
        assert again.status_code == 200
        view = again.json()
        assert (view["hold"], view["pause_reason"], view["num_pauses"]) == (True, "operator", 1)
        assert view["wait"]["reason"] == "operator"
        assert (view["row_bytes"], view["reserved_bytes"]) == (0, 0)
        assert view["num_known_tokens"] == 330 + view["num_output_tokens"]
        assert view["num_pinned_blocks"] == view["num_saved_tokens"] // 64
        if phase == "decoding":
            assert view["num_saved_tokens"] == view["num_known_tokens"] - 1, "one is pending"
            assert view["tail_bytes"] > 0
        counts = server.view()
        assert (counts.num_held, counts.num_admitted, counts.batch_rows) == (1, 0, 0)
        assert server.samples()["fermata_requests_held"] == 1
        for _ in range(2):
            assert release(server, request_id).status_code == 200
        answer = waiting.result()
    if stream:
        events = parse_stream(answer.text)
        assert events[-1].data == "[DONE]"
        assert "".join(event.text for event in events) == expected
    else:
        assert answer.json()["choices"][0]["text"] == expected
    ended = shown(server, request_id)
    assert (ended["state"], ended["hold"], ended["wait"]) == ("finished", False, None)
    assert ended["num_pauses"] == 1
    assert ended["held_ms"] >= view["held_ms"]
    assert kinds(server, request_id).count("request_paused") == 1
    found = server.samples()
    assert found["fermata_pauses_total,operator"] == 1
    assert found["fermata_resumes_total"] == 1
    assert not [name for name in found if name.startswith("fermata_kv_drops")]
    if phase == "decoding":
        assert found["fermata_fed_tokens_total"] == 2 * 329, "nothing was computed again"
    assert found["fermata_held_seconds_count"] == 1
    assert found["fermata_requests_held"] == 0


def test_request_in_the_queue_is_held_and_others_pass_it(tmp_path: Path) -> None:
    groups: dict[str, Any] = GROUPS | {"scheduler": {"max_rows": 1}}
    with running(tmp_path, **groups) as server, ThreadPoolExecutor(3) as pool:
        first = pool.submit(server.http.post, TEXT, json=ASKED | {"max_tokens": 100})
        server.wait_for_phase("decoding")
        second = pool.submit(server.http.post, TEXT, json=ASKED)
        second_id = server.wait_for_phase("waiting")
        assert shown(server, second_id)["wait"]["reason"] in ("rows", "blocks")
        assert hold(server, second_id).json()["state"] == "paused"
        third = pool.submit(server.http.post, TEXT, json=ASKED | {"prompt": "b"})
        assert first.result().status_code == 200
        assert third.result().status_code == 200
        assert shown(server, second_id)["state"] == "paused"
        assert release(server, second_id).status_code == 200
        assert second.result().status_code == 200


def test_what_is_not_there_or_has_ended_is_neither_held_nor_released(
    server: RunningServer,
) -> None:
    ended_id = server.http.post(TEXT, json=ASKED | {"max_tokens": 1}).headers["x-request-id"]
    for ask in (hold, release):
        unknown = ask(server, "req_nothing")
        assert unknown.status_code == 404
        assert unknown.json()["error"]["code"] == "request_not_found"
        ended = ask(server, ended_id)
        assert ended.status_code == 409
        error = ended.json()["error"]
        assert (error["code"], error["state"]) == ("request_has_ended", "finished")
        assert "has ended (finished: length)" in error["message"]


def test_release_of_one_that_nobody_holds_changes_nothing(server: RunningServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.http.post, TEXT, json=ASKED)
        request_id = server.wait_for_phase("decoding")
        assert release(server, request_id).json()["state"] == "decoding"
        assert answer.result().status_code == 200
    assert "request_paused" not in kinds(server, request_id)


def read_beats(lines: Iterator[str], num_beats: int) -> None:
    """Reads on until so many heartbeats have come, and no token between them."""
    left = num_beats
    block: list[str] = []
    while left:
        line = next(lines)
        block.append(line)
        if line == "":
            event: Event = parse_event("\n".join(block[:-1]))
            left = left - 1 if event.is_heartbeat else num_beats
            block = []


@pytest.mark.usefixtures("briefly")
def test_heartbeats_go_on_through_pause_and_resume(
    server: RunningServer, held_writers: threading.Event, held_readers: threading.Event
) -> None:
    with server.http.stream("POST", TEXT, json=ASKED | {"stream": True}) as answer:
        lines = answer.iter_lines()
        request_id = server.wait_for_phase("decoding")
        pausing = hold(server, request_id)
        assert pausing.status_code == 202
        server.wait_for_phase("pausing")
        view = shown(server, request_id)
        assert view["wait"]["reason"] == "saving"
        assert view["wait"]["num_blocks"] == 5
        assert view["row_bytes"] > 0
        assert server.samples()["fermata_requests_pausing"] == 1
        read_beats(lines, 3)
        assert shown(server, request_id)["state"] == "pausing"
        held_writers.set()
        server.wait_for_phase("paused")
        read_beats(lines, 3)
        assert shown(server, request_id)["state"] == "paused"
        assert release(server, request_id).status_code == 202
        server.wait_for_phase("resuming")
        assert shown(server, request_id)["wait"]["reason"] == "restoring"
        assert server.samples()["fermata_requests_resuming"] == 1
        read_beats(lines, 3)
        assert shown(server, request_id)["state"] == "resuming"
        held_readers.set()
        assert list(lines)[-2:] == ["data: [DONE]", ""]


@pytest.mark.parametrize("stream", [False, True])
def test_client_that_leaves_while_its_request_is_held_is_noticed(
    server: RunningServer, stream: bool
) -> None:
    connection = send(server, ASKED | {"stream": stream}, TEXT)
    request_id = server.wait_for_phase("decoding")
    assert hold(server, request_id).status_code == 200
    connection.close()
    assert_cancelled(server, request_id)
    assert_empty(server)
    cache = server.http.get("/v1/cache").json()
    assert cache["num_used_blocks"] == cache["num_blocks"] - 1, "a chain, and nothing pins its end"
    assert server.samples()["fermata_requests_held"] == 0


@pytest.mark.usefixtures("briefly")
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("phase", ["pausing", "resuming"])
def test_client_that_leaves_on_the_way_is_noticed_while_disk_stands_still(
    server: RunningServer,
    held_writers: threading.Event,
    held_readers: threading.Event,
    phase: str,
    stream: bool,
) -> None:
    connection = send(server, ASKED | {"stream": stream}, TEXT)
    request_id = server.wait_for_phase("decoding")
    assert hold(server, request_id).status_code == 202
    server.wait_for_phase("pausing")
    if phase == "resuming":
        held_writers.set()
        server.wait_for_phase("paused")
        release(server, request_id)
        server.wait_for_phase("resuming")
    connection.close()
    assert_cancelled(server, request_id)
    held_writers.set()
    held_readers.set()
    assert_empty(server)


def test_held_request_is_cancelled_at_once(server: RunningServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.http.post, TEXT, json=ASKED)
        request_id = server.wait_for_phase("decoding")
        hold(server, request_id)
        deleted = server.http.delete(f"/v1/requests/{request_id}")
        assert (deleted.status_code, deleted.json()["state"]) == (200, "cancelled")
        assert answer.result().status_code == 410
    assert hold(server, request_id).status_code == 409


def test_request_stays_held_over_a_restart(tmp_path: Path) -> None:
    with running(tmp_path, **GROUPS) as server:
        connection = send(server, ASKED, TEXT)
        request_id = server.wait_for_phase("decoding")
        num_tokens = hold(server, request_id).json()["num_output_tokens"]
        server.begin_stop()
        server.begin_stop()
        server.join()
    connection.close()
    with running(tmp_path, **GROUPS) as server:
        server.wait_until(lambda view: view.engine_ready)
        view = shown(server, request_id)
        assert (view["state"], view["hold"]) == ("paused", True)
        assert (view["num_output_tokens"], view["wait"]["reason"]) == (num_tokens, "operator")
        assert release(server, request_id).status_code == 200
        assert server.wait_for_end(request_id)["state"] == "finished"


def test_request_that_cannot_run_here_is_held_where_it_is(tmp_path: Path) -> None:
    slow: dict[str, Any] = GROUPS | {"fake": {"step_ms": 1_000}}
    with running(tmp_path, **slow) as server:
        connection = send(server, ASKED, TEXT)
        request_id = server.wait_for_phase("decoding")
        server.begin_stop()
        server.begin_stop()
        server.join()
    connection.close()
    other: dict[str, Any] = GROUPS | {"fake": {"context_tokens": 4_096}}
    with running(tmp_path, **other) as server:
        server.wait_until(lambda view: view.engine_ready)
        held = hold(server, request_id)
        assert held.status_code == 200
        assert (held.json()["state"], held.json()["wait"]["reason"]) == ("waiting", "model")
        assert held.json()["hold"] is True
        released = release(server, request_id)
        assert (released.status_code, released.json()["hold"]) == (200, False)
        assert server.view().num_unfit == 1
