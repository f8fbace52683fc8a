"""SIGKILL of the server under its clients: each way to come back gives the same answer."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from journal import events
from journal.reader import JournalReader
from tests.integration.events import Event, parse_event, parse_stream
from tests.integration.http_server import TIMEOUT_S
from tests.integration.kv_serving import BLOCK_TOKENS, prompt, recorded, serving
from tests.integration.test_http_streams import text_of
from tools.server_process import ServerProcess

pytestmark = pytest.mark.crash

TEXT = "/v1/completions"
KEY = {"Idempotency-Key": "mine"}


@contextmanager
def served(folder: Path, model: str, settings: dict[str, str]) -> Iterator[httpx.Client]:
    """One life of a real server, which is killed at the end."""
    server = ServerProcess(model, folder, settings)
    try:
        with httpx.Client(base_url=server.address(), timeout=TIMEOUT_S) as client:
            yield client
            server.kill()
    finally:
        server.close()


def cut_after(folder: Path, model: str, settings: dict[str, str], *asked: Any) -> list[list[Event]]:
    """What each client has got of its stream, when all have some events and the server is killed.

    `asked` are the arguments of each POST.
    """
    with ExitStack() as last:
        client = last.enter_context(served(folder, model, settings))
        answers = [last.enter_context(client.stream("POST", **post)) for post in asked]
        lines = [answer.iter_lines() for answer in answers]
        return [first_events(found, 12) for found in lines]


def first_events(lines: Iterator[str], count: int) -> list[Event]:
    """The first events of a stream that have a position."""
    found: list[Event] = []
    block: list[str] = []
    for line in lines:
        if line:
            block.append(line)
            continue
        event = parse_event("\n".join(block))
        block.clear()
        if event.position is not None:
            found.append(event)
        if len(found) == count:
            return found
    raise AssertionError("the stream has ended")


def asked(word: str, **headers: str) -> dict[str, Any]:
    """A POST that asks for a stream."""
    body = {"model": "default", "prompt": f"{word} " * 30, "max_tokens": 60, "ignore_eos": True}
    return {"url": TEXT, "json": body | {"stream": True}, "headers": headers}


def text_in_journal(folder: Path, request_id: str) -> str:
    """What the fake model has put out, of whose tokens each is a byte."""
    with JournalReader.open(folder) as reader:
        tokens, _ = reader.output_tokens(request_id)
    assert len(tokens) == 60
    return bytes(tokens.tolist()).decode(errors="replace")


def id_of(event: Event) -> str:
    """The request's own id."""
    return "req_" + event.data["id"].partition("-")[2]


def sent_again(client: httpx.Client, post: dict[str, Any], seen: list[Event]) -> str:
    """The whole answer, from the same request."""
    again = parse_stream(client.request("POST", **post).text)
    assert {event.data["id"] for event in again[:-1]} == {seen[0].data["id"]}
    return text_of(again)


def sent_again_whole(client: httpx.Client, post: dict[str, Any], seen: list[Event]) -> str:
    """The same, in one object."""
    answer = client.post(TEXT, json=post["json"] | {"stream": False}).json()
    assert answer["id"] == seen[0].data["id"]
    return answer["choices"][0]["text"]


def taken_up(client: httpx.Client, post: dict[str, Any], seen: list[Event]) -> str:
    """What was seen, and what comes after it."""
    path = f"/v1/requests/{id_of(seen[0])}/stream?after={seen[-1].position}"
    return text_of(seen) + text_of(parse_stream(client.get(path).text))


Way = Callable[[httpx.Client, dict[str, Any], list[Event]], str]


def test_each_way_to_come_back_gives_the_same_answer(tmp_path: Path) -> None:
    ways: dict[str, tuple[Way, dict[str, str]]] = {
        "stream": (sent_again, {}),
        "whole": (sent_again_whole, {}),
        "position": (taken_up, {}),
        "key": (sent_again, KEY),
    }
    posts = {word: asked(word, **headers) for word, (_, headers) in ways.items()}
    settings = {"FERMATA_FAKE__STEP_MS": "20", "FERMATA_MEMORY__CEILING": "none"}
    seen = dict(zip(posts, cut_after(tmp_path, "fake", settings, *posts.values()), strict=True))
    with served(tmp_path, "fake", settings) as client:
        for word, (way, _) in ways.items():
            text = way(client, posts[word], seen[word])
            assert text.startswith(text_of(seen[word])), "what was sent stays as it was"
            assert text == text_in_journal(tmp_path, id_of(seen[word][0]))
    adopted = recorded(tmp_path, events.RequestAdopted)
    assert sorted(event.by for event in adopted) == ["content", "content", "key"]
    # A connection that is cut right before the server dies may still have been seen as lost.
    assert {event.orphaned_by for event in adopted} <= {"restart", "client_gone"}
    assert len(recorded(tmp_path, events.RequestReceived)) == 7


@pytest.mark.engine
@pytest.mark.timeout(120)
def test_an_adopted_answer_of_a_real_model_is_the_undisturbed_one_to_the_last_bit(
    tmp_path: Path,
) -> None:
    body = {
        "model": "default",
        "prompt": prompt(6, 200),
        "max_tokens": 60,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": 5,
        "logprobs": 3,
    }
    settings = {
        "FERMATA_ENGINE__BLAS": "stock",
        "FERMATA_KV__BLOCK_TOKENS": str(BLOCK_TOKENS),
        "FERMATA_KV__RESERVE_BYTES": "0",
        "FERMATA_MEMORY__CEILING": "none",
    }
    with serving(tmp_path / "undisturbed", "tiny-hybrid", enabled=False) as server:
        [expected] = server.http.post(TEXT, json=body).json()["choices"]
    folder = tmp_path / "killed"
    post = {"url": TEXT, "json": body | {"stream": True}}
    [seen] = cut_after(folder, "tiny-hybrid", settings, post)
    assert (seen[-1].position or 0) < 60
    with served(folder, "tiny-hybrid", settings) as client:
        answer = client.post(TEXT, json=body).json()
        assert answer["id"] == seen[0].data["id"]
        assert answer["choices"] == [expected]
        again = parse_stream(client.get(f"/v1/requests/{id_of(seen[0])}/stream").text)
    assert text_of(again).startswith(text_of(seen))
    assert text_of(again) == expected["text"]
    assert joined_logprobs(again) == expected["logprobs"]


def joined_logprobs(found: list[Event]) -> dict[str, list[Any]]:
    """The log-probabilities of all events, as one answer has them."""
    parts = [e.data["choices"][0]["logprobs"] for e in found if e.data != "[DONE]"]
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    return {name: [value for part in parts if part for value in part[name]] for name in names}
