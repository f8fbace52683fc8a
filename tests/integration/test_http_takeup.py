"""Streams that are taken up again where that cannot be: past their end, too late, another's."""

import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.events import parse_stream
from tests.integration.http_server import RunningServer, running
from tests.integration.leaving import ASKED, SLOW, TEXT, shown
from tests.integration.test_http_streams import text_of


def take_up(
    server: RunningServer, request_id: str, *, after: object = None, last: object = None
) -> httpx.Response:
    """The rest of an answer."""
    query = "" if after is None else f"?after={after}"
    headers = {} if last is None else {"Last-Event-ID": str(last)}
    return server.http.get(f"/v1/requests/{request_id}/stream{query}", headers=headers)


def error_of(answer: httpx.Response, status: int) -> dict[str, Any]:
    """The error that an answer is."""
    assert answer.status_code == status, answer.text
    return answer.json()["error"]


@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize("where", ["after", "last"])
def test_a_position_past_the_end_is_refused_with_both_numbers(
    tmp_path: Path, where: str, is_open: bool
) -> None:
    with running(tmp_path, **SLOW) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(server.http.post, TEXT, json=ASKED)
        request_id = server.wait_for_phase("decoding")
        if is_open:
            held = server.http.post(f"/v1/requests/{request_id}/pause").json()
            assert held["state"] == "paused"
        else:
            first.result()
        has = shown(server, request_id)["num_output_tokens"]
        error = error_of(take_up(server, request_id, **{where: has + 1}), 400)
        assert error["code"] == "position_past_end"
        assert error["param"] == {"after": "after", "last": "Last-Event-ID"}[where]
        assert (error["position"], error["num_output_tokens"]) == (has + 1, has)
        assert str(has) in error["message"]
        assert str(has + 1) in error["message"]
        assert ("so far" in error["message"]) == is_open
        assert shown(server, request_id)["has_client"] == is_open, "it has changed nothing"
        server.http.post(f"/v1/requests/{request_id}/resume")
        rest = take_up(server, request_id, **{where: has})
        assert parse_stream(rest.text)[-1].data == "[DONE]"
        first.result()


@pytest.mark.parametrize("last", ["-1", "x", "1.5", "9" * 30, "", "1 2", "x" * 10_000])
def test_a_header_that_is_no_position_is_refused(tmp_path: Path, last: str) -> None:
    with running(tmp_path) as server:
        error = error_of(take_up(server, "req_none", last=last), 400)
        assert error["param"] == "Last-Event-ID"
        assert len(error["message"]) < 300


def test_two_positions_must_be_the_same(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        request_id = server.http.post(TEXT, json=ASKED).headers["x-request-id"]
        error = error_of(take_up(server, request_id, after=3, last=4), 400)
        assert error["param"] == "after"
        assert "3" in error["message"]
        assert "4" in error["message"]
        assert take_up(server, request_id, after=3, last=3).status_code == 200
        assert error_of(take_up(server, request_id, after=3, last="x"), 400)["param"] == (
            "Last-Event-ID"
        )


def test_what_is_gone_what_never_was_and_what_has_no_answer_are_told_apart(tmp_path: Path) -> None:
    purged = {"retention_s": 0, "max_lingering": 0}
    with running(tmp_path, requests=purged, journal={"upkeep_s": 1}) as server:
        request_id = server.http.post(TEXT, json=ASKED).headers["x-request-id"]
        server.wait_until(lambda _: take_up(server, request_id).status_code == 410)
        gone = error_of(take_up(server, request_id, after=3), 410)
        assert gone["code"] == "answer_expired"
        assert "retention" in gone["message"]
        assert shown(server, request_id)["state"] == "finished", "that much is still known"
        unknown = error_of(take_up(server, "req_" + "0" * 26), 404)
        assert unknown["code"] == "request_not_found"
        refused = server.http.post(TEXT, json=ASKED | {"max_tokens": 10**6})
        assert refused.status_code == 400
        none = error_of(take_up(server, refused.headers["x-request-id"]), 404)
        assert none["code"] == "no_answer"


def test_many_readers_each_at_its_own_position(tmp_path: Path) -> None:
    body = ASKED | {"max_tokens": 60}
    with running(tmp_path, **SLOW) as server, ThreadPoolExecutor(12) as pool:
        first = pool.submit(server.http.post, TEXT, json=body)
        request_id = server.wait_for_phase("decoding")
        server.wait_until(lambda _: shown(server, request_id)["num_output_tokens"] >= 10)
        readers = {
            after: pool.submit(take_up, server, request_id, after=after) for after in range(11)
        }
        texts = {after: text_of(parse_stream(r.result().text)) for after, r in readers.items()}
        whole = first.result().json()["choices"][0]["text"]
        assert texts[0] == whole
        for after, text in texts.items():
            assert whole.endswith(text)
            assert text == text_of(parse_stream(take_up(server, request_id, after=after).text))


def answer_to(server: RunningServer, start: str) -> bytes:
    """What the server says to a head that begins like this and does not end, before it closes."""
    with socket.create_connection(server.listener.getsockname(), timeout=20) as connection:
        connection.sendall(start.encode())
        with suppress(BrokenPipeError, ConnectionResetError):
            for _ in range(100):
                connection.sendall(b"x" * 10_000)
        return connection.recv(1_000)


def test_a_head_that_is_too_large_is_refused(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        for headers in (
            {f"x-{i}": "v" * 1_000 for i in range(80)},
            {"x-large": "v" * 100_000},
            {"x-huge": "v" * 2_000_000},
        ):
            with httpx.Client(base_url=server.url, timeout=20) as client:
                try:
                    answer = client.post(TEXT, json=ASKED, headers=headers)
                except (httpx.WriteError, httpx.ReadError):
                    continue  # it was cut while it was still being sent
            error = error_of(answer, 431)
            assert error["code"] == "headers_too_large"
        for start in ("GET /", f"GET {TEXT} HTTP/1.1\r\nx-endless: "):
            assert answer_to(server, start).startswith(b"HTTP/1.1 431 ")
        kept = server.http.post(TEXT, json=ASKED, headers={"x-large": "v" * 60_000})
        assert kept.status_code == 200
        assert server.service.metrics.requests_received == 1
