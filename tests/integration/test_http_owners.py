"""API keys of clients: each sees and touches its own requests, and of others not even that they are
there.
"""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from journal import events
from tests.integration.http_server import RunningServer, running
from tests.integration.kv_serving import recorded
from tests.integration.leaving import ASKED, SLOW, TEXT

OPERATOR, ONE, OTHER = "the operator's", "one client's", "another client's"
KEYS = {"api_key": OPERATOR, "client_keys": [ONE, OTHER]}


def with_key(key: str) -> dict[str, str]:
    """The header of who has this key."""
    return {"Authorization": f"Bearer {key}"}


@dataclass
class Owned:
    """A server with a request of one client, which is under way."""

    server: RunningServer
    request_id: str
    answer: Future[httpx.Response]

    def ask(self, key: str, method: str, path: str, **more: Any) -> httpx.Response:
        return self.server.http.request(method, path, headers=with_key(key), **more)


def wait_for(server: RunningServer, phase: str) -> str:
    """The id of the first request, once it is in this phase."""
    server.wait_until(lambda view: any(r.state == phase for r in view.requests))
    return server.view().requests[0].id


@contextmanager
def owned(folder: Path) -> Iterator[Owned]:
    """See `Owned`. The request is cancelled at the end, if it has not ended."""
    with running(folder, server=KEYS, **SLOW) as server, ThreadPoolExecutor(1) as pool:
        body = ASKED | {"max_tokens": 10_000}
        answer = pool.submit(server.http.post, TEXT, json=body, headers=with_key(ONE))
        request_id = wait_for(server, "decoding")
        found = Owned(server, request_id, answer)
        yield found
        found.ask(OPERATOR, "DELETE", f"/v1/requests/{request_id}").raise_for_status()


WAYS = [
    ("GET", ""),
    ("GET", "/events"),
    ("GET", "/stream"),
    ("GET", "/stream?after=1000000"),
    ("DELETE", ""),
    ("POST", "/pause"),
    ("POST", "/resume"),
]


def test_anothers_request_is_as_one_that_is_unknown(tmp_path: Path) -> None:
    unknown = "req_" + "0" * 26
    with owned(tmp_path) as found:
        for method, path in WAYS:
            theirs = found.ask(OTHER, method, f"/v1/requests/{found.request_id}{path}")
            nobodys = found.ask(OTHER, method, f"/v1/requests/{unknown}{path}")
            assert theirs.status_code == nobodys.status_code == 404, (method, path)
            assert theirs.text.replace(found.request_id, unknown) == nobodys.text
            assert theirs.headers.keys() == nobodys.headers.keys()
        shown = found.ask(ONE, "GET", f"/v1/requests/{found.request_id}").json()
        assert (shown["state"], shown["hold"]) == ("decoding", False), "nobody has touched it"
    kinds = {type(event) for event in recorded(tmp_path, events.Event)}
    assert not kinds & {events.HoldRequested, events.ReleaseRequested, events.ClientAttached}


@pytest.mark.parametrize("key", [ONE, OPERATOR])
def test_its_owner_and_the_operator_may_do_all(tmp_path: Path, key: str) -> None:
    with owned(tmp_path) as found:
        path = f"/v1/requests/{found.request_id}"
        assert found.ask(key, "GET", path).json()["id"] == found.request_id
        assert found.ask(key, "GET", f"{path}/events").json()["data"]
        assert found.ask(key, "POST", f"{path}/pause").json()["state"] == "paused"
        assert found.ask(key, "POST", f"{path}/resume").status_code == 200
        assert found.ask(key, "DELETE", path).json()["state"] == "cancelled"
        assert found.answer.result().status_code == 410
        stream = found.ask(key, "GET", f"{path}/stream")
        assert stream.status_code == 200
        assert found.ask(OTHER, "GET", f"{path}/stream").status_code == 404, (
            "also when it has ended"
        )
        assert found.ask(OTHER, "GET", path).status_code == 404


def test_the_list_is_of_ones_own(tmp_path: Path) -> None:
    with owned(tmp_path) as found:
        ids = {
            key: [entry["id"] for entry in found.ask(key, "GET", "/v1/requests").json()["data"]]
            for key in (OPERATOR, ONE, OTHER)
        }
        secrets = found.ask(OPERATOR, "GET", "/v1/requests").text
        assert "digest" not in secrets
        assert "joined" not in secrets
    assert ids == {OPERATOR: [found.request_id], ONE: [found.request_id], OTHER: []}


