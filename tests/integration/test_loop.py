"""The loop on the fake engine: what is committed, what is sent, in which order."""

import asyncio
import time
from pathlib import Path

import pytest

from journal import events
from journal.errors import JournalFull
from journal.events import Decision, Record
from scheduler import effects
from scheduler.engine.base import TokenLogprobs
from scheduler.engine.fake_row import Failure, fake_logprobs
from scheduler.parameters import SamplingParameters
from scheduler.request import Phase
from scheduler.streams import Accepted, Rejected, RequestStream, StreamCut, StreamEnd
from tests.loop_driver import LoopDriver, expected_tokens, settings_of

LONG = "a prompt of many chunks " * 20


def kinds(driver: LoopDriver, stream: RequestStream) -> list[str]:
    """The kinds of a request's events, in order."""
    return [
        type(record.event).__name__
        for record in driver.journal.read()
        if getattr(record.event, "request_id", None) == stream.request_id
    ]


def test_requests_run_to_their_ends(state_folder: Path) -> None:
    driver = LoopDriver(state_folder, settings_of(scheduler__chunk_tokens=100))
    streams = [
        driver.submit("hello", 20),
        driver.submit(LONG, 10),
        driver.submit("x", 300),
        driver.submit("y", 30, SamplingParameters(seed=1, stop=("é",))),
    ]
    driver.run_until_idle()
    assert [stream.end for stream in streams] == [
        StreamEnd("finished", "length", "", 5, 20),
        StreamEnd("finished", "length", "", len(LONG), 10),
        StreamEnd("finished", "end_of_turn", "", 1, 256),
        StreamEnd("finished", "stop", "", 1, 9),
    ]
    assert streams[0].tokens == expected_tokens("hello", 20)
    assert streams[1].tokens == expected_tokens(LONG, 10)
    assert streams[2].tokens[:-1] == expected_tokens("x", 255)
    assert streams[3].tokens == expected_tokens("y", 9)
    driver.assert_empty()
    for stream in streams:
        prompt = driver.journal.prompt_tokens(stream.request_id)
        assert prompt is not None
        assert len(prompt) == stream.num_prompt_tokens
        assert list(driver.journal.output_tokens(stream.request_id)[0]) == stream.tokens
    assert driver.loop.metrics.output_tokens == 20 + 10 + 256 + 9
    driver.journal.close()


def test_log_probabilities_are_sent_and_kept(state_folder: Path) -> None:
    driver = LoopDriver(state_folder)
    asked = driver.submit("a", 4, SamplingParameters(seed=1, logprobs=True, top_logprobs=2))
    plain = driver.submit("b", 4)
    driver.run_until_idle()
    assert plain.logprobs is None
    assert asked.logprobs is not None
    assert len(asked.logprobs) == 4
    assert all(len(values.top) == 2 for values in asked.logprobs)
    kept = driver.journal.output_tokens(asked.request_id)[1]
    assert kept is not None
    assert [TokenLogprobs(chosen, top) for chosen, top in kept] == asked.logprobs
    assert fake_logprobs(1, 7, 2).top[0] == (1, -7 / 512)
    driver.journal.close()


def test_a_step_without_facts_is_not_taken() -> None:
    driver = LoopDriver()
    driver.run_until_idle()
    before = (driver.state.step, driver.state.seq)
    assert not driver.loop.step()
    assert (driver.state.step, driver.state.seq) == before


def test_facts_and_decisions_of_a_step_share_step_and_time() -> None:
    driver = LoopDriver()
    driver.submit("hello", 3)
    driver.run_until_idle()
    records = list(driver.journal.read())
    assert [record.seq for record in records] == list(range(1, len(records) + 1))
    by_step: dict[int, list[Record]] = {}
    for record in records:
        by_step.setdefault(record.step, []).append(record)
    assert list(by_step) == list(range(1, len(by_step) + 1))
    for group in by_step.values():
        assert len({record.at_ns for record in group}) == 1
        sources = [record.source for record in group]
        assert sources == sorted(sources, reverse=True), "facts come before decisions"
        assert sources[0] == "fact"
    assert isinstance(records[0].event, events.ServerStarted)


