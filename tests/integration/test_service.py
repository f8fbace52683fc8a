"""What HTTP sees of a run: streams, views, readiness."""

import asyncio
import threading
from pathlib import Path

import pytest

from scheduler.engine.fake import FakeEngine
from scheduler.engine.fake_row import Failure
from scheduler.engine.model import ModelDescription
from scheduler.run import Exit
from scheduler.service import Saturated, Service
from scheduler.state import SchedulerState
from scheduler.streams import Accepted
from tests.loop_driver import arrival_of, expected_tokens
from tests.run_driver import LIMIT_S, ScriptedSource, ready, serve, settings_in, whole


async def block_loop(service: Service) -> threading.Event:
    """Holds the loop's thread between two steps until the event that comes back is set."""
    entered, blocked = threading.Event(), threading.Event()

    def block(_: SchedulerState) -> None:
        entered.set()
        blocked.wait(LIMIT_S)

    service._run.ask(block)  # pyright: ignore[reportPrivateUsage]
    assert await asyncio.to_thread(entered.wait, LIMIT_S)
    return blocked


def test_requests_are_served_and_found_again(state_folder: Path) -> None:
    settings = settings_in(state_folder, requests__max_lingering=0)

    async def talk(service: Service) -> None:
        await ready(service)
        ids = [service.new_request_id() for _ in range(3)]
        streams = [service.submit(arrival_of(name, f"text {name}", 30)) for name in ids]
        assert [await stream.judged() for stream in streams] == [Accepted(30)] * 3
        for name, stream in zip(ids, streams, strict=True):
            assert (await whole(stream)).tokens == expected_tokens(f"text {name}", 30)
            found = await service.find(name)
            assert found is not None
            assert found is not stream, "it is rebuilt from the journal"
            assert (found.tokens, found.end) == (stream.tokens, stream.end)
            view = await service.view_request(name)
            assert view is not None
            assert (view.state, view.reason, view.num_output_tokens) == ("finished", "length", 30)
            events = await service.events(name, after_seq=0, limit=100)
            assert events[0]["kind"] == "request_received"
            assert events[-1]["kind"] == "kv_freed"
            later = await service.events(name, after_seq=events[0]["seq"], limit=1)  # pyright: ignore[reportArgumentType]
            assert later == events[1:2]
        assert await service.find("req_unknown") is None
        assert await service.view_request("req_unknown") is None
        assert service.metrics.requests_ended == {"finished:length": 3}

    assert serve(settings, talk) == Exit(0)


def test_a_view_is_of_one_boundary(state_folder: Path) -> None:
    settings = settings_in(state_folder, scheduler__max_rows=1, fake__turn_tokens=0)

    async def talk(service: Service) -> None:
        await ready(service)
        names = [service.new_request_id() for _ in range(2)]
        first, second = (service.submit(arrival_of(name, "hello", 100_000)) for name in names)
        await first.wait(5, None)
        await second.judged()
        view = await service.view()
        assert {request.id: request.state for request in view.requests} == {
            names[0]: "decoding",
            names[1]: "waiting",
        }
        decoding = view.requests[0]
        boundary = decoding.num_prompt_tokens + decoding.num_output_tokens - 1
        assert decoding.num_cached_tokens == boundary
        assert (view.num_admitted, view.num_waiting, view.batch_rows) == (1, 1, 1)
        assert view.reserved_bytes == decoding.reserved_bytes > 0
        alone = await service.view_request(names[1])
        assert alone is not None
        assert alone.state == "waiting"
        for name, stream in zip(names, (first, second), strict=True):
            service.cancel(name)
            assert (await whole(stream)).end is not None
        assert (await service.view()).requests == []

    assert serve(settings, talk) == Exit(0)


def test_it_says_why_it_is_not_ready(state_folder: Path) -> None:
    settings = settings_in(state_folder)
    released = threading.Event()

    async def talk(service: Service) -> None:
        assert service.readiness().reason == "model_loading"
        assert await service.served_model(0.001) is None
        assert service.run_id == 0
        released.set()
        await ready(service)
        assert service.run_id == 1
        stream = service.submit(arrival_of(service.new_request_id(), "hello", 2))
        await whole(stream)
        assert service.readiness().ready
        service.stop("now")
        assert service.readiness().reason == "server_stopping"
        with pytest.raises(Saturated, match="server_stopping"):
            service.submit(arrival_of(service.new_request_id(), "hello", 2))

    assert serve(settings, talk, ScriptedSource(settings, released=released)) == Exit(0)


def test_an_inbox_that_is_full_takes_no_more(state_folder: Path) -> None:
    settings = settings_in(state_folder, scheduler__max_inbox=1)

    async def talk(service: Service) -> None:
        await ready(service)
        blocked = await block_loop(service)
        first = service.submit(arrival_of(service.new_request_id(), "hello", 2))
        with pytest.raises(Saturated, match="inbox_full"):
            service.submit(arrival_of(service.new_request_id(), "hello", 2))
        blocked.set()
        assert (await whole(first)).end is not None

    assert serve(settings, talk) == Exit(0)


def test_failures_in_its_own_thread_are_retried(state_folder: Path) -> None:
    settings = settings_in(state_folder)

    class FailingSource(ScriptedSource):
        def make_engine(self, description: ModelDescription, nonce: int) -> FakeEngine:
            engine = super().make_engine(description, nonce)
            engine.failures = [Failure(1, "decode", at=4)]
            return engine

    async def talk(service: Service) -> None:
        await ready(service)
        stream = service.submit(arrival_of(service.new_request_id(), "hello", 50))
        assert (await whole(stream)).tokens == expected_tokens("hello", 50)
        assert service.metrics.retries == 1

    assert serve(settings, talk, FailingSource(settings)) == Exit(0)


def test_a_loop_that_does_not_go_on_is_not_ready(state_folder: Path) -> None:
    settings = settings_in(state_folder)

    async def talk(service: Service) -> None:
        await ready(service)
        await whole(service.submit(arrival_of(service.new_request_id(), "hello", 2)))
        run = service._run  # pyright: ignore[reportPrivateUsage]
        while (await service.view()).leaving_bytes:
            pass  # its row is being freed, which is one more step
        run.loop.last_step_ns = 0
        assert service.readiness().ready, "nothing waits"
        blocked = await block_loop(service)
        stream = service.submit(arrival_of(service.new_request_id(), "hello", 2))
        assert service.readiness().ready, "it has just come"
        run.sensors.waits_since_ns = 0
        readiness = service.readiness()
        assert readiness.work_waits
        assert readiness.reason.startswith("no step for ")
        assert readiness.last_step_age_ms > settings.server.ready_limit_ms
        blocked.set()
        await whole(stream)
        assert service.readiness().ready

    assert serve(settings, talk) == Exit(0)
