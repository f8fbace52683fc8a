"""Streams that are taken up again: by position, live and ended, after a stop; heartbeats; cuts."""

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.events import Event, parse_event, parse_stream, stream
from tests.integration.http_server import RunningServer, running

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
ASKED: dict[str, Any] = {"model": "default", "max_tokens": 40, "seed": 3}
PROMPTS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hello"}]},
    TEXT: {"prompt": "once"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with running(tmp_path_factory.mktemp("streams")) as server:
        yield server


def resumed(server: RunningServer, request_id: str, after: int | None) -> list[Event]:
    """The stream of a request, taken up after a position."""
    query = "" if after is None else f"?after={after}"
    answer = server.http.get(f"/v1/requests/{request_id}/stream{query}")
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-request-id"] == request_id
    return parse_stream(answer.text)


def text_of(events: list[Event]) -> str:
    """All that they show."""
    return "".join(event.text for event in events)


def request_id_of(events: list[Event]) -> str:
    """The request's own id, from the first event."""
    return "req_" + events[0].data["id"].partition("-")[2]


def shown_by(tokens: list[int], stop: str) -> str:
    """What these tokens of the fake model (bytes) may show while more can follow: no half
    character, and no end that begins the stop string.
    """
    text = bytes(tokens).decode(errors="ignore")
    held = max(n for n in range(len(stop)) if text.endswith(stop[:n]))
    return text[: len(text) - held]


def tokens_of(server: RunningServer, request_id: str) -> list[int]:
    """The output tokens of an ended request, as the scheduler has them."""
    found = asyncio.run_coroutine_threadsafe(server.service.find(request_id), server.loop)
    ended = found.result(10)
    assert ended is not None
    return ended.tokens


def assert_goes_on_after_every_position(
    server: RunningServer, request_id: str, stop: str, num_tokens: int
) -> None:
    """Each event shows what its id says, and what comes after N begins where N ended."""
    tokens = tokens_of(server, request_id)
    assert len(tokens) == num_tokens
    whole = text_of(resumed(server, request_id, None))
    assert whole == bytes(tokens).decode(errors="replace")
    for after in range(num_tokens + 1):
        rest = resumed(server, request_id, after)
        seen = whole if after >= num_tokens else shown_by(tokens[:after], stop)
        for event in rest:
            seen += event.text
            assert event.is_heartbeat or (event.position or 0) >= min(after, num_tokens)
            if event.text and event.position != num_tokens:
                assert event.position is not None
                assert event.position > after
                assert seen == shown_by(tokens[: event.position], stop)
        assert seen == whole
        assert rest[-1].data == "[DONE]"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_ended_stream_goes_on_after_every_position(tmp_path: Path, path: str) -> None:
    with running(tmp_path) as server:
        first = stream(server.http, path, ASKED | PROMPTS[path])
        # A stop string whose beginning comes, and whose end does not, holds text back.
        stop = text_of(first)[18:21] + " never"
        events = stream(server.http, path, ASKED | PROMPTS[path] | {"stop": stop})
        assert text_of(events) == text_of(first)
        assert not {18, 19, 20} <= {event.position for event in events}
        assert_goes_on_after_every_position(server, request_id_of(events), stop, 40)


def test_stream_goes_on_from_the_journal_after_a_restart(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        body = ASKED | PROMPTS[CHAT] | {"logprobs": True, "stop": ["none of it"]}
        events = stream(server.http, CHAT, body)
        request_id = request_id_of(events)
    with running(tmp_path) as server:
        assert_goes_on_after_every_position(server, request_id, "none of it", 40)
        again = resumed(server, request_id, None)
        assert again[0] == events[0]
        assert again[-2:] == events[-2:]
        assert logprobs_of(again) == logprobs_of(events)
        assert len(logprobs_of(again)) == 40


def logprobs_of(events: list[Event]) -> list[Any]:
    """All tokens' log-probabilities that the events carry."""
    choices = [event.data["choices"][0] for event in events if event.data != "[DONE]"]
    return [token for choice in choices for token in (choice["logprobs"] or {}).get("content", [])]


def test_last_event_id_is_the_same_as_after(server: RunningServer) -> None:
    request_id = request_id_of(stream(server.http, TEXT, ASKED | PROMPTS[TEXT]))
    path = f"/v1/requests/{request_id}/stream"
    by_header = server.http.get(path, headers={"Last-Event-ID": "17"})
    assert parse_stream(by_header.text) == resumed(server, request_id, 17)


@pytest.mark.parametrize("after", ["-1", "x", "1.5", "9" * 30, ""])
def test_what_is_no_position_is_refused(server: RunningServer, after: str) -> None:
    answer = server.http.get(f"/v1/requests/req_none/stream?after={after}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "after"


def test_stream_of_an_unknown_request_is_not_found(server: RunningServer) -> None:
    answer = server.http.get("/v1/requests/req_none/stream")
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "request_not_found"


def test_readers_of_a_live_stream_come_and_go(tmp_path: Path) -> None:
    with running(tmp_path, fake={"step_ms": 10}) as server:
        asked = ASKED | PROMPTS[CHAT] | {"stream": True}
        with server.http.stream("POST", CHAT, json=asked) as answer:
            lines = answer.iter_lines()
            request_id = answer.headers["x-request-id"]
            assert next(lines) == "id: 0"
            with server.http.stream("GET", f"/v1/requests/{request_id}/stream") as reader:
                assert next(reader.iter_lines()) == "id: 0"
            # That reader has left in the middle; another reads all of it beside the first.
            other = resumed(server, request_id, 0)
            events = parse_stream("id: 0\n" + "\n".join(lines) + "\n")
        assert text_of(other) == text_of(events)
        assert other[-1].data == "[DONE]"
        finish = [event.data["choices"][0]["finish_reason"] for event in events[:-1]]
        assert finish[-1] == "length"


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_silence_is_filled_with_events_that_carry_no_id(tmp_path: Path, path: str) -> None:
    slow = {"prefill_tokens_per_s": 20}
    with running(tmp_path, fake=slow, server={"heartbeat_ms": 100}) as server:
        events = stream(server.http, path, ASKED | PROMPTS[path] | {"max_tokens": 2})
        beats = [event for event in events if event.is_heartbeat]
        assert beats
        assert {event.data["id"] for event in beats} == {events[0].data["id"]}
        assert all(beat.data["choices"][0]["finish_reason"] is None for beat in beats)


def test_heartbeats_may_be_comments_or_off(tmp_path: Path) -> None:
    slow = {"prefill_tokens_per_s": 20}
    asked = ASKED | PROMPTS[TEXT] | {"max_tokens": 2, "stream": True, "prompt": "a longer one"}
    server_settings = {"heartbeat_ms": 100, "heartbeat_form": "comment"}
    with running(tmp_path / "comment", fake=slow, server=server_settings) as server:
        text = server.http.post(TEXT, json=asked).text
        assert ": heartbeat\n\n" in text
        parse_stream(text.replace(": heartbeat\n\n", ""))
    server_settings = {"heartbeat_ms": 100, "heartbeat_form": "off"}
    with running(tmp_path / "off", fake=slow, server=server_settings) as server:
        events = parse_stream(server.http.post(TEXT, json=asked).text)
        assert not any(event.is_heartbeat for event in events)


def read_until_cut(server: RunningServer, body: dict[str, Any]) -> tuple[str, str]:
    """The id and the text of a streamed answer that the server cuts, as it must: it is told to stop
    after five tokens.
    """
    lines: list[str] = []
    with server.http.stream("POST", TEXT, json=body | {"stream": True}) as answer:
        try:
            for line in answer.iter_lines():
                lines.append(line)
                if line == "id: 5":
                    server.begin_stop()
        except httpx.RemoteProtocolError:
            return answer.headers["x-request-id"], "\n".join(lines)
    raise AssertionError("the stream ended properly")


def test_stop_cuts_the_socket_and_the_next_start_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with running(tmp_path, fake={"step_ms": 20}, server={"drain_limit_ms": 0}) as server:
        request_id, text = read_until_cut(server, ASKED | PROMPTS[TEXT])
        server.join()
    assert caplog.records == []
    events = [parse_event(block) for block in text.rstrip("\n").split("\n\n")]
    assert all(event.data["choices"][0]["finish_reason"] is None for event in events)
    position = events[-1].position
    assert position is not None
    with running(tmp_path) as server:
        rest = resumed(server, request_id, position)
        whole = bytes(tokens_of(server, request_id)).decode(errors="replace")
        assert text_of(events) + text_of(rest) == whole
        assert rest[-1].data == "[DONE]"
        journaled = server.http.get(f"/v1/requests/{request_id}/events").json()["data"]
        assert not {"client_gone", "request_cancelled"} & {event["kind"] for event in journaled}


def test_whole_answer_that_a_stop_comes_before_is_a_503(tmp_path: Path) -> None:
    with running(tmp_path, fake={"step_ms": 20}, server={"drain_limit_ms": 0}) as server:
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(server.http.post, TEXT, json=ASKED | PROMPTS[TEXT])
            server.wait_for_phase("decoding")
            server.begin_stop()
            refused = answer.result()
        server.join()
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "server_is_overloaded"
    assert refused.headers["retry-after"]
