"""Requests that never fit, and those that do not fit now."""

import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from scheduler.engine.fake import FakeSource
from scheduler.engine.fake_settings import FakeSettings
from scheduler.engine.model import ModelDescription
from tests.integration.http_server import TIMEOUT_S, RunningServer, running

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
NUMBERS = {
    "prompt_tokens",
    "max_tokens",
    "required_bytes",
    "capacity_bytes",
    "weights_bytes",
    "kv_bytes_per_token",
    "max_context_tokens",
}


OF_REFUSALS = ("requests_received", "requests_ended", "events", "steps", "step_seconds", "http_")
"""The metrics in which a refusal leaves something."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(tmp_path_factory.mktemp("capacity"), fake={"context_tokens": 64}) as server:
        yield server


def refused(server: RunningServer, body: dict[str, Any]) -> dict[str, Any]:
    """The error of a completion that never fits."""
    answer = server.http.post(TEXT, json={"model": "default", **body})
    assert answer.status_code == 400, answer.text
    assert answer.headers["x-should-retry"] == "false"
    error = answer.json()["error"]
    assert set(error) >= NUMBERS
    assert error["type"] == "invalid_request_error"
    assert error["reason"] == "context_exceeds_capacity"
    assert error["retryable"] is False
    # Some clients look for status numbers in the words, so byte counts stay out of them.
    assert str(error["required_bytes"]) not in error["message"]
    return error


@pytest.mark.parametrize("stream", [False, True])
def test_prompt_that_never_fits_says_so_in_the_known_words(
    server: RunningServer, stream: bool
) -> None:
    error = refused(server, {"prompt": "a" * 100, "max_tokens": 1, "stream": stream})
    assert error["code"] == "context_length_exceeded"
    assert error["message"] == (
        "prompt is too long: 100 tokens > 64 maximum. This model's maximum context length is 64 "
        "tokens. However, you requested 100 tokens. Please reduce the length of the messages or "
        "completion."
    )
    assert error["param"] == "prompt"
    assert (error["prompt_tokens"], error["max_context_tokens"]) == (100, 64)


def test_prompt_that_leaves_no_room_for_an_answer_is_too_long(server: RunningServer) -> None:
    error = refused(server, {"prompt": "a" * 64})
    assert error["message"].startswith("prompt is too long: 65 tokens > 64 maximum.")
    assert error["prompt_tokens"] == 64


def test_max_tokens_that_never_fit_are_another_case(server: RunningServer) -> None:
    error = refused(server, {"prompt": "a" * 60, "max_tokens": 2_000_000})
    assert error["code"] == "max_tokens_exceeds_capacity"
    assert error["message"] == (
        "input length and `max_tokens` exceed context limit: 60 + 2000000 > 64, decrease input "
        "length or `max_tokens` and try again"
    )
    assert error["param"] == "max_tokens"


def test_newer_name_of_max_tokens_is_named(server: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        server.openai.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": "a"}],
            max_completion_tokens=1000,
        )
    assert raised.value.param == "max_completion_tokens"
    assert raised.value.code == "max_tokens_exceeds_capacity"


def test_without_max_tokens_the_default_is_cut_to_what_fits(server: RunningServer) -> None:
    answer = server.openai.completions.create(
        model="default", prompt="a" * 60, extra_body={"ignore_eos": True}
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4


@pytest.mark.parametrize("prompt", ["a" * 100, "a" * 60])
def test_refused_request_leaves_nothing_but_its_events(server: RunningServer, prompt: str) -> None:
    asked = {"model": "default", "prompt": prompt, "max_tokens": 2_000_000}
    measured(server)
    before, saved = server.samples(), server.http.get("/v1/cache").json()
    answer = server.http.post(TEXT, json=asked)
    after = server.samples()
    path = f"/v1/requests/{answer.headers['x-request-id']}"
    assert server.http.get(f"{path}/stream").status_code == 404
    kinds = [event["kind"] for event in server.http.get(f"{path}/events").json()["data"]]
    assert kinds == ["request_received", "request_rejected"]
    assert server.view().requests == []
    assert named(server) == []
    now = server.http.get("/v1/cache").json()
    assert now | {"free_bytes": 0} == saved | {"free_bytes": 0}
    others = after.keys() - {
        name for name in after if name.removeprefix("fermata_").startswith(OF_REFUSALS)
    }
    assert len(others) > 20
    assert {name: after[name] for name in others} == {name: before[name] for name in others}
    rejected = f"fermata_requests_ended_total,rejected,{answer.json()['error']['code']}"
    assert after[rejected] - before.get(rejected, 0) == 1


def measured(server: RunningServer) -> None:
    """Returns once the server has said all that it says of itself at its start."""
    deadline = time.monotonic() + TIMEOUT_S
    while server.http.get("/v1/cache").json()["free_bytes"] is None:
        assert time.monotonic() < deadline, "the free space was never measured"


def named(server: RunningServer) -> list[int]:
    """The requests whose blocks' names are kept."""
    names = server.service._run.sensors.names  # pyright: ignore[reportPrivateUsage]
    return list(names._chains)  # pyright: ignore[reportPrivateUsage]