def test_time_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = LoopDriver()
    now_ns = driver.state.now_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns - 10**15)
    driver.submit("hello", 3)
    driver.run_until_idle()
    assert driver.state.now_ns == now_ns
    monkeypatch.setattr(time, "time_ns", lambda: now_ns + 5)
    driver.submit("hello", 3)
    driver.run_until_idle()
    assert driver.state.now_ns == now_ns + 5


def test_nothing_is_done_before_the_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = LoopDriver()
    told: list[str] = []
    commit, submit, flush = driver.memory.commit, driver.engine.submit, driver.hub.flush

    def commits(*args: object, **named: object) -> list[Record]:
        told.append("commit")
        return commit(*args, **named)  # pyright: ignore[reportArgumentType]

    def submits(command: object) -> None:
        told.append(type(command).__name__)
        submit(command)  # pyright: ignore[reportArgumentType]

    def flushes() -> None:
        told.append("streams")
        flush()

    monkeypatch.setattr(driver.memory, "commit", commits)
    monkeypatch.setattr(driver.engine, "submit", submits)
    monkeypatch.setattr(driver.hub, "flush", flushes)
    driver.submit("hello", 2)
    driver.run_until_idle()
    steps = [step.split() for step in " ".join(told).split("commit")[1:]]
    assert steps == [
        ["StartRow", "RunChunk", "streams"],  # the arrival, beside engine_ready
        ["SetBatch", "streams"],
        ["streams", "ReleaseStep"],
        ["DropRow", "SetBatch", "streams", "ReleaseStep"],
        ["streams"],  # kv_freed
    ]


def test_an_effect_without_a_committed_seq_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = LoopDriver()
    driver.run_until_idle()
    for seq in (0, driver.state.seq, driver.state.seq + 100):
        monkeypatch.setattr(
            "scheduler.loop.effects_of", lambda *_, seq=seq: [effects.DropRow(seq, 1)]
        )
        driver.submit("hello")
        with pytest.raises(AssertionError, match="no event of this step"):
            driver.loop.step()


def test_an_end_survives_the_machine_and_a_token_the_process() -> None:
    driver = LoopDriver()
    driver.submit("hello", 5)
    driver.run_until_idle()
    assert driver.memory.commits["power"] == 2, "the start of the run, and the end"
    assert driver.memory.commits["process"] == driver.state.step - 2


def test_a_chain_that_stands_for_a_row_survives_the_machine() -> None:
    pinned = events.ChainPinned(
        request_id="req_a", number=1, num_blocks=0, last_hash="", tail_bytes=1, num_tokens=2
    )
    driver = LoopDriver()
    assert driver.loop.durability([pinned]) == "power"
    assert driver.loop.durability([]) == "process"


def test_with_power_all_commits_survive_the_machine() -> None:
    driver = LoopDriver(settings=settings_of(journal__durability="power"))
    driver.submit("hello", 5)
    driver.run_until_idle()
    assert driver.memory.commits["process"] == 0


def test_a_full_disk_heals_in_place() -> None:
    driver = LoopDriver()
    stream = driver.submit("hello", 5)
    driver.run_until(lambda: len(stream.tokens) == 2)
    seen: list[tuple[int, bool, int]] = []
    commands = list(driver.engine.commands)

    def wait_for_space() -> None:
        seen.append((len(stream.tokens), driver.loop.full, driver.journal.last.seq))
        assert list(driver.engine.commands) == commands

    driver.loop.wait_for_space = wait_for_space
    last_seq = driver.journal.last.seq
    while driver.engine.work():
        commands = list(driver.engine.commands)
    driver.memory.failures += [JournalFull("no space"), JournalFull("no space")]
    assert driver.loop.step()
    assert seen == [(2, True, last_seq)] * 2, "nothing was sent, and nothing was written"
    assert not driver.loop.full
    assert driver.loop.metrics.journal_full_waits == 2
    driver.run_until_idle()
    assert stream.tokens == expected_tokens("hello", 5)
    driver.assert_empty()


