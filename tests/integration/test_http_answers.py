"""Answers on both routes: with the real client, and read strictly from the wire."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.integration.events import check_object, stream
from tests.integration.http_server import RunningServer, running

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO: list[Any] = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(tmp_path_factory.mktemp("answers")) as server:
        yield server


def test_chat_is_the_same_whole_and_streamed(server: RunningServer) -> None:
    asked: dict[str, Any] = {"model": "default", "messages": HELLO, "max_tokens": 40, "seed": 1}
    whole = server.openai.chat.completions.create(**asked)
    chunks = list(
        server.openai.chat.completions.create(
            **asked, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    assert len(text) >= 38
    assert whole.choices[0].finish_reason == "length"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert whole.usage is not None
    assert whole.usage == chunks[-1].usage
    assert whole.usage.completion_tokens == 40
    assert whole.usage.prompt_tokens_details is not None
    assert whole.usage.prompt_tokens_details.cached_tokens == 0
    assert whole.model == "fake"


def test_completion_is_the_same_whole_and_streamed(server: RunningServer) -> None:
    asked: dict[str, Any] = {"model": "fake", "prompt": "once", "max_tokens": 40, "seed": 1}
    whole = server.openai.completions.create(**asked)
    chunks = list(server.openai.completions.create(**asked, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.prompt_tokens == 4
    assert all(chunk.usage is None for chunk in chunks)


def test_token_ids_are_the_same_prompt_as_their_text(server: RunningServer) -> None:
    answers = [
        server.openai.completions.create(model="fake", prompt=prompt, max_tokens=12)
        for prompt in ("once", [*b"once"], ["once"], [[*b"once"]])
    ]
    assert len({answer.choices[0].text for answer in answers}) == 1


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_every_event_is_what_the_model_of_openai_says(server: RunningServer, path: str) -> None:
    asked = (
        {"messages": HELLO, "logprobs": True, "top_logprobs": 3}
        if path == CHAT
        else {"prompt": "once", "logprobs": 3}
    )
    body = {"model": "default", "max_tokens": 20, **asked}
    events = stream(server.http, path, body | {"stream_options": {"include_usage": True}})
    assert events[0].position == 0
    assert events[0].text == ""
    assert events[-1].data == "[DONE]"
    assert events[-2].data["usage"]["completion_tokens"] == 20
    assert events[-3].data["choices"][0]["finish_reason"] == "length"
    assert {event.position for event in events[-3:]} == {20}
    assert all("usage" in event.data for event in events[:-1])
    answer = server.http.post(path, json=body)
    check_object(answer.json())
    assert answer.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_at_most_one_event_of_an_id_carries_text(server: RunningServer, path: str) -> None:
    asked = {"messages": HELLO} if path == CHAT else {"prompt": "once"}
    events = stream(server.http, path, {"model": "default", "max_tokens": 64, **asked})
    positions = [event.position for event in events if event.text]
    assert len(positions) == len(set(positions))
    assert positions == sorted(positions, key=lambda position: position or 0)
    # é is two tokens; no event shows a half of it.
    text = "".join(event.text for event in events)
    assert text.count("é") == 4
    assert "\ufffd" not in text


def test_logprobs_of_a_stream_are_those_of_the_whole_answer(server: RunningServer) -> None:
    body: dict[str, Any] = {
        "model": "default",
        "messages": HELLO,
        "max_tokens": 20,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = server.http.post(CHAT, json=body).json()["choices"][0]["logprobs"]["content"]
    events = stream(server.http, CHAT, body)
    streamed = [
        token
        for event in events
        if event.data != "[DONE]" and event.data["choices"][0]["logprobs"]
        for token in event.data["choices"][0]["logprobs"]["content"]
    ]
    assert streamed == whole
    assert len(whole) == 20
    assert {len(token["top_logprobs"]) for token in whole} == {2}


def test_a_stop_string_ends_the_answer_and_is_not_shown(server: RunningServer) -> None:
    asked: dict[str, Any] = {"model": "default", "messages": HELLO, "max_tokens": 64}
    text = server.openai.chat.completions.create(**asked).choices[0].message.content
    assert text is not None
    stop = text[20:23]
    events = stream(server.http, CHAT, asked | {"stop": [stop, "never there"]})
    assert "".join(event.text for event in events) == text[: text.index(stop)]
    finish = [e.data["choices"][0]["finish_reason"] for e in events[:-1]]
    assert finish[-1] == "stop"


def test_content_in_blocks_is_the_same_as_a_string(server: RunningServer) -> None:
    blocks = [{"type": "text", "text": "hello", "cache_control": {"type": "ephemeral"}}]
    answers = [
        server.http.post(
            CHAT, json={"model": "default", "max_tokens": 8, "messages": messages}
        ).json()
        for messages in (HELLO, [{"role": "user", "content": blocks, "id": "item_1"}])
    ]
    assert len({answer["choices"][0]["message"]["content"] for answer in answers}) == 1
    assert len({answer["usage"]["prompt_tokens"] for answer in answers}) == 1


def test_system_messages_may_stand_anywhere(server: RunningServer) -> None:
    answer = server.openai.chat.completions.create(
        model="claude-something",
        max_tokens=4,
        messages=[
            {"role": "system", "content": "a"},
            {"role": "user", "content": "b"},
            {"role": "developer", "content": "c"},
            {"role": "system", "content": "d"},
            {"role": "user", "content": "e"},
        ],
    )
    assert answer.model == "fake"
    assert answer.choices[0].finish_reason == "length"


def test_newer_name_of_max_tokens_wins(server: RunningServer) -> None:
    answer = server.openai.chat.completions.create(
        model="default", messages=HELLO, max_tokens=9, max_completion_tokens=3
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 3