CEILING = 1_000_000 + 2048 * 256 + 65_536 * 1024
"""Weights, one chunk and rows of 65,536 tokens of the fake model."""


def test_long_prompt_with_endless_output_is_told_to_ask_for_less(tmp_path: Path) -> None:
    with running(tmp_path, memory={"ceiling": CEILING}) as server:
        error = refused(server, {"prompt": [1] * 60_000, "max_tokens": 2_000_000})
        assert error["code"] == "max_tokens_exceeds_capacity"
        assert error["message"] == (
            "input length and `max_tokens` exceed context limit: 60000 + 2000000 > 65536, decrease "
            "input length or `max_tokens` and try again"
        )
        assert "prompt is too long" not in error["message"]
        assert {name: error[name] for name in NUMBERS - {"required_bytes"}} == {
            "prompt_tokens": 60_000,
            "max_tokens": 2_000_000,
            "capacity_bytes": CEILING,
            "weights_bytes": 1_000_000,
            "kv_bytes_per_token": 1024,
            "max_context_tokens": 65_536,
        }
        assert error["required_bytes"] > 2_060_000 * 1024


@pytest.mark.parametrize("path", ["/v1/capacity", "/v1/omlx/capacity"])
def test_capacity_is_shown_with_the_numbers_of_a_refusal(tmp_path: Path, path: str) -> None:
    with running(tmp_path, memory={"ceiling": CEILING}) as server:
        shown = server.http.get(path).json()
        error = refused(server, {"prompt": [1] * 70_000, "max_tokens": 1})
    shared = NUMBERS - {"prompt_tokens", "max_tokens", "required_bytes"}
    assert {name: shown[name] for name in shared} == {name: error[name] for name in shared}
    assert (shown["object"], shown["model"]) == ("capacity", "fake")
    assert shown["model_context_tokens"] == 131_072
    assert (shown["ceiling_bytes"], shown["ceiling_is_auto"]) == (CEILING, False)
    assert shown["usage_bytes"] >= 1_000_000
    assert (shown["reserved_bytes"], shown["level"]) == (0, "normal")


def test_memory_is_shown_with_its_marks_and_the_age_of_its_reading(tmp_path: Path) -> None:
    with running(tmp_path, memory={"ceiling": CEILING}) as server:
        server.wait_until(lambda view: view.memory.sampled_at_ns is not None)
        for path in ("/v1/requests", "/health"):
            memory = server.http.get(path).json()["memory"]
            assert memory["ceiling_bytes"] == CEILING
            assert memory["high_bytes"] == CEILING * 920 // 1000
            assert (memory["level"], memory["reliefs"]) == ("normal", [])
            assert memory["usage_bytes"] >= 1_000_000
            assert 0 <= memory["age_ms"] < 60_000


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "status"),
    [({}, 200), ({"max_tokens": 1_000}, 400), ({"prompt": "a" * 99}, 400), ({"n": 2}, 400)],
)
def test_each_answer_says_how_long_a_request_may_be(
    server: RunningServer, asked: dict[str, Any], status: int, stream: bool
) -> None:
    body = {"model": "default", "prompt": "a", "max_tokens": 2, "stream": stream}
    answer = server.http.post(TEXT, json=body | asked)
    assert answer.status_code == status
    assert answer.headers["X-oMLX-Max-Context-Tokens"] == "64"
    assert answer.headers["X-Max-Context-Tokens"] == "64"
    if status == 200:
        again = server.http.get(f"/v1/requests/{answer.headers['x-request-id']}/stream")
        assert again.headers["X-Max-Context-Tokens"] == "64"


