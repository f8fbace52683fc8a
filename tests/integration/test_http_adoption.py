"""Requests that are sent again after a cut, as agents do: without a word that they are the same."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from journal import events
from tests.integration.events import parse_stream
from tests.integration.http_server import RunningServer, running
from tests.integration.kv_serving import recorded
from tests.integration.leaving import (
    ASKED,
    CHAT,
    SLOW,
    TEXT,
    kinds,
    num_fed,
    sent_and_lost,
    shown,
    wait_until_aside,
)
from tests.integration.test_http_clients import send
from tests.integration.test_http_streams import request_id_of, text_of

MESSAGES: dict[str, Any] = {
    "model": "default",
    "messages": [
        {"role": "system", "content": "be brief " * 20},
        {"role": "user", "content": "a question of more than one block"},
    ],
    "max_tokens": 40,
    "seed": 3,
}


def streamed(server: RunningServer, body: dict[str, Any], path: str = TEXT) -> tuple[str, str]:
    """The id and the text of a streamed answer."""
    answer = server.http.post(path, json=body | {"stream": True})
    assert answer.status_code == 200, answer.text
    found = parse_stream(answer.text)
    assert found[-1].data == "[DONE]"
    assert request_id_of(found) == answer.headers["x-request-id"]
    return answer.headers["x-request-id"], text_of(found)


def whole(server: RunningServer, body: dict[str, Any], **headers: str) -> tuple[str, str]:
    """The id and the text of an answer in one object."""
    answer = server.http.post(TEXT, json=body, headers=headers)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    request_id = answer.headers["x-request-id"]
    assert found["id"] == "cmpl-" + request_id.removeprefix("req_")
    assert found["usage"]["completion_tokens"] == body["max_tokens"]
    return request_id, found["choices"][0]["text"]


def adopted(folder: Path) -> list[tuple[str, str]]:
    """Who was adopted, and by what it was known."""
    return [(event.request_id, event.by) for event in recorded(folder, events.RequestAdopted)]


@pytest.mark.parametrize(("was_stream", "is_stream"), [(False, True), (True, False)])
@pytest.mark.parametrize("phase", ["waiting", "prefilling", "decoding"])
def test_a_request_that_is_sent_again_gets_all_of_the_answer(
    tmp_path: Path, phase: str, was_stream: bool, is_stream: bool
) -> None:
    groups: dict[str, Any] = SLOW | {"scheduler": {"chunk_tokens": 32, "max_rows": 1}}
    with running(tmp_path, **groups) as server:
        before = None
        if phase == "waiting":
            before = send(server, ASKED | {"prompt": "the one before", "max_tokens": 10_000}, TEXT)
            server.wait_for_phase("decoding")
        lost = sent_and_lost(server, ASKED | {"stream": was_stream}, phase)
        if before is not None:
            before.close()
            server.wait_until(lambda view: view.num_admitted == 0)
        answer = (streamed if is_stream else whole)(server, ASKED)
        fed = num_fed(tmp_path)
        server.http.post("/v1/cache/clear").raise_for_status()
        undisturbed = whole(server, ASKED)
    assert answer[0] == lost
    assert answer[1] == undisturbed[1], "from its start to its end"
    assert undisturbed[0] != lost
    assert adopted(tmp_path) == [(lost, "content")]
    num_prompt = len(ASKED["prompt"])
    assert fed == num_prompt - 1 + (before is not None) * (len("the one before") - 1)


@pytest.mark.parametrize("wants", [False, True])
def test_the_answer_takes_the_form_that_is_asked_for_now(tmp_path: Path, wants: bool) -> None:
    with running(tmp_path, **SLOW) as server:
        options = {"stream_options": {"include_usage": not wants}}
        lost = sent_and_lost(server, MESSAGES | options | {"stream": True}, path=CHAT)
        created = json.loads(server.parameters(lost))["created"]
        raw = server.http.post(
            CHAT, json=MESSAGES | {"stream": True, "stream_options": {"include_usage": wants}}
        )
    found = parse_stream(raw.text)
    assert raw.headers["x-request-id"] == lost
    assert [event.data["id"] for event in found[:-1]] == [f"chatcmpl-{lost[4:]}"] * (len(found) - 1)
    assert {event.data["created"] for event in found[:-1]} == {created}
    assert [event.position for event in found] == sorted(e.position or 0 for e in found)
    counts = [event.data["usage"] for event in found[:-1] if event.data.get("usage")]
    assert len(counts) == wants


def test_agents_say_the_same_in_other_bytes(tmp_path: Path) -> None:
    with running(tmp_path, **SLOW) as server:
        asked = MESSAGES | {"metadata": {"try": "1"}, "user": "a", "stream": True}
        lost = sent_and_lost(server, asked, path=CHAT)
        mark = {"cache_control": {"type": "ephemeral"}}
        system, user = MESSAGES["messages"]
        block = {"text": user["content"], "type": "text"} | mark
        again = {
            "seed": 3,
            "max_tokens": 40,
            "messages": [
                mark | system | {"id": "msg_1"},
                {"content": [block], "role": "user", "id": "msg_2"},
            ],
            "prompt_cache_key": "p",
            "model": "default",
        }
        raw = server.http.post(CHAT, json=again)
        assert raw.json()["id"] == f"chatcmpl-{lost[4:]}"
    [joined] = recorded(tmp_path, events.RequestJoined)
    assert (joined.joined_id, joined.by) == (lost, "content")


def test_the_sdk_that_tries_again_adopts_its_own_request(tmp_path: Path) -> None:
    with running(tmp_path, **SLOW) as server:
        sdk = server.openai.with_options(max_retries=0)
        first = sdk.chat.completions.create(stream=True, **MESSAGES)
        shown_first = [next(first) for _ in range(4)]
        first.close()
        wait_until_aside(server, "req_" + shown_first[0].id.removeprefix("chatcmpl-"))
        second = [*sdk.chat.completions.create(stream=True, **MESSAGES)]
    assert {chunk.id for chunk in second} == {shown_first[0].id}
    texts = [
        "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        for chunks in (shown_first, second)
    ]
    assert texts[1].startswith(texts[0])
    assert second[-1].choices[0].finish_reason == "length"


def test_twins_that_have_their_clients_keep_their_own_answers(tmp_path: Path) -> None:
    with running(tmp_path, **SLOW) as server, ThreadPoolExecutor(2) as pool:
        twins = [pool.submit(whole, server, ASKED) for _ in range(2)]
        server.wait_for_phase("decoding", 2)
        found = [twin.result() for twin in twins]
    assert found[0][0] != found[1][0]
    assert found[0][1] == found[1][1]
    assert adopted(tmp_path) == []


def test_one_orphan_has_one_adopter(tmp_path: Path) -> None:
    with running(tmp_path, **SLOW) as server, ThreadPoolExecutor(3) as pool:
        lost = sent_and_lost(server, ASKED)
        tries = [pool.submit(whole, server, ASKED) for _ in range(3)]
        found = [attempt.result() for attempt in tries]
    assert [request_id for request_id, _ in found].count(lost) == 1
    assert len({request_id for request_id, _ in found}) == 3
    assert len({text for _, text in found}) == 1
    assert adopted(tmp_path) == [(lost, "content")]


def test_an_adopted_request_may_be_lost_and_adopted_again(tmp_path: Path) -> None:
    with running(tmp_path, **SLOW) as server:
        lost = sent_and_lost(server, ASKED)
        for _ in range(2):
            connection = send(server, ASKED | {"stream": True}, TEXT)
            server.wait_until(lambda _: shown(server, lost)["state"] == "decoding")
            connection.close()
            wait_until_aside(server, lost)
        assert whole(server, ASKED)[0] == lost
    assert adopted(tmp_path) == [(lost, "content")] * 3


def test_what_was_cancelled_is_never_adopted(tmp_path: Path) -> None:
    with running(tmp_path, **SLOW) as server:
        lost = sent_and_lost(server, ASKED)
        assert server.http.delete(f"/v1/requests/{lost}").json()["state"] == "cancelled"
        assert whole(server, ASKED)[0] != lost
    assert adopted(tmp_path) == []


OTHERS: dict[str, tuple[dict[str, Any], dict[str, str], dict[str, str]]] = {
    "other words": (ASKED | {"prompt": ASKED["prompt"] + "."}, {}, {}),
    "other sampling": (ASKED | {"temperature": 0.5}, {}, {}),
    "other session": (ASKED, {"session-id": "one"}, {"session-id": "two"}),
    "no session": (ASKED, {"x-session-id": "one"}, {}),
    "other key": (ASKED, {"authorization": "Bearer a"}, {"authorization": "Bearer b"}),
    "unknown field": (ASKED | {"reasoning_effort": "high"}, {}, {}),
}


@pytest.mark.parametrize("what", OTHERS)
def test_another_request_adopts_nothing(tmp_path: Path, what: str) -> None:
    again, headers_before, headers = OTHERS[what]
    with running(tmp_path, **SLOW) as server:
        with server.http.stream(
            "POST", TEXT, json=ASKED | {"stream": True}, headers=headers_before
        ) as answer:
            lost = answer.headers["x-request-id"]
            server.wait_for_phase("decoding")
        wait_until_aside(server, lost)
        assert whole(server, again, **headers)[0] != lost
        assert shown(server, lost)["has_client"] is False
        assert whole(server, ASKED, **headers_before)[0] == lost


def test_adoption_can_be_switched_off(tmp_path: Path) -> None:
    with running(tmp_path, requests={"adopt": False}, **SLOW) as server:
        lost = sent_and_lost(server, ASKED)
        assert whole(server, ASKED)[0] != lost
        assert shown(server, lost)["has_client"] is False


def test_the_journal_and_the_routes_say_who_adopted_what(tmp_path: Path) -> None:
    with running(tmp_path, **SLOW) as server:
        lost = sent_and_lost(server, ASKED | {"max_tokens": 10_000})
        body = ASKED | {"max_tokens": 10_000, "stream": True}
        with server.http.stream("POST", TEXT, json=body) as answer:
            assert answer.headers["x-request-id"] == lost
            [joined] = recorded(tmp_path, events.RequestJoined)
            adopter = joined.request_id
            assert kinds(server, adopter)[-1] == "request_joined"
            assert "request_adopted" in kinds(server, lost)
            # The one that was sent again stands for the one that answers.
            assert shown(server, adopter)["id"] == lost
            path = f"/v1/requests/{adopter}"
            assert server.http.post(f"{path}/pause").json()["id"] == lost
            assert shown(server, lost)["state"] == "paused"
            assert server.http.post(f"{path}/resume").json()["id"] == lost
            with server.http.stream("GET", f"{path}/stream?after=0") as reader:
                assert reader.headers["x-request-id"] == lost
            ended = server.http.delete(path).json()
            assert (ended["id"], ended["state"]) == (lost, "cancelled")
            assert answer.read().endswith(b"\n\n")
        assert (
            server.http.get(f"/v1/requests/{adopter}/stream").text.count("request_cancelled") == 1
        )
        samples = server.samples()
        assert samples["fermata_adoptions_total,content"] == 1
        assert samples["fermata_orphans"] == 0
        assert samples["fermata_requests_received_total"] == 2


def test_an_adopter_that_leaves_before_it_hears_of_it_is_missed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with running(tmp_path, **SLOW) as server:
        lost = sent_and_lost(server, ASKED)
        hub = server.service._hub  # pyright: ignore[reportPrivateUsage]
        held: list[Any] = []
        deliver = hub.call_soon
        assert deliver is not None
        monkeypatch.setattr(hub, "call_soon", held.append)
        connection = send(server, ASKED | {"stream": True}, TEXT)
        server.wait_until(lambda _: bool(recorded(tmp_path, events.RequestJoined)))
        assert shown(server, lost)["has_client"] is True, "so it was decided"
        [joined] = recorded(tmp_path, events.RequestJoined)
        connection.close()
        server.wait_until(lambda _: hub.open[joined.request_id].num_clients == 0)
        monkeypatch.setattr(hub, "call_soon", deliver)
        for call in held:
            deliver(call)
        wait_until_aside(server, lost)
        assert whole(server, ASKED)[0] == lost


def test_a_request_that_was_lost_while_nobody_could_hear_is_adopted_when_it_has_finished(
    tmp_path: Path,
) -> None:
    """Two ways to its answer: its stream is in memory, or the journal has it."""
    for name, lingering in (("kept", 8), ("read", 0)):
        folder = tmp_path / name
        groups: dict[str, Any] = SLOW | {"requests": {"max_lingering": lingering}}
        body = ASKED | {"max_tokens": 60}
        with running(folder, server={"drain_limit_ms": 0}, **groups) as server:
            connection = send(server, body, TEXT)
            lost = server.wait_for_phase("decoding")
            server.begin_stop()
            server.join()
            connection.close()
        with running(folder, **groups) as server:
            assert server.wait_for_end(lost)["state"] == "finished"
            assert shown(server, lost)["has_client"] is False
            adopter, text = whole(server, body)
            assert adopter == lost
            rest = parse_stream(server.http.get(f"/v1/requests/{lost}/stream").text)
            assert text_of(rest) == text
            assert whole(server, body)[0] != lost, "only once"
        [event] = recorded(folder, events.RequestAdopted)
        assert (event.orphaned_by, event.num_output_tokens) == ("restart", 60)


def test_a_request_waits_on_hold_after_a_start_and_goes_on_with_its_adopter(tmp_path: Path) -> None:
    groups: dict[str, Any] = SLOW | {"requests": {"on_restart": "hold"}}
    with running(tmp_path, server={"drain_limit_ms": 0}, **groups) as server:
        connection = send(server, ASKED, TEXT)
        lost = server.wait_for_phase("decoding")
        server.begin_stop()
        server.join()
        connection.close()
    with running(tmp_path, **groups) as server:
        wait_until_aside(server, lost)
        found = shown(server, lost)
        assert (found["orphaned_by"], found["has_client"]) == ("restart", False)
        assert streamed(server, ASKED)[0] == lost
        assert shown(server, lost)["state"] == "finished"


@pytest.mark.parametrize("after", [None, 3])
def test_whoever_takes_up_a_request_again_is_its_client(tmp_path: Path, after: int | None) -> None:
    with running(tmp_path, **SLOW) as server:
        lost = sent_and_lost(server, ASKED)
        query = "" if after is None else f"?after={after}"
        text = server.http.get(f"/v1/requests/{lost}/stream{query}").text
        assert parse_stream(text)[-1].data == "[DONE]"
        assert shown(server, lost)["state"] == "finished"
    assert adopted(tmp_path) == []
    assert [e.request_id for e in recorded(tmp_path, events.ClientAttached)] == [lost]


def test_on_restart_cancel_is_told_to_who_comes_back(tmp_path: Path) -> None:
    groups: dict[str, Any] = SLOW | {"requests": {"on_restart": "cancel"}}
    with running(tmp_path, server={"drain_limit_ms": 0}, **groups) as server:
        connection = send(server, ASKED, TEXT)
        lost = server.wait_for_phase("decoding")
        server.begin_stop()
        server.join()
        connection.close()
    with running(tmp_path, **groups) as server:
        ended = server.wait_for_end(lost)
        assert (ended["state"], ended["reason"]) == ("cancelled", "on_restart")
        last = parse_stream(server.http.get(f"/v1/requests/{lost}/stream").text)[-1]
        assert last.data["error"]["code"] == "request_cancelled"
        assert last.data["error"]["reason"] == "on_restart"
        assert whole(server, ASKED)[0] != lost