def test_refused_requests_leave_counts_only(state_folder: Path) -> None:
    settings = settings_of(scheduler__max_waiting=1, scheduler__max_rows=1, fake__context_tokens=64)
    driver = LoopDriver(state_folder, settings)
    running = driver.submit("r", 20)
    driver.run_until(lambda: len(driver.state.batch_rows) == 1)
    waiting, full = driver.submit("w", 4), driver.submit("f", 4)
    too_long, too_much = driver.submit("l" * 64, 4), driver.submit("m", 64)
    driver.turn()
    reasons = [
        stream.judgement.event.reason
        for stream in (full, too_long, too_much)
        if isinstance(stream.judgement, Rejected)
    ]
    assert reasons == ["queue_full", "context_length_exceeded", "max_tokens_exceeds_capacity"]
    assert waiting.judgement == Accepted(4)
    for stream in (full, too_long, too_much):
        assert driver.journal.prompt_tokens(stream.request_id) is None
        assert driver.journal.parameters(stream.request_id) is None
        assert kinds(driver, stream) == ["RequestReceived", "RequestRejected"]
        assert driver.hub.find(stream.request_id) is None
    driver.run_until_idle()
    assert running.end is not None
    assert waiting.end is not None
    driver.assert_empty()
    driver.journal.close()


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.PREFILLING, Phase.DECODING])
@pytest.mark.parametrize("wish", [events.CancelRequested, events.ClientGone])
def test_a_request_is_ended_from_outside_in_every_phase(
    state_folder: Path,
    phase: Phase,
    wish: type[events.CancelRequested | events.ClientGone],
) -> None:
    settings = settings_of(
        scheduler__max_rows=2, scheduler__chunk_tokens=32, requests__orphan_grace_s=0
    )
    driver = LoopDriver(state_folder, settings)
    other = driver.submit("other", 40)
    if phase is Phase.WAITING:
        driver.submit("second", 100)
    stream = driver.submit(LONG, 50)
    driver.run_until(
        lambda: (
            stream.judgement is not None
            and driver.request(stream).phase is phase
            and len(other.tokens) > 2
        )
    )
    driver.sensors.wish(wish(request_id=stream.request_id))
    driver.turn()
    assert stream.end is not None
    reason = "client_gone" if wish is events.ClientGone else "cancel_requested"
    assert (stream.end.kind, stream.end.reason) == ("cancelled", reason)
    num_sent = len(stream.tokens)
    assert stream.end.num_output_tokens == num_sent
    driver.run_until_idle()
    assert len(stream.tokens) == num_sent, "nothing follows the end"
    assert other.tokens == expected_tokens("other", 40), "its neighbour notices nothing"
    driver.assert_empty()
    driver.journal.close()


def test_a_client_that_leaves_at_once_gets_no_answer(state_folder: Path) -> None:
    driver = LoopDriver(state_folder, settings_of(requests__orphan_grace_s=0))
    stream = driver.submit("hello")
    driver.sensors.wish(events.ClientGone(request_id=stream.request_id))
    driver.run_until_idle()
    with pytest.raises(StreamCut):
        asyncio.run(stream.judged())
    driver.assert_empty()
    driver.journal.close()


@pytest.mark.parametrize("during", ["start", "prefill", "decode"])
def test_a_failed_row_is_run_again_and_goes_on(state_folder: Path, during: str) -> None:
    driver = LoopDriver(state_folder, settings_of(scheduler__chunk_tokens=100))
    at = 4 if during == "decode" else 0
    driver.engine.failures = [Failure(1, during, at) for _ in range(2)]  # pyright: ignore[reportArgumentType]
    stream, other = driver.submit(LONG, 10), driver.submit("other", 10)
    driver.run_until_idle()
    assert kinds(driver, stream).count("RequestRetried") == 2
    assert stream.tokens == expected_tokens(LONG, 10)
    assert other.tokens == expected_tokens("other", 10)
    driver.assert_empty()
    driver.journal.close()