def test_full_queue_is_a_503_that_says_when_to_come_again(tmp_path: Path) -> None:
    bounds = {"max_rows": 1, "max_waiting": 1}
    with running(tmp_path, fake={"step_ms": 5}, scheduler=bounds) as server:
        body = {"model": "default", "prompt": "a", "max_tokens": 200, "ignore_eos": True}
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(server.http.post, TEXT, json=body)
            server.wait_for_phase("decoding")
            second = pool.submit(server.http.post, TEXT, json=body)
            server.wait_for_phase("waiting")
            third = server.http.post(TEXT, json=body)
            assert len(named(server)) == 2
            assert {first.result().status_code, second.result().status_code} == {200}
        assert third.status_code == 503
        error = third.json()["error"]
        assert error["code"] == "server_is_overloaded"
        assert error["retryable"] is True
        assert not re.search(r"\d", error["message"])
        assert error["reason"] == "queue_full"
        assert 1 <= int(third.headers["retry-after"]) <= 120
        assert int(third.headers["retry-after-ms"]) == 1000 * int(third.headers["retry-after"])


def test_stopping_server_takes_nothing_new(tmp_path: Path) -> None:
    with running(tmp_path, fake={"step_ms": 5}) as server:
        body = {"model": "default", "prompt": "a", "max_tokens": 100, "ignore_eos": True}
        with ThreadPoolExecutor(1) as pool:
            running_one = pool.submit(server.http.post, TEXT, json=body)
            server.wait_for_phase("decoding")
            server.begin_stop()
            late = server.http.post(TEXT, json=body)
            ready = server.http.get("/ready")
            # What is in the engine may end within the drain limit.
            assert running_one.result().json()["usage"]["completion_tokens"] == 100
        assert late.status_code == 503
        error = late.json()["error"]
        assert (error["code"], error["reason"]) == ("server_is_overloaded", "server_stopping")
        assert (ready.status_code, ready.json()["reason"]) == (503, "server_stopping")
        server.join()


class SlowSource(FakeSource):
    """A model whose description takes until `let_go`."""

    def __init__(self) -> None:
        super().__init__(FakeSettings())
        self.let_go = threading.Event()

    def describe(self) -> ModelDescription:
        assert self.let_go.wait(20)
        return super().describe()


def test_model_that_is_not_described_in_time_is_a_503(tmp_path: Path) -> None:
    source = SlowSource()
    with running(tmp_path, source, server={"prepare_limit_ms": 0}) as server:
        answer = server.http.post(TEXT, json={"model": "default", "prompt": "a"})
        ready = server.http.get("/ready")
        health = server.http.get("/health")
        source.let_go.set()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "model_is_loading"
    assert answer.headers["retry-after"]
    assert (ready.status_code, ready.json()["loading"]) == (503, True)
    assert (health.status_code, health.json()["model"]) == (200, None)


def test_request_waits_for_the_description(tmp_path: Path) -> None:
    source = SlowSource()
    with running(tmp_path, source) as server, ThreadPoolExecutor(1) as pool:
        body = {"model": "default", "prompt": "a", "max_tokens": 1}
        answer = pool.submit(server.http.post, TEXT, json=body)
        assert server.http.get("/ready").json()["loading"] is True
        source.let_go.set()
        assert answer.result().status_code == 200
