"""Streams are read by position, by any number of readers, and end once."""

import asyncio
from collections.abc import Callable

import pytest

from journal.events import RequestRejected
from scheduler.engine.base import TokenLogprobs
from scheduler.parameters import RequestParameters, SamplingParameters
from scheduler.streams import (
    Accepted,
    Judgement,
    Rejected,
    RequestStream,
    StreamCut,
    StreamEnd,
    StreamHub,
)

PARAMETERS = RequestParameters(
    route="completions",
    model="fake",
    created=7,
    stream=True,
    sampling=SamplingParameters(seed=1),
)
END = StreamEnd("finished", "length", "", 3, 2)


def stream_of(request_id: str = "req_a") -> RequestStream:
    return RequestStream(request_id, PARAMETERS, num_prompt_tokens=3)


def send(hub: StreamHub, request_id: str, *tokens: int, end: StreamEnd | None = None) -> None:
    """One step that brings this to one stream."""
    update = hub.update(request_id)
    update.token_ids, update.end = tokens, end
    hub.flush()


def test_readers_follow_at_their_own_positions() -> None:
    hub = StreamHub(max_lingering=8)
    stream = stream_of()
    hub.add(stream)

    async def read(after: int) -> list[int]:
        seen: list[int] = []
        while True:
            await stream.wait(after + len(seen), timeout_s=None)
            seen += stream.tokens[after + len(seen) :]
            if stream.end is not None:
                return seen

    async def serve() -> list[list[int]]:
        readers = [asyncio.create_task(read(after)) for after in (0, 1, 2)]
        await asyncio.sleep(0)
        send(hub, "req_a", 10)
        await asyncio.sleep(0)
        send(hub, "req_a", 11, end=END)
        return await asyncio.gather(*readers)

    assert asyncio.run(serve()) == [[10, 11], [11], []]
    assert not stream.waiters


def test_a_wait_ends_at_its_timeout() -> None:
    stream = stream_of()
    stream.tokens.append(1)

    async def read() -> None:
        await stream.wait(0, timeout_s=None)
        await stream.wait(1, timeout_s=0.001)

    asyncio.run(read())
    assert not stream.has_news(1)
    assert not stream.waiters


def test_one_call_per_step_whatever_it_brings() -> None:
    hub = StreamHub(max_lingering=8)
    streams = [stream_of(f"req_{i}") for i in range(3)]
    for stream in streams:
        hub.add(stream)
    calls: list[Callable[[], None]] = []
    hub.call_soon = calls.append
    for stream in streams:
        hub.update(stream.request_id).token_ids = (5,)
        hub.update(stream.request_id).end = END
    hub.flush()
    hub.flush()
    assert len(calls) == 1
    assert not streams[0].tokens, "nothing is touched before the asyncio thread's turn"
    calls[0]()
    assert [(stream.tokens, stream.end) for stream in streams] == [([5], END)] * 3


def test_an_answer_is_awaited() -> None:
    hub = StreamHub(max_lingering=8)
    rejected = Rejected(
        RequestRejected(request_id="req_b", reason="queue_full", numbers=None, num_waiting=9)
    )

    async def answers() -> list[Judgement]:
        taken, refused = stream_of("req_a"), stream_of("req_b")
        hub.add(taken)
        hub.add(refused)
        waiting = [asyncio.create_task(stream.judged()) for stream in (taken, refused)]
        await asyncio.sleep(0)
        hub.update("req_a").judgement = Accepted(max_tokens=4)
        hub.update("req_b").judgement = rejected
        hub.flush()
        return list(await asyncio.gather(*waiting))

    assert asyncio.run(answers()) == [Accepted(max_tokens=4), rejected]
    assert hub.find("req_a") is not None
    assert hub.find("req_b") is None, "a refused request leaves no stream"


def test_a_stop_cuts_streams_without_an_end() -> None:
    hub = StreamHub(max_lingering=8)
    judged, waiting = stream_of("req_a"), stream_of("req_b")
    judged.judgement = Accepted(4)
    hub.add(judged)
    hub.add(waiting)

    async def stop() -> None:
        answer = asyncio.create_task(waiting.judged())
        await asyncio.sleep(0)
        hub.cut_all()
        await judged.wait(0, timeout_s=None)
        with pytest.raises(StreamCut):
            await answer

    asyncio.run(stop())
    assert judged.cut
    assert judged.end is None


def test_a_request_that_ends_before_its_answer_has_none() -> None:
    hub = StreamHub(max_lingering=8)
    stream = stream_of()
    hub.add(stream)
    hub.update("req_a").end = StreamEnd("cancelled", "client_gone", "", 3, 0)
    hub.flush()
    with pytest.raises(StreamCut):
        asyncio.run(stream.judged())


def test_ended_streams_stay_for_late_readers_up_to_a_bound() -> None:
    hub = StreamHub(max_lingering=2)
    for name in "abc":
        hub.add(stream_of(name))
        send(hub, name, 1, end=END)
    assert hub.find("a") is None
    assert hub.find("b") is not None
    assert hub.find("c") is not None
    assert not hub.open


def test_ended_streams_stay_as_long_as_answers_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]
    monkeypatch.setattr("scheduler.streams.time.monotonic_ns", lambda: now[0])
    hub = StreamHub(max_lingering=8)
    hub.retention_ns = 10
    for moment, name in ((1, "a"), (5, "b")):
        now[0] = moment
        hub.add(stream_of(name))
        send(hub, name, 1, end=END)
    now[0] = 10
    assert hub.find("a") is not None
    now[0] = 11
    assert hub.find("a") is None
    assert hub.find("b") is not None
    now[0] = 15
    assert hub.find("b") is None
    assert not hub.ended


def test_nothing_follows_an_end() -> None:
    stream = stream_of()
    hub = StreamHub(max_lingering=8)
    hub.add(stream)
    send(hub, "req_a", 1, end=END)
    send(hub, "req_a", 2)
    assert stream.tokens == [1], "an update for a stream that is not open is dropped"
    with pytest.raises(AssertionError):
        stream.apply(hub.update("req_a"))


def test_log_probabilities_run_beside_the_tokens() -> None:
    hub = StreamHub(max_lingering=8)
    stream = stream_of()
    hub.add(stream)
    values = [TokenLogprobs(-0.5, ((1, -0.5),)), TokenLogprobs(-1.0, ())]
    for token, value in enumerate(values):
        update = hub.update("req_a")
        update.token_ids, update.logprobs = (token,), (value,)
        hub.flush()
    assert stream.tokens == [0, 1]
    assert stream.logprobs == values
