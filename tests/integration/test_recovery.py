"""A process is gone at some moment, another one takes its journal up, and no request is lost.

The other life of the engine has another nonce: a token that was delivered and is generated again
comes out as another one, so equality shows that none was.
"""

from pathlib import Path

import msgspec
import pytest

from journal import events
from journal.events import Record
from scheduler.evolve import fold
from scheduler.parameters import SamplingParameters
from scheduler.recovery import CORE, encode_state, recover_state
from scheduler.request import Phase
from scheduler.settings import Settings
from scheduler.state import SchedulerState
from scheduler.streams import Accepted, RequestStream
from tests.loop_driver import LoopDriver, expected_tokens, settings_of
from tools.checks import source

LONG = "a prompt of many chunks " * 20


def settings_for_kills() -> Settings:
    return settings_of(scheduler__max_rows=2, scheduler__chunk_tokens=64)


def finish(driver: LoopDriver, stream: RequestStream) -> RequestStream:
    """Runs to the end, and gives the request's stream in this life."""
    stream = driver.stream(stream.request_id)
    driver.run_until_idle()
    assert stream.end is not None
    driver.assert_empty()
    return stream


@pytest.mark.parametrize("phase", [Phase.WAITING, Phase.PREFILLING, Phase.DECODING])
def test_a_killed_request_goes_on(state_folder: Path, phase: Phase) -> None:
    driver = LoopDriver(state_folder, settings_for_kills())
    others = [driver.submit("one", 60)]
    if phase is Phase.WAITING:
        others.append(driver.submit("two", 60))
    stream = driver.submit(LONG, 12)
    driver.run_until(
        lambda: (
            stream.judgement is not None
            and driver.request(stream).phase is phase
            and (phase is not Phase.DECODING or len(stream.tokens) == 5)
            and (phase is not Phase.PREFILLING or driver.request(stream).num_cached_tokens > 64)
        )
    )
    sent = list(stream.tokens)
    assert sent == expected_tokens(LONG, len(sent), nonce=1)
    driver.restart()
    again = driver.stream(stream.request_id)
    assert again.judgement == Accepted(12)
    assert again.tokens == sent
    assert driver.request(again).phase is Phase.WAITING
    again = finish(driver, stream)
    assert again.tokens[: len(sent)] == sent
    assert again.tokens[len(sent) :] == expected_tokens(LONG, 12, nonce=2)[len(sent) :]
    assert again.end is not None
    assert (again.end.kind, again.end.reason) == ("finished", "length")
    driver.journal.close()


def test_a_kill_after_any_step_loses_nothing(tmp_path: Path) -> None:
    """One server is killed again and again, each time a little later."""
    sampling = SamplingParameters(seed=1, logprobs=True, top_logprobs=1)
    driver = LoopDriver(settings=settings_of(requests__max_deaths=100, scheduler__max_rows=2))
    streams = [driver.submit(text, 25, sampling) for text in ("a", LONG, "c")]
    num_turns = 0
    while any(stream.end is None for stream in streams):
        num_turns += 1
        for _ in range(num_turns):
            driver.turn()
        sent = [list(stream.tokens) for stream in streams]
        driver.restart()
        for i, stream in enumerate(streams):
            if stream.end is None and stream.judgement is not None:
                streams[i] = driver.stream(stream.request_id)
        assert [stream.tokens for stream in streams] == sent
        assert all(len(stream.logprobs or ()) == len(stream.tokens) for stream in streams)
    assert [len(stream.tokens) for stream in streams] == [25, 25, 25]
    assert num_turns > 5
    driver.run_until_idle()
    driver.assert_empty()


def test_what_was_not_committed_has_not_happened(state_folder: Path) -> None:
    driver = LoopDriver(state_folder)
    stream = driver.submit("hello", 10)
    driver.run_until(lambda: len(stream.tokens) == 3)
    while driver.engine.work():  # the next step is delivered, and nobody has taken it
        pass
    assert driver.sensors.results
    driver.restart()
    again = finish(driver, stream)
    assert again.tokens[3:] == expected_tokens("hello", 10, nonce=2)[3:]
    driver.journal.close()


def test_an_ended_request_stays_ended(state_folder: Path) -> None:
    driver = LoopDriver(state_folder)
    stream = driver.submit("hello", 3)
    driver.run_until(lambda: stream.end is not None)  # its row is not freed yet
    driver.restart()
    assert driver.hub.find(stream.request_id) is None
    driver.run_until_idle()
    assert list(driver.journal.output_tokens(stream.request_id)[0]) == stream.tokens
    driver.assert_empty()
    driver.journal.close()


