"""What clients get wrong: refused by the field's name, and the server is none the worse for it."""

import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.integration.http_server import RunningServer, running

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}

BAD_CHATS: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"messages": None}, "messages"),
    ({"messages": "hello"}, "messages"),
    ({"messages": [{"role": "system", "content": "a"}]}, "messages"),
    ({"messages": [{"role": "user", "content": ""}]}, "messages[0].content"),
    ({"messages": [{"role": "user"}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": []}]}, "messages[0].content"),
    ({"messages": [{"role": "user", "content": 7}]}, "messages[0].content"),
    ({"messages": [*HELLO, {"role": "wizard", "content": "a"}]}, "messages[1].role"),
    ({"messages": [{"content": "a"}]}, "messages[0].role"),
    ({"messages": [{"role": "user", "content": [IMAGE]}]}, "messages[0].content[0]"),
    (
        {"messages": [{"role": "user", "content": [{"type": "hologram"}]}]},
        "messages[0].content[0].type",
    ),
    (
        {"messages": [{"role": "user", "content": [{"type": "text"}]}]},
        "messages[0].content[0].text",
    ),
    ({"max_tokens": 0}, "max_tokens"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"max_tokens": 1.5}, "max_tokens"),
    ({"max_tokens": True}, "max_tokens"),
    ({"max_tokens": 2**70}, "max_tokens"),
    ({"max_completion_tokens": "9"}, "max_completion_tokens"),
    ({"temperature": -1}, "temperature"),
    ({"temperature": 1e9}, "temperature"),
    ({"temperature": "hot"}, "temperature"),
    ({"top_p": 1.5}, "top_p"),
    ({"min_p": -0.5}, "min_p"),
    ({"top_k": -2}, "top_k"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": 3}, "presence_penalty"),
    ({"frequency_penalty": -3}, "frequency_penalty"),
    ({"logit_bias": {"5": 101}}, "logit_bias"),
    ({"logit_bias": {"five": 1}}, "logit_bias"),
    ({"logit_bias": {"99999": 1}}, "logit_bias"),
    ({"stop": [f"stop {i}" for i in range(100)]}, "stop"),
    ({"stop": [""]}, "stop[0]"),
    ({"stop": [1]}, "stop[0]"),
    ({"stop": "s" * 1000}, "stop[0]"),
    ({"seed": 2**64}, "seed"),
    ({"n": 2}, "n"),
    ({"top_logprobs": 3}, "top_logprobs"),
    ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ({"logprobs": 3}, "logprobs"),
    ({"stream": "yes"}, "stream"),
    ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
    ({"tools": {"type": "function"}}, "tools"),
    ({"tools": [{"type": "function"}]}, "tools[0].function"),
    ({"response_format": {"type": "json_object"}}, "response_format.type"),
    ({"model": 7}, "model"),
    ({"model": ""}, "model"),
]

BAD_COMPLETIONS: list[tuple[dict[str, Any], str]] = [
    ({"prompt": ""}, "prompt"),
    ({"prompt": []}, "prompt"),
    ({"prompt": None}, "prompt"),
    ({"prompt": ["a", "b"]}, "prompt"),
    ({"prompt": [[1], [2]]}, "prompt"),
    ({"prompt": [1, "b"]}, "prompt"),
    ({"prompt": [1, 99_999]}, "prompt[1]"),
    ({"prompt": [-1]}, "prompt[0]"),
    ({"prompt": [1.5]}, "prompt[0]"),
    ({"best_of": 2}, "best_of"),
    ({"n": 0}, "n"),
    ({"echo": True}, "echo"),
    ({"suffix": "b"}, "suffix"),
    ({"logprobs": 21}, "logprobs"),
]

BROKEN_BODIES: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b"{", None),
    (b"[]", None),
    (b'"text"', None),
    (b"{" * 100_000, None),
    (b'{"model": "default"}', "messages"),
    (b'{"messages": [{"role": "user", "content": "a"}]}', "model"),
    (b'{"model": "default", "temperature": NaN}', "temperature"),
    (b'{"model": "default", "temperature": -Infinity}', "temperature"),
    (b'{"model": "default", "temperature": 1e999}', "temperature"),
    (b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}', "messages[0].content"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "messages[0].content"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(
        tmp_path_factory.mktemp("bad_input"), server={"body_limit_bytes": 2**20}
    ) as server:
        yield server
        assert server.service.metrics.requests_received == 0
        answer = server.openai.completions.create(model="default", prompt="a", max_tokens=1)
        assert answer.choices[0].finish_reason == "length"


def refusal(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    """The error object of an answer, in OpenAI's shape."""
    assert answer.status_code == status, answer.text
    body = answer.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert {"message", "type", "param", "code"} <= set(error)
    return error


@pytest.mark.parametrize(("change", "param"), BAD_CHATS)
def test_bad_chat_names_the_field(
    server: RunningServer, change: dict[str, Any], param: str
) -> None:
    answer = server.http.post(CHAT, json={"model": "default", "messages": HELLO, **change})
    error = refusal(answer)
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]
    assert answer.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize(("change", "param"), BAD_COMPLETIONS)
def test_bad_completion_names_the_field(
    server: RunningServer, change: dict[str, Any], param: str
) -> None:
    answer = server.http.post(TEXT, json={"model": "default", "prompt": "a", **change})
    error = refusal(answer)
    assert error["param"] == param
    assert param in error["message"]


@pytest.mark.parametrize(("body", "param"), BROKEN_BODIES)
def test_broken_body_is_refused(server: RunningServer, body: bytes, param: str | None) -> None:
    error = refusal(server.http.post(CHAT, content=body))
    assert error["param"] == param
    assert error["message"]


def test_unknown_model_is_not_found(server: RunningServer) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        server.openai.chat.completions.create(model="gpt-9", messages=HELLO)
    assert raised.value.code == "model_not_found"
    assert raised.value.param == "model"


def test_body_over_the_limit_is_refused_without_reading_it(server: RunningServer) -> None:
    prompt = "a" * 20_000_000
    answer = server.http.post(TEXT, json={"model": "default", "prompt": prompt})
    error = refusal(answer, 413)
    assert error["param"] == "body"
    assert "1048576" in error["message"]


def test_body_over_the_limit_in_chunks_is_refused(server: RunningServer) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"model": "default", "prompt": "'
        for _ in range(300):
            yield b"a" * 10_000

    answer = server.http.post(TEXT, content=chunks())
    assert refusal(answer, 413)["code"] == "body_too_large"


@pytest.mark.parametrize("length", ["-5", "many", "1, 2"])
def test_bad_content_length_is_refused(server: RunningServer, length: str) -> None:
    head = f"POST {TEXT} HTTP/1.1\r\nHost: a\r\nContent-Length: {length}\r\n\r\n"
    with socket.create_connection(server.listener.getsockname(), timeout=10) as connection:
        connection.sendall(head.encode())
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "malformed_http"


def test_unknown_paths_and_methods_are_errors_of_the_same_shape(server: RunningServer) -> None:
    assert refusal(server.http.get("/v1/nothing"), 404)["code"] == "not_found"
    answer = server.http.put(CHAT)
    assert refusal(answer, 405)["code"] == "method_not_allowed"
    assert answer.headers["allow"] == "POST"


def test_messages_of_errors_are_bounded(server: RunningServer) -> None:
    body = {"model": "m" * 1000, "messages": HELLO}
    assert len(refusal(server.http.post(CHAT, json=body), 404)["message"]) < 300
    body = {"model": "default", "messages": [{"role": "r" * 100_000, "content": "a"}]}
    assert len(refusal(server.http.post(CHAT, json=body))["message"]) < 300
