"""A whole run in its threads: how it stops and fails, and with which exit status."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from journal.errors import JournalBroken, JournalFull, JournalLocked
from journal.journal import Journal
from scheduler.engine.fake import FakeEngine
from scheduler.engine.model import ModelDescription
from scheduler.machine import total_bytes
from scheduler.memory import chunk_bytes, row_bytes, size_text
from scheduler.run import Exit
from scheduler.service import Saturated, Service
from scheduler.wiring import build
from tests.loop_driver import arrival_of, expected_tokens
from tests.run_driver import LIMIT_S, ScriptedSource, ready, serve, settings_in, whole


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
    limit_ms = 600_000 if at_once else 1
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
            assert view.deaths == 0, "a stop is no death, also when it is hurried"
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


@pytest.mark.parametrize(("spare_bytes", "status"), [(-1, 2), (0, 0)])
def test_a_ceiling_below_which_nothing_fits_is_status_2(
    tmp_path: Path, spare_bytes: int, status: int
) -> None:
    facts = ScriptedSource(settings_in(tmp_path)).describe().facts
    limits = settings_in(tmp_path).limits()
    least = facts.weights_bytes + chunk_bytes(facts, limits) + row_bytes(facts, 2)
    settings = settings_in(tmp_path, memory__ceiling=least + spare_bytes)

    async def talk(service: Service) -> None:
        await (service.ended() if status else ready(service))

    ended = serve(settings, talk)
    assert ended.status == status
    if status:
        assert ended.message.startswith("the ceiling is ")
        assert f"the smallest request {size_text(row_bytes(facts, 2))}" in ended.message


class HungrierSource(ScriptedSource):
    """Its model needs more, once it is loaded, than its description says."""

    def make_engine(self, description: ModelDescription, nonce: int) -> FakeEngine:
        facts = msgspec.structs.replace(description.facts, transient_bytes_per_token=10_000)
        return super().make_engine(replace(description, facts=facts), nonce)


def test_a_ceiling_below_which_nothing_fits_once_the_model_is_loaded_is_status_2(
    tmp_path: Path,
) -> None:
    settings = settings_in(tmp_path, memory__ceiling=10_000_000)

    async def talk(service: Service) -> None:
        await service.ended()

    ended = serve(settings, talk, HungrierSource(settings))
    assert ended.status == 2
    assert ended.message.startswith("the ceiling is 10.0MB, but model fake needs 21.7MB ")


def test_a_machine_on_which_nothing_fits_is_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.settings.total_bytes", lambda: 1_500_000)
    monkeypatch.setattr("scheduler.machine.total_bytes", lambda: 1_500_000)

    async def talk(service: Service) -> None:
        await service.ended()

    ended = serve(settings_in(tmp_path, memory__ceiling="auto"), talk)
    assert ended.status == 2
    assert ended.message.startswith("the ceiling is 1.1MB, but model fake needs ")
    assert ended.message.endswith(": raise --ceiling")


def test_a_machine_that_does_not_tell_its_memory_is_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken() -> None:
        raise PermissionError("no /proc/meminfo")

    monkeypatch.setattr("psutil.virtual_memory", broken)
    total_bytes.cache_clear()

    async def talk(service: Service) -> None:
        await service.ended()

    ended = serve(settings_in(tmp_path, memory__ceiling="auto"), talk)
    assert ended.status == 2
    assert ended.message == (
        "memory.ceiling is auto, and the machine's memory cannot be read (no /proc/meminfo): "
        "set it to a size"
    )


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


def test_a_stop_does_not_wait_for_the_model(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    released = threading.Event()

    async def talk(service: Service) -> None:
        service.stop("SIGTERM")
        assert await service.ended() == Exit(0)
        assert service.run_id == 0
        released.set()

    assert serve(settings, talk, ScriptedSource(settings, released=released)) == Exit(0)