def test_deaths_are_charged_to_those_in_the_engine(state_folder: Path) -> None:
    driver = LoopDriver(state_folder, settings_for_kills())
    texts = ("one", "two", "three")
    streams = [driver.submit(text, 60) for text in texts]
    first, _, waiting = streams

    def admitted() -> bool:
        return len(driver.state.batch_rows) == 2

    for num_deaths in (1, 2):
        driver.run_until(admitted)
        driver.restart()
        assert driver.request(first).deaths == num_deaths
        assert driver.request(first).solo is (num_deaths == 2)
        assert driver.request(waiting).deaths == 0
    driver.run_until(lambda: bool(driver.state.batch_rows))
    assert driver.state.admitted == [1], "it comes back alone"
    driver.restart()
    again = driver.stream(first.request_id)
    assert again.end is not None
    assert (again.end.kind, again.end.reason) == ("aborted", "server_deaths")
    assert "3 deaths" in again.end.detail
    driver.run_until_idle()
    assert driver.loop.metrics.requests_ended == {"aborted:server_deaths": 1, "finished:length": 2}
    driver.assert_empty()
    driver.journal.close()


def test_a_clean_stop_is_charged_to_nobody(state_folder: Path) -> None:
    driver = LoopDriver(state_folder)
    stream = driver.submit("hello", 30)
    driver.run_until(lambda: len(stream.tokens) == 3)
    driver.sensors.stop("asked to")
    driver.loop.step()
    driver.restart()
    assert driver.request(stream).deaths == 0
    assert len(finish(driver, stream).tokens) == 30
    driver.journal.close()


def test_a_request_of_another_model_is_held_until_its_model_is_back(state_folder: Path) -> None:
    driver = LoopDriver(state_folder)
    stream = driver.submit("hello", 30)
    driver.run_until(lambda: len(stream.tokens) == 3)
    mine, driver.settings = driver.settings, settings_of(fake__context_tokens=4096)
    driver.restart()
    driver.run_until_idle()
    assert driver.request(stream).held_reason == "other_model"
    other = driver.submit("passes it", 5)
    driver.run_until_idle()
    assert len(other.tokens) == 5
    assert driver.stream(stream.request_id).end is None
    driver.settings = mine
    driver.restart()
    again = finish(driver, stream)
    assert again.tokens[:3] == stream.tokens
    assert len(again.tokens) == 30
    driver.journal.close()


def fields_of(state: SchedulerState) -> dict[str, object]:
    """A state as plain values, field by field."""
    return {name: msgspec.to_builtins(getattr(state, name)) for name in state.__struct_fields__}


def fold_all(records: list[Record]) -> SchedulerState:
    state = SchedulerState()
    fold(state, records)
    return state


def test_a_snapshot_with_the_rest_is_the_same_as_all(state_folder: Path) -> None:
    driver = LoopDriver(state_folder, settings_of(scheduler__max_rows=2))
    streams = [driver.submit(text, 20) for text in ("a", LONG, "c", "d")]
    driver.run_until(lambda: len(streams[1].tokens) == 3)
    driver.loop.save_snapshot()
    snapshot_seq = driver.state.seq
    driver.submit("e", 20)
    driver.run_until(lambda: len(streams[2].tokens) == 5)
    recovered, found_seq = recover_state(driver.journal)
    assert found_seq == snapshot_seq
    assert recovered.requests
    records = list(driver.journal.read())
    assert fields_of(recovered) == fields_of(fold_all(records)) == fields_of(driver.state)
    driver.restart()
    assert driver.snapshot_seq == snapshot_seq
    driver.run_until_idle()
    driver.assert_empty()
    driver.journal.close()


def test_snapshots_are_taken_every_so_many_events(state_folder: Path) -> None:
    driver = LoopDriver(state_folder, settings_of(journal__snapshot_events=100))
    driver.submit("a", 240)
    driver.run_until_idle()
    seq = driver.state.seq
    assert driver.loop.metrics.snapshots == seq // 100 == 2
    _, snapshot_seq = recover_state(driver.journal)
    assert 200 <= snapshot_seq <= seq
    driver.journal.close()


def test_a_snapshot_of_other_code_does_not_count(
    state_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver = LoopDriver(state_folder)
    driver.submit("a", 5)
    driver.run_until_idle()
    driver.loop.save_snapshot()
    assert recover_state(driver.journal)[1] == driver.state.seq
    monkeypatch.setattr("scheduler.recovery.code_digest", lambda: "other code")
    recovered, snapshot_seq = recover_state(driver.journal)
    assert snapshot_seq == 0
    assert encode_state(recovered) == encode_state(driver.state)
    driver.journal.close()


def test_the_digest_covers_the_core_and_the_events() -> None:
    root = Path(__file__).parents[2]
    core = {path for path in source.CORE if (root / path).exists()}
    parts = {f"journal/{name}.py" for name in ("events", "bodies", "facts", "decisions")}
    assert set(CORE) == core | parts


def test_the_run_says_what_it_is_made_of(state_folder: Path) -> None:
    driver = LoopDriver(state_folder)
    driver.restart()
    started = [
        record for record in driver.journal.read() if isinstance(record.event, events.ServerStarted)
    ]
    assert [record.run_id for record in started] == [1, 2]
    event = started[1].event
    assert isinstance(event, events.ServerStarted)
    assert event.engine_nonce == 2
    assert event.limits == driver.settings.limits(event.model)
    assert event.versions.keys() >= {"mlx-fermata", "python", "sqlite"}
    assert event.configuration["model"] == "fake"
    driver.journal.close()
