"""Pressure on servers that are asked over HTTP, and what operators and clients do to requests.

Each story leaves the journal of its run in a folder. Times are those of a real clock, so who is
held and when may differ from one recording to the next; each story asks at its end for what it is
there to show.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import mlx.core as mx

from journal import events
from tests.integration.http_server import RunningServer, running
from tests.integration.kv_serving import ask, prompt, recorded, serving, wait_for
from tests.integration.test_http_clients import send
from tests.integration.test_pressure_held import Tight

PATH = "/v1/completions"
LONG: dict[str, Any] = {
    "model": "default",
    "prompt": "a prompt of more than one block: " * 10,
    "max_tokens": 10_000,
    "ignore_eos": True,
}
"""A request that runs until somebody ends it."""

TINY_CEILING_BYTES = 20_000_000
"""Several times what the tiny model and its rows need."""

SLOW: dict[str, Any] = {"fake": {"step_ms": 20}, "kv": {"memory_bytes": 0, "reserve_bytes": 0}}

PREFILL = Tight("prefilling", 352, 20, 610_000, {"reserve": "chunk"})
DECODE = Tight("decoding", 95, 165, 680_000, {"growth_tokens": 1})


class Uneventful(Exception):
    """What the story is for did not happen this time: it is to be played again."""


def expect(happened: bool, what: str) -> None:
    """Raises Uneventful where it did not."""
    if not happened:
        raise Uneventful(what)


def three_prompts(folder: Path, tight: Tight) -> None:
    """Three prompts under a ceiling for one and a half: all finish, and somebody was held."""
    groups = tight.groups(30_000)
    groups["kv"]["block_tokens"] = 64
    with running(folder, **groups) as server, ThreadPoolExecutor(3) as pool:
        answers = [pool.submit(server.http.post, PATH, json=tight.asked(n)) for n in range(3)]
        for answer in answers:
            answer.result().raise_for_status()
    assert len(recorded(folder, events.RequestFinished)) == 3
    pauses = recorded(folder, events.RequestPaused)
    expect(any(tight.is_in_phase(pause) for pause in pauses), f"nobody is held while {tight.phase}")


def held_in_prefill(folder: Path) -> None:
    """The fake engine, short of memory while prompts are fed."""
    three_prompts(folder, PREFILL)


def held_in_decode(folder: Path) -> None:
    """The fake engine, short of memory while outputs grow."""
    three_prompts(folder, DECODE)


def tiny_hybrid(folder: Path) -> None:
    """A model with layers that cannot be cut: something else takes the memory while it serves two
    requests, until the younger is held.
    """
    chunks = {"chunk_tokens": 16, "chunk_tokens_beside_rows": 16, "gap_ms": 0}
    marks = {"ceiling": TINY_CEILING_BYTES, "sample_ms": 20}
    with (
        serving(
            folder, "tiny-hybrid", scheduler=chunks, memory=marks, block_tokens=64, memory_bytes=0
        ) as server,
        ThreadPoolExecutor(2) as pool,
    ):
        asked = [pool.submit(ask, server, prompt(0, 40), 150)]
        wait_for(folder, events.TokensDecoded)
        asked.append(pool.submit(ask, server, prompt(1, 200), 60))
        wait_for(folder, events.BatchChanged, 2)
        others = mx.zeros((TINY_CEILING_BYTES * 98 // 100 - mx.get_active_memory(),), mx.uint8)
        mx.eval(others)
        wait_for(folder, events.RequestPaused)
        del others
        mx.clear_cache()
        for answer in asked:
            answer.result()
    held = [event.number for event in recorded(folder, events.RequestPaused)]
    expect(held == [2], f"held are {held}, not the younger alone")
    assert len(recorded(folder, events.RequestFinished)) == 2


def hold(server: RunningServer, request_id: str) -> None:
    """An operator has a request held, and sees it held."""
    server.http.post(f"/v1/requests/{request_id}/pause").raise_for_status()
    server.wait_for_phase("paused")


def held_by_hand(folder: Path) -> None:
    """Held and let go while it decodes, then held once more and cancelled."""
    with running(folder, **SLOW) as server:
        client = send(server, LONG, PATH)
        request_id = server.wait_for_phase("decoding")
        hold(server, request_id)
        server.http.post(f"/v1/requests/{request_id}/resume").raise_for_status()
        wait_for(folder, events.RequestResumed)
        server.wait_for_phase("decoding")
        hold(server, request_id)
        server.http.delete(f"/v1/requests/{request_id}").raise_for_status()
        server.wait_for_end(request_id)
        client.close()


def never_fits(folder: Path) -> None:
    """Refused with the numbers: an output that no memory could hold, and a prompt too long."""
    context_tokens = 60_000
    tight: dict[str, Any] = SLOW | {
        "memory": {"ceiling": "30MB"},
        "fake": {"context_tokens": context_tokens},
    }
    with running(folder, **tight) as server:
        for more in ({"max_tokens": 50_000}, {"prompt": "a" * (context_tokens + 1)}):
            assert server.http.post(PATH, json=LONG | more).status_code == 400
        short = LONG | {"max_tokens": 4}
        server.http.post(PATH, json=short).raise_for_status()
    assert len(recorded(folder, events.RequestRejected)) == 2


def client_gone_and_deadline(folder: Path) -> None:
    """One client leaves while its request is held, another while it decodes, and nobody comes for
    them; a third waits until its request is too old.
    """
    with running(folder, **SLOW, requests={"max_age_s": 3, "orphan_grace_s": 1}) as server:
        for is_held in (True, False):
            client = send(server, LONG | {"stream": True}, PATH)
            request_id = server.wait_for_phase("decoding")
            if is_held:
                hold(server, request_id)
            client.close()
            server.wait_for_end(request_id)
        assert server.http.post(PATH, json=LONG).status_code == 504
    ends = recorded(folder, events.RequestCancelled)
    assert [end.reason for end in ends] == ["client_gone", "client_gone", "deadline"]


STORIES: dict[str, Callable[[Path], None]] = {
    story.__name__: story
    for story in (
        held_in_prefill,
        held_in_decode,
        tiny_hybrid,
        held_by_hand,
        never_fits,
        client_gone_and_deadline,
    )
}