@pytest.mark.parametrize("during", ["start", "prefill", "decode"])
def test_a_row_that_fails_too_often_is_given_up(state_folder: Path, during: str) -> None:
    driver = LoopDriver(state_folder)
    driver.engine.failures = [
        Failure(1, during, error="logits are not a number")  # pyright: ignore[reportArgumentType]
        for _ in range(3)
    ]
    stream, other = driver.submit(LONG, 10), driver.submit("other", 10)
    driver.run_until_idle()
    assert stream.end is not None
    assert (stream.end.kind, stream.end.reason) == ("aborted", "engine_failed")
    assert "logits are not a number" in stream.end.detail
    assert other.tokens == expected_tokens("other", 10)
    driver.assert_empty()
    driver.journal.close()


def test_a_request_that_ends_while_it_waits_for_its_retry_leaves_nothing() -> None:
    driver = LoopDriver()
    driver.engine.failures = [Failure(1, "decode", at=3)]
    stream = driver.submit("hello", 10)
    driver.run_until(lambda: len(stream.tokens) == 2)
    driver.sensors.stop("nothing is admitted from here on")
    driver.run_until_idle()
    assert driver.request(stream).retries == 1
    assert driver.request(stream).phase is Phase.WAITING
    assert not driver.engine.rows
    driver.sensors.wish(events.CancelRequested(request_id=stream.request_id))
    driver.run_until_idle()
    assert stream.end is not None
    driver.assert_empty()


def test_a_step_is_bounded_and_all_get_their_turn(state_folder: Path) -> None:
    settings = settings_of(scheduler__max_rows=64, fake__turn_tokens=0)
    driver = LoopDriver(state_folder, settings)
    streams = [driver.submit("a", 2) for _ in range(150)]
    driver.run_until_idle()
    assert all(stream.end is not None for stream in streams)
    events_of_step: dict[int, int] = {}
    for record in driver.journal.read():
        events_of_step[record.step] = events_of_step.get(record.step, 0) + 1
    assert max(events_of_step.values()) <= 256
    driver.assert_empty()
    driver.journal.close()


def test_decisions_are_those_of_the_state_with_the_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = LoopDriver()
    seen: list[int] = []

    def deciding(state: object) -> list[Decision]:
        seen.append(driver.state.seq - driver.journal.last.seq)
        return []

    monkeypatch.setattr("scheduler.loop.decide", deciding)
    driver.turn()
    assert seen == [1], "the fact is folded and not committed when decide is asked"


def test_only_what_brings_work_on_makes_the_last_step_younger() -> None:
    driver = LoopDriver(settings=settings_of(memory__ceiling="none"))
    driver.loop.last_step_ns = 0
    stream = driver.submit("hello", 20)
    assert driver.loop.step()
    assert not driver.state.admitted, "nothing is loaded yet"
    assert driver.loop.last_step_ns > 0, "there is work from here on"
    driver.run_until(lambda: len(stream.tokens) > 2)
    driver.loop.last_step_ns = 0
    reading = events.MemorySampled(
        active_bytes=1, cached_bytes=1, peak_bytes=1, process_bytes=1, available_bytes=1
    )
    driver.sensors.deliver_fact(reading)
    driver.submit("another", 20)
    driver.submit("a third " * 50_000)
    assert driver.loop.step()
    seqs = [r.seq for r in driver.journal.read() if isinstance(r.event, events.RequestAdmitted)]
    assert len(seqs) == 2
    assert driver.loop.last_step_ns > 0, "an admission is progress"
    driver.loop.last_step_ns = 0
    driver.sensors.deliver_fact(reading)
    driver.submit("a fourth " * 50_000)
    assert driver.loop.step()
    assert driver.loop.last_step_ns == 0, "a reading and a refusal are none"
    driver.run_until(lambda: len(stream.tokens) > 4)
    assert driver.loop.last_step_ns > 0
