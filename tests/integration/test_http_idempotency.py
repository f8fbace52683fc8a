"""Idempotency-Key: a request that is sent again with its key is the one that holds it."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from journal import events
from scheduler.history import History
from tests.integration.events import parse_stream
from tests.integration.http_server import RunningServer, running
from tests.integration.kv_serving import recorded
from tests.integration.leaving import ASKED, CHAT, SLOW, TEXT, shown, wait_for_orphan
from tests.integration.test_http_streams import text_of

KEY = {"Idempotency-Key": "a key of mine"}


def post(
    server: RunningServer, body: dict[str, Any] = ASKED, headers: dict[str, str] = KEY
) -> httpx.Response:
    """A POST with a key, whole or as a stream."""
    return server.http.post(TEXT, json=body, headers=headers)


def text_in(answer: httpx.Response) -> str:
    """The text of an answer in either form."""
    assert answer.status_code == 200, answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        return text_of(parse_stream(answer.text))
    return answer.json()["choices"][0]["text"]


def run_on(server: RunningServer, request_id: str) -> None:
    """It decodes."""


def hold(server: RunningServer, request_id: str) -> None:
    """It is held by hand."""
    held = server.http.post(f"/v1/requests/{request_id}/pause")
    assert held.json()["state"] == "paused"


def let_finish(server: RunningServer, request_id: str) -> None:
    """It has finished."""
    server.wait_for_end(request_id)


@pytest.mark.parametrize("was_stream", [False, True])
@pytest.mark.parametrize("meanwhile", [run_on, hold, let_finish])
def test_the_key_attaches_to_the_request_that_holds_it(
    tmp_path: Path, meanwhile: Callable[[RunningServer, str], None], was_stream: bool
) -> None:
    with running(tmp_path, **SLOW) as server, ThreadPoolExecutor(2) as pool:
        first = pool.submit(post, server, ASKED | {"stream": was_stream})
        request_id = server.wait_for_phase("decoding")
        meanwhile(server, request_id)
        second = pool.submit(post, server, ASKED | {"stream": not was_stream})
        server.wait_until(lambda _: len(recorded(tmp_path, events.RequestJoined)) == 1)
        server.http.post(f"/v1/requests/{request_id}/resume")
        answers = first.result(), second.result()
        assert text_in(answers[0]) == text_in(answers[1])
        assert [a.headers["x-request-id"] for a in answers] == [request_id] * 2
        found = shown(server, request_id)
        assert (found["state"], found["keyed"]) == ("finished", True)
        assert server.samples()["fermata_adoptions_total,key"] == 1
    assert len(recorded(tmp_path, events.RequestAdmitted)) == 1, "it is computed once"


def test_a_request_with_a_key_runs_on_without_its_client(tmp_path: Path) -> None:
    with running(tmp_path, **SLOW) as server:
        body = ASKED | {"stream": True}
        with server.http.stream("POST", TEXT, json=body, headers=KEY) as answer:
            request_id = answer.headers["x-request-id"]
            server.wait_for_phase("decoding")
        wait_for_orphan(server, request_id)
        running_on = shown(server, request_id)
        assert running_on["state"] == "decoding" or running_on["num_output_tokens"] == 40
        assert running_on["wait"] is None
        other = server.http.post(TEXT, json=ASKED)
        assert other.headers["x-request-id"] != request_id, "it is nobody's without its key"
        server.wait_for_end(request_id)
        assert text_in(post(server)) == text_in(other)
        assert text_in(post(server)) == text_in(other), "as often as it is asked for"


def test_the_key_is_known_after_a_restart(tmp_path: Path) -> None:
    long = ASKED | {"max_tokens": 60}
    with running(tmp_path, server={"drain_limit_ms": 0}, **SLOW) as server:
        done = post(server, headers={"Idempotency-Key": "done"})
        with ThreadPoolExecutor(1) as pool:
            cut = pool.submit(post, server, long)
            request_id = server.wait_for_phase("decoding")
            server.begin_stop()
            assert cut.result().status_code == 503
        server.join()
    with running(tmp_path, **SLOW) as server:
        again = post(server, headers={"Idempotency-Key": "done"})
        assert again.headers["x-request-id"] == done.headers["x-request-id"]
        assert again.json() == done.json(), "to the last field"
        assert post(server, long).headers["x-request-id"] == request_id
        assert len(recorded(tmp_path, events.RequestAdmitted, run_id=2)) <= 1
        refused = post(server, long | {"seed": 4})
        assert refused.status_code == 422


@pytest.mark.parametrize("is_done", [False, True])
def test_the_same_key_with_another_body_is_refused(tmp_path: Path, is_done: bool) -> None:
    with running(tmp_path, **SLOW) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, server)
        request_id = server.wait_for_phase("decoding")
        if is_done:
            server.wait_for_end(request_id)
        refused = post(server, ASKED | {"prompt": "another"})
        assert refused.status_code == 422
        error = refused.json()["error"]
        assert (error["code"], error["retryable"]) == ("idempotency_key_reused", False)
        assert refused.headers["x-should-retry"] == "false"
        assert refused.headers["x-request-id"] != request_id
        assert first.result().status_code == 200
        assert server.samples()["fermata_requests_ended_total,rejected,key_reused"] == 1
    assert len(recorded(tmp_path, events.RequestAdopted)) == 0


@pytest.mark.parametrize("key", [b"", b"k" * 10_240, "kéy".encode(), b"a\tb"])
def test_a_key_that_cannot_be_used_is_refused(tmp_path: Path, key: bytes) -> None:
    with running(tmp_path) as server:
        headers = httpx.Headers([(b"Idempotency-Key", key)])
        answer = server.http.post(TEXT, json=ASKED, headers=headers)
        assert answer.status_code == 400
        error = answer.json()["error"]
        assert (error["param"], error["code"]) == ("Idempotency-Key", "invalid_idempotency_key")
        assert len(answer.content) < 1_000
        assert server.service.metrics.requests_received == 0


def test_a_key_belongs_to_its_route_and_its_api_key(tmp_path: Path) -> None:
    chat = {"model": "default", "max_tokens": 2, "messages": [{"role": "user", "content": "a"}]}
    with running(tmp_path) as server:
        answers = [
            post(server),
            server.http.post(CHAT, json=chat, headers=KEY),
            post(server, headers=KEY | {"authorization": "Bearer one"}),
            post(server, ASKED | {"seed": 1}, KEY | {"authorization": "Bearer two"}),
        ]
    assert [answer.status_code for answer in answers] == [200] * 4
    assert len({answer.headers["x-request-id"] for answer in answers}) == 4


def test_what_was_cancelled_gives_its_key_up(tmp_path: Path) -> None:
    with running(tmp_path, **SLOW) as server, ThreadPoolExecutor(1) as pool:
        first = pool.submit(post, server)
        request_id = server.wait_for_phase("decoding")
        server.http.delete(f"/v1/requests/{request_id}").raise_for_status()
        assert first.result().status_code == 410
        again = post(server, ASKED | {"seed": 5})
        assert again.status_code == 200
        assert again.headers["x-request-id"] != request_id


def test_a_key_is_free_again_when_nothing_is_kept(tmp_path: Path) -> None:
    with running(tmp_path, requests={"retention_s": 0}) as server:
        first, second = post(server), post(server, ASKED | {"seed": 4})
        assert (first.status_code, second.status_code) == (200, 200)
        assert first.headers["x-request-id"] != second.headers["x-request-id"]


def test_an_answer_that_is_purged_in_this_very_moment_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, requests={"max_lingering": 0}) as server:
        request_id = post(server).headers["x-request-id"]
        monkeypatch.setattr(History, "stream", lambda *_: None)
        refused = post(server)
        assert refused.status_code == 503
        error = refused.json()["error"]
        assert (error["code"], error["retryable"]) == ("answer_expired", True)
        assert refused.headers["retry-after"]
        assert refused.headers["x-request-id"] == request_id


def test_the_key_and_the_question_are_in_the_journal_as_digests_alone(tmp_path: Path) -> None:
    with running(tmp_path) as server:
        post(server, headers=KEY | {"authorization": "Bearer a secret", "session-id": "my session"})
        [received] = recorded(tmp_path, events.RequestReceived)
        kept = b"".join(path.read_bytes() for path in tmp_path.glob("journal.db*"))
    digests = (
        received.content_digest,
        received.session_digest,
        received.key_digest,
        received.owner_digest,
    )
    assert [len(digest) for digest in digests] == [64] * 4
    for word in (b"a key of mine", b"a secret", b"my session"):
        assert word not in kept
