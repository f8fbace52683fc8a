"""The bounds of HTTP, what is logged, and a bug of our own."""

import socket
import threading
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

import api.body
import api.gate
from scheduler.engine.fake import FakeSource
from scheduler.engine.fake_settings import FakeSettings
from scheduler.engine.fake_tokenizer import FakeTokenizer
from scheduler.engine.model import ModelDescription
from scheduler.parameters import decode_parameters
from scheduler.service import Saturated
from scheduler.streams import Arrival
from tests.integration.http_server import running
from tests.integration.test_http_clients import send

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
BODY: dict[str, Any] = {"model": "default", "prompt": "once", "max_tokens": 3}
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


def test_unknown_fields_are_accepted_and_listed_in_one_line(tmp_path: Path) -> None:
    with running(tmp_path) as server, capture_logs() as lines:
        unknown = {f"field_{i}": i for i in range(30)} | {"x" * 5000: 1}
        answer = server.http.post(TEXT, json=BODY | unknown)
        assert answer.status_code == 200
    found = [line for line in lines if line["event"] == "unknown_fields"]
    assert len(found) == 1
    assert found[0]["request_id"] == answer.headers["x-request-id"]
    assert found[0]["num_fields"] == 31
    assert found[0]["fields"] == [f"field_{i}" for i in range(20)]


def test_parameters_are_kept_as_they_were_asked(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "read"}}, {"type": "web_search"}]
    asked: dict[str, Any] = {
        "model": "claude-x",
        "messages": HELLO,
        "max_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "logit_bias": {"65": -5},
        "stop": "end",
        "seed": -7,
        "ignore_eos": True,
        "tools": tools,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    with running(tmp_path) as server:
        request_id = server.http.post(CHAT, json=asked).headers["x-request-id"]
        bare = server.http.post(TEXT, json=BODY).headers["x-request-id"]
        kept = [decode_parameters(server.parameters(name)) for name in (request_id, bare)]
    sampling = kept[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.min_p) == (0.5, 0.9, 0.1)
    assert (sampling.top_k, sampling.repetition_penalty) == (0, 1.1)
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.2, 0.3)
    assert (sampling.logit_bias, sampling.stop) == ({65: -5.0}, ("end",))
    assert (sampling.seed, sampling.ignore_end_of_turn) == (-7, True)
    assert (kept[0].model, kept[0].route, kept[0].stream) == ("fake", CHAT, True)
    assert kept[0].options == {
        "tools": [tools[0]],
        "stream_options": {"include_usage": True},
    }
    # Without a seed one is drawn, and kept.
    assert 0 < kept[1].sampling.seed < 2**53
    assert kept[1].sampling.temperature == 0


def test_exchanges_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api.gate, "MAX_CONNECTIONS", 1)
    with running(tmp_path, fake={"step_ms": 5}) as server:
        asked = BODY | {"stream": True, "max_tokens": 10_000, "ignore_eos": True}
        with server.http.stream("POST", TEXT, json=asked) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()  # Kept: the stream is closed with it.
            assert next(lines) == "id: 0"
            refused = server.http.get("/health")
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_is_overloaded"
        # The exchange that was left is over a moment later, and makes room.
        server.wait_until(lambda _: server.http.get("/health").status_code == 200)


def test_body_that_does_not_come_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(api.body, "BODY_WAIT_S", 0.01)
    with running(tmp_path) as server:
        head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Length: 100\r\n\r\n" + "{"
        with socket.create_connection(server.listener.getsockname(), timeout=10) as connection:
            connection.sendall(head.encode())
            assert connection.recv(1000).startswith(b"HTTP/1.1 408 ")


class SlowTokenizer(FakeTokenizer):
    """Counts only when it is let."""

    def __init__(self) -> None:
        self.began = threading.Event()
        self.let_go = threading.Event()

    def encode(self, text: str) -> list[int]:
        self.began.set()
        assert self.let_go.wait(20)
        return super().encode(text)


class SlowSource(FakeSource):
    """A model with this tokenizer."""

    def __init__(self) -> None:
        super().__init__(FakeSettings())
        self.tokenizer = SlowTokenizer()

    def describe(self) -> ModelDescription:
        described = super().describe()
        return ModelDescription("fake", self.tokenizer, described.facts, described.blas)


def test_client_that_leaves_while_its_prompt_is_counted_leaves_nothing(tmp_path: Path) -> None:
    source = SlowSource()
    with running(tmp_path, source) as server:
        connection = send(server, BODY | {"stream": True}, TEXT)
        assert source.tokenizer.began.wait(20)
        connection.close()
        # The event loop lives while a prompt is counted.
        assert server.http.get("/health").status_code == 200
        source.tokenizer.let_go.set()
        assert server.http.post(TEXT, json=BODY).status_code == 200
        assert server.service.metrics.requests_received == 1


def test_bug_is_an_error_of_the_same_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with running(tmp_path) as server:
        monkeypatch.setattr(server.service, "readiness", lambda: 1 // 0)
        answer = server.http.get("/ready")
        monkeypatch.undo()
    assert answer.status_code == 500
    error = answer.json()["error"]
    assert (error["code"], error["type"]) == ("internal_error", "server_error")
    assert "ZeroDivisionError" in error["message"]


def test_full_disk_is_a_503_of_its_own_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(arrival: Arrival) -> None:
        raise Saturated("journal_full", 5)

    with running(tmp_path) as server:
        monkeypatch.setattr(server.service, "submit", refuse)
        answer = server.http.post(TEXT, json=BODY)
    assert answer.status_code == 503
    assert "disk is full" in answer.json()["error"]["message"]
    assert answer.headers["retry-after"]
