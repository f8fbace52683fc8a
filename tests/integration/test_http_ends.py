"""Requests that the scheduler gives up: the same words on both routes, in a stream and whole."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from scheduler.streams import StreamEnd, StreamUpdate
from tests.integration.events import parse_event
from tests.integration.http_server import RunningServer, running

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": "hello"},
}
ENDS = {
    "memory": ("aborted", 503, "server_is_overloaded"),
    "memory_wait": ("aborted", 503, "server_is_overloaded"),
    "deadline": ("cancelled", 504, "deadline_exceeded"),
}
COMMON: dict[str, Any] = {"model": "default", "max_tokens": 4}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """Its model never loads, so requests wait."""
    with running(tmp_path_factory.mktemp("ends"), fake={"load_ms": 600_000}) as server:
        yield server


def told(answer: httpx.Response, status: int, *, stream: bool) -> dict[str, Any]:
    """The error that an answer is, or that its stream ends with."""
    if stream:
        assert answer.status_code == 200
        last = parse_event(answer.text.rstrip("\n").split("\n\n")[-1])
        assert last.position is not None
        return last.data["error"]
    assert answer.status_code == status
    assert 1 <= int(answer.headers["retry-after"]) <= 120
    assert "x-should-retry" not in answer.headers
    return answer.json()["error"]


def give_up(server: RunningServer, kind: Any, reason: str) -> None:
    """The client of the request that waits is told this end."""
    request_id = server.wait_for_phase("waiting")
    end = StreamEnd(kind, reason, "503.4MB", num_prompt_tokens=5, num_output_tokens=0)
    hub = server.service._hub  # pyright: ignore[reportPrivateUsage]
    while request_id not in hub.open:
        pass
    server.call(hub.deliver, [StreamUpdate(request_id, end=end)])
    server.http.delete(f"/v1/requests/{request_id}")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("reason", ENDS)
def test_end_is_told_on_each_route_in_its_form(
    server: RunningServer,
    path: str,
    stream: bool,
    reason: str,
) -> None:
    kind, status, code = ENDS[reason]
    with ThreadPoolExecutor(1) as pool:
        body = COMMON | BODIES[path] | {"stream": stream}
        waiting = pool.submit(server.http.post, path, json=body)
        give_up(server, kind, reason)
        answer = waiting.result()
    error = told(answer, status, stream=stream)
    assert (error["code"], error["reason"]) == (code, reason)
    assert error["type"] == "server_error"
    assert error["retryable"] is True
    assert "503" not in error["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_request_that_is_too_old_is_ended_whatever_it_does(tmp_path: Path, stream: bool) -> None:
    slow = {"step_ms": 20}
    with running(tmp_path, fake=slow, requests={"max_age_s": 1}) as server:
        body = COMMON | {"prompt": "a", "max_tokens": 10_000, "ignore_eos": True, "stream": stream}
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(server.http.post, "/v1/completions", json=body)
            request_id = server.wait_for_phase("decoding")
            assert server.http.post(f"/v1/requests/{request_id}/pause").status_code == 200
            answer = waiting.result()
        error = told(answer, 504, stream=stream)
        assert (error["code"], error["retryable"]) == ("deadline_exceeded", True)
        ended = server.http.get(f"/v1/requests/{request_id}").json()
        assert (ended["state"], ended["reason"]) == ("cancelled", "deadline")
        assert server.samples()["fermata_requests_ended_total,cancelled,deadline"] == 1
        assert server.view().requests == []


def test_one_request_is_given_up_where_none_may_be_held(tmp_path: Path) -> None:
    memory = {"ceiling": 3_000_000, "pause": False, "reserve": "chunk", "sample_ms": 10}
    with running(
        tmp_path,
        fake={"step_ms": 2},
        memory=memory,
        scheduler={"chunk_tokens": 64},
        kv={"enabled": False},
    ) as server:
        body = COMMON | {"prompt": "a", "max_tokens": 1_500, "ignore_eos": True}
        with ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(server.http.post, "/v1/completions", json=body) for _ in "ab"]
            statuses = sorted(answer.result().status_code for answer in answers)
        assert statuses == [200, 503]
        refused = next(a.result() for a in answers if a.result().status_code == 503)
        error = told(refused, 503, stream=False)
        assert (error["code"], error["reason"]) == ("server_is_overloaded", "memory")
        assert "memory in use" in error["detail"]
        assert server.samples()["fermata_requests_ended_total,aborted,memory"] == 1


def test_where_one_may_be_held_nobody_is_given_up(tmp_path: Path) -> None:
    memory = {"ceiling": 3_000_000, "reserve": "chunk", "sample_ms": 10}
    with running(
        tmp_path,
        fake={"step_ms": 2},
        memory=memory,
        scheduler={"chunk_tokens": 64},
        kv={"memory_bytes": 0},
    ) as server:
        body = COMMON | {"prompt": "a", "max_tokens": 1_500, "ignore_eos": True}
        with ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(server.http.post, "/v1/completions", json=body) for _ in "ab"]
            held = server.http.get(f"/v1/requests/{server.wait_for_phase('paused')}").json()
            assert held["pause_reason"] in ("high", "emergency"), "rows grow by 9% at a time"
            assert held["wait"]["reason"] in ("memory", "pressure")
            assert held["num_saved_tokens"] > 0
            assert [answer.result().status_code for answer in answers] == [200, 200]
        found = server.samples()
        pauses = [found.get(f"fermata_pauses_total,{why}", 0) for why in ("high", "emergency")]
        assert sum(pauses) >= 1
        assert found["fermata_resumes_total"] == found["fermata_held_seconds_count"] >= 1
        assert found["fermata_requests_held"] == 0
