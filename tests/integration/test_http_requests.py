"""Requests by their ids, models, health, readiness, metrics and the key."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests.integration.events import check_object, parse_stream
from tests.integration.http_server import RunningServer, running

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
BODY: dict[str, Any] = {"model": "default", "prompt": "once", "max_tokens": 5}
LONG: dict[str, Any] = BODY | {"max_tokens": 10_000, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(tmp_path_factory.mktemp("requests"), fake={"step_ms": 1}) as server:
        yield server


def test_request_is_shown_while_open_and_when_ended(server: RunningServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.http.post, TEXT, json=LONG, headers={"X-Request-Id": "mine"})
        request_id = server.wait_for_phase("decoding")
        listed = server.http.get("/v1/requests").json()
        assert listed["object"] == "list"
        assert [entry["id"] for entry in listed["data"]] == [request_id]
        assert server.http.get("/v1/requests?state=waiting").json()["data"] == []
        assert server.http.get("/v1/requests?limit=0").json()["has_more"] is True
        shown = server.http.get(f"/v1/requests/{request_id}").json()
        assert (shown["object"], shown["state"]) == ("request", "decoding")
        assert shown["num_prompt_tokens"] == 4
        cancelled = server.http.delete(f"/v1/requests/{request_id}")
        assert cancelled.status_code == 200
        assert cancelled.json()["state"] == "cancelled"
        assert answer.result().status_code == 410
    error = answer.result().json()["error"]
    assert error["code"] == "request_cancelled"
    assert answer.result().headers["x-should-retry"] == "false"
    assert server.http.get("/v1/requests").json()["data"] == []
    again = server.http.delete(f"/v1/requests/{request_id}")
    assert (again.status_code, again.json()["reason"]) == (200, "cancel_requested")
    events = server.http.get(f"/v1/requests/{request_id}/events").json()["data"]
    assert events[0]["body"]["client_request_id"] == "mine"


def test_events_of_a_request_are_those_of_the_journal(server: RunningServer) -> None:
    request_id = server.http.post(TEXT, json=BODY).headers["x-request-id"]
    path = f"/v1/requests/{request_id}/events"
    events = server.http.get(path).json()["data"]
    kinds = [event["kind"] for event in events]
    assert kinds[:3] == ["request_received", "request_queued", "request_admitted"]
    assert "request_finished" in kinds
    seqs = [event["seq"] for event in events]
    assert seqs == sorted(seqs)
    rest = server.http.get(f"{path}?after={seqs[0]}&limit=1").json()
    assert [event["kind"] for event in rest["data"]] == ["request_queued"]
    assert rest["has_more"] is True


def test_cancelled_stream_ends_with_an_error_event(server: RunningServer) -> None:
    with server.http.stream("POST", TEXT, json=LONG | {"stream": True}) as answer:
        lines = answer.iter_lines()
        head = [next(lines) for _ in range(6)]
        server.http.delete(f"/v1/requests/{answer.headers['x-request-id']}")
        events = parse_stream("\n".join([*head, *lines]) + "\n")
    error = events[-1].data["error"]
    assert error["code"] == "request_cancelled"
    assert events[-1].position == max(event.position or 0 for event in events)


@pytest.mark.parametrize("path", ["", "/events", "/stream"])
def test_unknown_request_is_not_found(server: RunningServer, path: str) -> None:
    answer = server.http.get(f"/v1/requests/req_{'0' * 26}{path}")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "request_not_found"


def test_unknown_request_cannot_be_cancelled(server: RunningServer) -> None:
    answer = server.http.delete("/v1/requests/nothing")
    assert answer.status_code == 404


@pytest.mark.parametrize("query", ["state=asleep", "limit=-1", "limit=x", "limit=1001"])
def test_bad_filter_is_refused(server: RunningServer, query: str) -> None:
    answer = server.http.get(f"/v1/requests?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]


def test_models_are_what_the_client_expects(server: RunningServer) -> None:
    assert [model.id for model in server.openai.models.list()] == ["fake", "default"]
    assert server.openai.models.retrieve("default").id == "fake"
    for model in server.http.get("/v1/models").json()["data"]:
        check_object(model)
        assert model["max_model_len"] == 131_072
    with pytest.raises(openai.NotFoundError):
        server.openai.models.retrieve("gpt-9")


def test_any_model_name_may_be_accepted(tmp_path: Path) -> None:
    with running(tmp_path, models={"accept_any": True}) as server:
        answer = server.openai.completions.create(model="gpt-9", prompt="a", max_tokens=1)
        assert answer.model == "fake"


def test_health_says_what_runs(server: RunningServer) -> None:
    server.wait_until(lambda _: server.http.get("/ready").status_code == 200)
    health = server.http.get("/health").json()
    assert (health["status"], health["state"]) == ("ok", "ready")
    assert (health["run"], health["model"]) == (1, "fake")
    assert health["journal"]["events"] > 0


def test_server_is_not_ready_while_its_model_loads(tmp_path: Path) -> None:
    with running(tmp_path, fake={"load_ms": 60_000}) as server:
        server.http.get("/v1/models").raise_for_status()
        ready = server.http.get("/ready")
        assert ready.status_code == 503
        assert ready.json()["loading"] is True
        assert server.http.get("/health").status_code == 200


def test_server_is_not_ready_when_work_waits_and_no_step_comes(tmp_path: Path) -> None:
    slow = {"prefill_tokens_per_s": 1}
    with running(tmp_path, fake=slow, server={"ready_limit_ms": 100}) as server:
        server.wait_until(lambda _: server.http.get("/ready").status_code == 200)
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.http.post, TEXT, json=BODY | {"prompt": "a" * 50})
            request_id = server.wait_for_phase("prefilling")
            while (ready := server.http.get("/ready")).status_code == 200:
                assert ready.json()["last_step_age_ms"] < 10_000
            assert ready.json()["work_waits"] is True
            assert ready.json()["last_step_age_ms"] > 100
            server.http.delete(f"/v1/requests/{request_id}")
            answer.result()


def test_metrics_count_what_happens(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        server.http.post(TEXT, json=BODY).raise_for_status()
        server.http.post(TEXT, json=BODY | {"n": 2})
        found = server.samples()
        assert found["fermata_requests_received_total"] == 1
        assert found["fermata_requests_ended_total,finished,length"] == 1
        assert found["fermata_prompt_tokens_total"] == 4
        assert found["fermata_output_tokens_total"] == 5
        assert found["fermata_http_answers_total,200"] == 1
        assert found["fermata_http_answers_total,400"] == 1
        assert found["fermata_step_seconds_count"] > 0
        assert found["fermata_requests_waiting"] == 0


@pytest.mark.parametrize("headers", [{}, {"Authorization": "Bearer no"}, {"x-api-key": "sécret"}])
def test_key_is_asked_for(tmp_path: Path, headers: dict[str, str]) -> None:
    with running(tmp_path, server={"api_key": "secret"}) as server:
        raw = {name: value.encode() for name, value in headers.items()}
        for path in ("/v1/models", "/v1/requests", "/metrics", "/nothing"):
            answer = httpx.get(server.url + path, headers=raw)  # pyright: ignore[reportArgumentType]
            assert answer.status_code == 401, path
            assert answer.json()["error"]["code"] == "invalid_api_key"
        for path in ("/health", "/ready"):
            assert httpx.get(server.url + path).status_code != 401
        for good in ({"Authorization": "Bearer secret"}, {"x-api-key": "secret"}):
            assert httpx.get(f"{server.url}/v1/models", headers=good).status_code == 200