def test_nobody_hears_for_whom_it_waits(tmp_path: Path) -> None:
    groups: dict[str, Any] = SLOW | {"fake": {"prefill_tokens_per_s": 100}}
    with running(tmp_path, server=KEYS, **groups) as server, ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.http.post, TEXT, json=ASKED, headers=with_key(ONE))
        first_id = wait_for(server, "prefilling")
        second = pool.submit(server.http.post, TEXT, json=ASKED, headers=with_key(OTHER))
        server.wait_until(lambda view: any(r.wait and r.wait.request_id for r in view.requests))
        for path in ("/v1/requests", f"/v1/requests/{server.view().requests[1].id}"):
            assert first_id in server.http.get(path, headers=with_key(OPERATOR)).text
            answer = server.http.get(path, headers=with_key(OTHER))
            assert answer.status_code == 200
            assert "another is computing" in answer.text
            assert first_id not in answer.text
        for request in server.view().requests:
            path = f"/v1/requests/{request.id}"
            server.http.delete(path, headers=with_key(OPERATOR)).raise_for_status()
        assert [first.result().status_code, second.result().status_code] == [410, 410]


def test_only_the_operator_clears_the_cache(tmp_path: Path) -> None:
    with running(tmp_path, server=KEYS) as server:
        refused = server.http.post("/v1/cache/clear", headers=with_key(ONE))
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "operator_only"
        done = server.http.post("/v1/cache/clear", headers=with_key(OPERATOR))
        assert done.status_code in (200, 202)
        assert server.http.get("/v1/cache", headers=with_key(ONE)).status_code == 200


@pytest.mark.parametrize("headers", [{}, with_key("no"), with_key(ONE + "x"), {"x-api-key": ""}])
def test_a_key_that_is_none_of_them_is_refused(tmp_path: Path, headers: dict[str, str]) -> None:
    with running(tmp_path, server=KEYS) as server:
        assert server.http.get("/v1/requests", headers=headers).status_code == 401
        assert server.http.get("/health", headers=headers).status_code == 200
        for key in (OPERATOR, ONE, OTHER):
            assert server.http.get("/v1/requests", headers={"x-api-key": key}).status_code == 200


def test_equal_requests_of_two_clients_are_two(tmp_path: Path) -> None:
    body = ASKED | {"stream": True}
    key = {"Idempotency-Key": "k"}
    with running(tmp_path, server=KEYS, **SLOW) as server:
        with server.http.stream("POST", TEXT, json=body, headers=with_key(ONE)) as answer:
            lost = answer.headers["x-request-id"]
            wait_for(server, "decoding")
        server.wait_until(
            lambda view: all(r.wait and r.wait.reason == "client" for r in view.requests)
        )
        ids = [
            server.http.post(TEXT, json=ASKED, headers=headers).headers["x-request-id"]
            for headers in (
                with_key(OTHER),
                with_key(OTHER) | key,
                with_key(ONE) | key,
                with_key(ONE) | key,
                with_key(ONE),
            )
        ]
    assert len(set(ids[:3])) == 3
    assert ids[3] == ids[2]
    assert ids[4] == lost


def test_what_is_known_of_keys_is_kept_from_the_journal(tmp_path: Path) -> None:
    with running(tmp_path, server=KEYS) as server:
        server.http.post(TEXT, json=ASKED, headers=with_key(ONE)).raise_for_status()
        [started] = recorded(tmp_path, events.ServerStarted)
        kept = b"".join(path.read_bytes() for path in tmp_path.glob("journal.db*"))
    assert started.configuration["server.client_keys"] == 2
    for key in (OPERATOR, ONE, OTHER):
        assert key.encode() not in kept


def test_a_request_is_its_owners_after_a_restart(tmp_path: Path) -> None:
    with running(tmp_path, server=KEYS) as server:
        done = server.http.post(TEXT, json=ASKED, headers=with_key(ONE)).headers["x-request-id"]
    with running(tmp_path, server=KEYS) as server:
        server.wait_until(lambda view: view.engine_ready)
        for key, status in ((ONE, 200), (OPERATOR, 200), (OTHER, 404)):
            for path in ("", "/stream"):
                answer = server.http.get(f"/v1/requests/{done}{path}", headers=with_key(key))
                assert answer.status_code == status
