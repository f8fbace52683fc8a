"""A whole run in its threads: how it starts, stops and fails, and what HTTP sees of it."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from journal.errors import JournalBroken, JournalFull, JournalLocked
from journal.journal import Journal
from scheduler.engine.fake import Failure, FakeEngine, FakeSource
from scheduler.engine.model import ModelDescription, ModelError
from scheduler.run import Exit
from scheduler.service import Saturated, Service
from scheduler.settings import Settings
from scheduler.streams import Accepted, RequestStream
from scheduler.wiring import build
from tests.loop_driver import arrival_of, expected_tokens, settings_of

LIMIT_S = 20


@dataclass(frozen=True)
class ScriptedSource:
    """The fake model, with what a test wants to go wrong."""

    settings: Settings
    model_error: str | None = None
    load_error: str | None = None
    released: threading.Event | None = None

    def describe(self) -> ModelDescription:
        if self.released is not None:
            assert self.released.wait(LIMIT_S)
        if self.model_error is not None:
            raise ModelError(self.model_error)
        return FakeSource(self.settings.fake).describe()

    def make_engine(self, description: ModelDescription, nonce: int) -> FakeEngine:
        del nonce
        return FakeEngine(description.facts, 1, self.settings.fake, load_error=self.load_error)


def serve(
    settings: Settings,
    talk: Callable[[Service], Awaitable[None]],
    source: ScriptedSource | None = None,
) -> Exit:
    """A run from start to end, with `talk` as its HTTP side; a stop follows it."""

    async def main() -> Exit:
        service = build(settings, source or ScriptedSource(settings))
        service.start()
        await talk(service)
        service.stop("the test is over")
        return await service.ended()

    async def limited() -> Exit:
        return await asyncio.wait_for(main(), LIMIT_S)

    return asyncio.run(limited())


def settings_in(folder: Path, **overrides: object) -> Settings:
    return settings_of(state=folder, **overrides)


async def ready(service: Service) -> None:
    """Waits until requests can be counted."""
    assert await service.served_model(LIMIT_S) is not None


async def whole(stream: RequestStream) -> RequestStream:
    """Reads a stream to its end or its cut."""
    while stream.end is None and not stream.cut:
        await stream.wait(len(stream.tokens), None)
    return stream


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
        blocked = threading.Event()
        asked = asyncio.ensure_future(service._ask(lambda _: blocked.wait(LIMIT_S)))  # pyright: ignore[reportPrivateUsage]
        await asyncio.sleep(0)
        first = service.submit(arrival_of(service.new_request_id(), "hello", 2))
        with pytest.raises(Saturated, match="inbox_full"):
            service.submit(arrival_of(service.new_request_id(), "hello", 2))
        blocked.set()
        await asked
        assert (await whole(first)).end is not None

    assert serve(settings, talk) == Exit(0)


def test_a_clean_stop_lets_rows_come_to_their_end(state_folder: Path) -> None:
    settings = settings_in(state_folder)

    async def talk(service: Service) -> None:
        await ready(service)
        stream = service.submit(arrival_of(service.new_request_id(), "hello", 200))
        await stream.wait(3, None)
        service.stop("SIGTERM")
        assert (await whole(stream)).end is not None
        assert len(stream.tokens) == 200

    assert serve(settings, talk) == Exit(0)


@pytest.mark.parametrize("at_once", [True, False])
def test_what_a_stop_does_not_wait_for_goes_on_at_the_next_start(
    state_folder: Path, at_once: bool
) -> None:
    limit_ms = 10_000 if at_once else 1
    settings = settings_in(
        state_folder, server__drain_limit_ms=limit_ms, fake__turn_tokens=0, scheduler__max_rows=1
    )
    names: list[str] = []
    sent: list[list[int]] = []

    async def before(service: Service) -> None:
        await ready(service)
        names.extend(service.new_request_id() for _ in range(2))
        streams = [service.submit(arrival_of(name, "hello", 20_000)) for name in names]
        await streams[0].wait(3, None)
        await streams[1].judged()
        service.stop("SIGTERM")
        if at_once:
            service.stop("SIGTERM")
        assert (await service.ended()) == Exit(0)
        assert all(stream.cut and stream.end is None for stream in streams)
        sent.extend(stream.tokens for stream in streams)

    async def after(service: Service) -> None:
        await ready(service)
        for name, tokens in zip(names, sent, strict=True):
            stream = await service.find(name)
            assert stream is not None
            await stream.wait(len(tokens), None)
            assert stream.tokens[: len(tokens)] == tokens
            view = await service.view_request(name)
            assert view is not None
            assert view.deaths == 0 or at_once
            service.cancel(name)
            await whole(stream)

    assert serve(settings, before) == Exit(0)
    assert serve(settings, after) == Exit(0)


def test_a_model_that_cannot_be_had_is_status_2(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    source = ScriptedSource(settings, model_error="no such folder: name another with --model")

    async def talk(service: Service) -> None:
        await service.ended()

    assert serve(settings, talk, source) == Exit(2, "no such folder: name another with --model")


def test_weights_that_cannot_be_loaded_are_status_2(state_folder: Path) -> None:
    settings = settings_in(state_folder)

    async def talk(service: Service) -> None:
        await service.ended()

    outcome = serve(settings, talk, ScriptedSource(settings, load_error="half of it is missing"))
    assert outcome.status == 2
    assert "half of it is missing" in outcome.message


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_dead_engine_ends_the_process_and_charges_its_requests(
    state_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_in(state_folder)
    name = "req_" + "0" * 26

    async def before(service: Service) -> None:
        await ready(service)
        stream = service.submit(arrival_of(name, "hello", 200))
        await stream.wait(3, None)
        with monkeypatch.context() as context:
            context.setattr(FakeEngine, "launch", lambda _: 1 // 0)
            assert (await service.ended()).status == 4
        assert stream.cut

    async def after(service: Service) -> None:
        await ready(service)
        view = await service.view_request(name)
        assert view is not None
        stream = await service.find(name)
        assert stream is not None
        assert len((await whole(stream)).tokens) == 200
        row = await service.view_request(name)
        assert row is not None
        assert row.deaths == 1

    outcome = serve(settings, before)
    assert outcome.status == 4
    assert "ZeroDivisionError" in outcome.message
    assert serve(settings, after) == Exit(0)


def test_a_broken_journal_is_status_3(state_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_in(state_folder)

    async def talk(service: Service) -> None:
        await ready(service)
        stream = service.submit(arrival_of(service.new_request_id(), "hello", 200))
        await stream.wait(3, None)

        def broken(*_: object, **__: object) -> None:
            raise JournalBroken("input/output error")

        monkeypatch.setattr(Journal, "commit", broken)
        await service.ended()
        assert stream.cut
        assert stream.end is None

    assert serve(settings, talk) == Exit(3, "input/output error")


def test_a_full_disk_is_waited_for(state_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_in(state_folder, journal__full_wait_ms=1)

    async def talk(service: Service) -> None:
        await ready(service)
        stream = service.submit(arrival_of(service.new_request_id(), "hello", 200))
        await stream.wait(3, None)
        was_full = threading.Event()
        with monkeypatch.context() as context:

            def full(*_: object, **__: object) -> None:
                was_full.set()
                raise JournalFull("no space")

            context.setattr(Journal, "commit", full)
            assert await asyncio.to_thread(was_full.wait, LIMIT_S)
            assert (await service.view()).requests, "questions are answered between two tries"
            assert service.readiness().reason == "journal_full"
            with pytest.raises(Saturated, match="journal_full"):
                service.submit(arrival_of(service.new_request_id(), "hello", 2))
            num_sent = len(stream.tokens)
            assert (await service.view()).requests
            assert len(stream.tokens) == num_sent
        assert (await whole(stream)).tokens == expected_tokens("hello", 200)
        assert service.readiness().ready

    assert serve(settings, talk) == Exit(0)


def test_a_stop_while_the_disk_is_full_ends(
    state_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_in(state_folder, journal__full_wait_ms=1, server__drain_limit_ms=1)

    async def talk(service: Service) -> None:
        await ready(service)
        stream = service.submit(arrival_of(service.new_request_id(), "hello", 200))
        await stream.wait(3, None)

        def full(*_: object, **__: object) -> None:
            raise JournalFull("no space")

        monkeypatch.setattr(Journal, "commit", full)
        service.stop("SIGTERM")
        await service.ended()
        assert stream.cut

    assert serve(settings, talk) == Exit(0)


def test_a_bug_is_status_1(state_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = settings_in(state_folder)

    async def talk(service: Service) -> None:
        await ready(service)
        monkeypatch.setattr("scheduler.loop.effects_of", lambda *_: 1 // 0)
        stream = service.submit(arrival_of(service.new_request_id(), "hello", 200))
        await service.ended()
        assert stream.cut

    outcome = serve(settings, talk)
    assert outcome.status == 1
    assert "ZeroDivisionError" in outcome.message


def test_two_servers_cannot_write_one_journal(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)

    async def talk(service: Service) -> None:
        with pytest.raises(JournalLocked):
            build(settings, ScriptedSource(settings))

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
