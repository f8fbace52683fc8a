"""SIGTERM, as real processes over HTTP: what can end ends, the rest is held and goes on later."""

import contextlib
import itertools
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from journal import events
from journal.reader import JournalReader
from scheduler.engine.fake import FakeEngine, FakeSource
from scheduler.engine.model import ModelDescription
from scheduler.settings import FakeSettings
from tests.integration.http_server import TIMEOUT_S, running
from tests.integration.kv_serving import (
    BLOCK_TOKENS,
    num_prefilled,
    prompt,
    recorded,
    serving,
    wait_for,
)
from tests.replaying import assert_replays
from tools.server_process import ServerProcess

pytestmark = pytest.mark.timeout(120)

NUM_SENT = 20
BODY: dict[str, Any] = {
    "model": "default",
    "prompt": "a prompt of more than one block: " * 10,
    "max_tokens": 400,
    "ignore_eos": True,
    "seed": 3,
    "stream": True,
}
SLOW = {"FERMATA_FAKE__STEP_MS": "10", "FERMATA_KV__RESERVE_BYTES": "0"}
FREE = {"reserve_bytes": 0}
PATIENT = {"FERMATA_SERVER__DRAIN_LIMIT_MS": "60000"}
IMPATIENT = {"FERMATA_SERVER__DRAIN_LIMIT_MS": "100"}


@contextmanager
def life(folder: Path, settings: Mapping[str, str], model: str = "fake") -> Iterator[ServerProcess]:
    """One life of a server; the test ends it."""
    server = ServerProcess(model, folder, settings)
    try:
        yield server
    finally:
        server.close()


class Client:
    """Reads a stream to its end in a thread. `sent` counts the tokens that it has."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self.url, self.body = url, body
        self.lines: list[str] = []
        self.sent = 0
        self.request_id = ""
        self.is_cut = False
        self.grown = threading.Condition()
        self.thread = threading.Thread(target=self.read)
        self.thread.start()

    def read(self) -> None:
        """The thread's body."""
        try:
            with httpx.stream(
                "POST", f"{self.url}/v1/completions", json=self.body, timeout=TIMEOUT_S
            ) as answer:
                self.request_id = answer.headers["x-request-id"]
                for line in answer.iter_lines():
                    self.take(line)
        except httpx.TransportError:
            self.is_cut = True

    def take(self, line: str) -> None:
        """One line came in."""
        with self.grown:
            self.lines.append(line)
            if line.startswith("id: "):
                self.sent = int(line.removeprefix("id: "))
            self.grown.notify_all()

    def wait(self, num_tokens: int = NUM_SENT) -> "Client":
        """Returns once it has so many tokens."""
        with self.grown:
            assert self.grown.wait_for(lambda: self.sent >= num_tokens, TIMEOUT_S), self.lines
        return self

    def join(self) -> "Client":
        """Waits for the end of the stream, whatever it is."""
        self.thread.join(TIMEOUT_S)
        assert not self.thread.is_alive()
        return self


def output(folder: Path, request_id: str) -> tuple[list[int], object]:
    """The output tokens and their log-probabilities, as the journal has them."""
    with JournalReader.open(folder) as reader:
        tokens, logprobs = reader.output_tokens(request_id)
    return tokens.tolist(), logprobs


def finish(folder: Path, *clients: Client, model: str = "fake") -> None:
    """The next life, in this process, finishes the requests: nothing that was sent changes."""
    before = [output(folder, client.request_id)[0] for client in clients]
    next_life = running(folder, kv=FREE) if model == "fake" else serving(folder, model)
    with next_life as server:
        for client in clients:
            assert server.wait_for_end(client.request_id)["state"] == "finished"
    for client, tokens in zip(clients, before, strict=True):
        assert len(tokens) >= client.sent
        after, _ = output(folder, client.request_id)
        assert len(after) == client.body["max_tokens"]
        assert after[: len(tokens)] == tokens


def held_at_stop(folder: Path, request_id: str) -> int:
    """How many positions were saved and pinned for a request by the stop."""
    [pause] = [e for e in recorded(folder, events.PauseStarted) if e.request_id == request_id]
    assert pause.reason == "drain"
    [saved] = [e for e in recorded(folder, events.ChainSaved) if e.request_id == request_id]
    assert [e for e in recorded(folder, events.ChainPinned) if e.request_id == request_id]
    assert [e for e in recorded(folder, events.RequestPaused) if e.request_id == request_id]
    return saved.num_tokens


def assert_nothing_computed_again(folder: Path, request_id: str, num_held: int) -> None:
    """The second run filled the row with what was saved, and fed nothing of it."""
    restored = [
        e for e in recorded(folder, events.ChainRestored, run_id=2) if e.request_id == request_id
    ]
    assert [e.num_tokens for e in restored][-1] == num_held
    assert num_prefilled(folder, 2, request_id) == 0


def test_a_stop_lets_requests_end(tmp_path: Path) -> None:
    with life(tmp_path, SLOW | PATIENT) as server:
        client = Client(server.address(), BODY | {"max_tokens": 60}).wait()
        assert server.stop() == 0
        client.join()
    assert (client.is_cut, client.sent) == (False, 60)
    assert client.lines[-2:] == ["data: [DONE]", ""]
    assert recorded(tmp_path, events.PauseStarted) == []
    assert_replays(tmp_path)


def test_what_does_not_end_in_time_is_held_and_goes_on_from_there(tmp_path: Path) -> None:
    settings = SLOW | IMPATIENT | {"FERMATA_SCHEDULER__MAX_ROWS": "2"}
    with life(tmp_path, settings) as server:
        url = server.address()
        running = [Client(url, BODY | {"seed": seed}).wait() for seed in (1, 2)]
        waiting = Client(url, BODY | {"seed": 3})
        wait_for(tmp_path, events.RequestReceived, 3)
        assert server.stop() == 0
        for client in (*running, waiting):
            client.join()
    assert [client.is_cut for client in (*running, waiting)] == [True] * 3
    held = {client.request_id: held_at_stop(tmp_path, client.request_id) for client in running}
    for client in running:
        num_known = len(BODY["prompt"]) + len(output(tmp_path, client.request_id)[0])
        assert held[client.request_id] == num_known - 1
    finish(tmp_path, *running, waiting)
    for client in running:
        assert_nothing_computed_again(tmp_path, client.request_id, held[client.request_id])


@pytest.mark.engine
def test_real_rows_that_a_stop_held_end_as_if_nobody_had_stopped(tmp_path: Path) -> None:
    body = BODY | {"prompt": prompt(5), "temperature": 0, "logprobs": 3}
    stock = {
        "FERMATA_ENGINE__BLAS": "stock",
        "FERMATA_KV__BLOCK_TOKENS": str(BLOCK_TOKENS),
        "FERMATA_KV__RESERVE_BYTES": "0",
    }
    with serving(tmp_path / "undisturbed", "tiny-hybrid", enabled=False) as server:
        server.http.post("/v1/completions", json=body)
    [received] = recorded(tmp_path / "undisturbed", events.RequestReceived)
    undisturbed = output(tmp_path / "undisturbed", received.request_id)
    folder = tmp_path / "state"
    with life(folder, stock | {"FERMATA_SERVER__DRAIN_LIMIT_MS": "0"}, "tiny-hybrid") as server:
        client = Client(server.address(), body).wait()
        assert server.stop() == 0
        client.join()
    num_held = held_at_stop(folder, client.request_id)
    tokens, _ = output(folder, client.request_id)
    assert client.sent <= len(tokens) < body["max_tokens"]
    assert num_held == len(body["prompt"]) + len(tokens) - 1
    finish(folder, client, model="tiny-hybrid")
    assert_nothing_computed_again(folder, client.request_id, num_held)
    assert output(folder, client.request_id) == undisturbed


def test_second_signal_stops_at_once_and_loses_nothing(tmp_path: Path) -> None:
    with life(tmp_path, SLOW | PATIENT) as server:
        client = Client(server.address(), BODY).wait()
        server.process.terminate()
        wait_for(tmp_path, events.ServerStopping)
        assert server.stop() == 0
        client.join()
    assert client.is_cut
    assert client.sent < BODY["max_tokens"]
    finish(tmp_path, client)


def test_signals_that_come_quickly_are_one_clean_stop(tmp_path: Path) -> None:
    with life(tmp_path, SLOW | PATIENT) as server:
        client = Client(server.address(), BODY).wait()
        # The kernel makes one signal of several of a kind that nobody has taken yet.
        for number in itertools.cycle((signal.SIGTERM, signal.SIGINT)):
            server.process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                assert server.process.wait(timeout=0.001) == 0
                break
        client.join()
    assert client.is_cut
    assert recorded(tmp_path, events.PauseStarted) == []
    finish(tmp_path, client)


@pytest.mark.parametrize("described", [False, True])
def test_stop_while_the_model_is_loaded(tmp_path: Path, described: bool) -> None:
    with life(tmp_path, SLOW) as server:
        client = Client(server.address(), BODY).wait()
        server.kill()
        client.join()
    with life(tmp_path, SLOW | {"FERMATA_FAKE__LOAD_MS": "600000"}) as server:
        url = server.address()
        if described:
            assert httpx.get(f"{url}/v1/models", timeout=TIMEOUT_S).status_code == 200
        assert server.stop() == 0
    finish(tmp_path, client)


def test_stop_while_the_journal_has_no_space(small_disk: Path) -> None:
    settings = SLOW | IMPATIENT | {"FERMATA_FAKE__STEP_MS": "1", "FERMATA_KV__ENABLED": "false"}
    with life(small_disk, settings) as server:
        client = Client(server.address(), BODY | {"max_tokens": 3_000}).wait()
        deadline = time.monotonic() + TIMEOUT_S
        while not any("has no space" in line for line in server.log):
            assert time.monotonic() < deadline, "the disk has not filled up"
            assert server.process.poll() is None
        assert server.stop() == 0
        client.join()
    assert client.is_cut
    assert NUM_SENT <= client.sent < 3_000
    larger = ("mount", "-o", "remount,size=64M", str(small_disk))
    subprocess.run(larger, check=True, capture_output=True)
    finish(small_disk, client)


class Freeing(FakeEngine):
    """An engine that gives the bytes of a row back only once it may."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.may_free = threading.Event()

    def drop_row(self, number: int) -> None:
        assert self.may_free.wait(TIMEOUT_S)
        super().drop_row(number)


class FreeingSource(FakeSource):
    """A model on such an engine."""

    def make_engine(self, description: ModelDescription, nonce: int) -> Freeing:
        self.engine = Freeing(description.facts, nonce, self.settings)
        return self.engine


def test_a_stop_waits_for_the_bytes_of_rows_that_have_ended(tmp_path: Path) -> None:
    """Else the last of the journal would still count them."""
    source = FreeingSource(FakeSettings())
    with running(tmp_path, source, kv=FREE) as server:
        body = {"model": "default", "prompt": "short", "max_tokens": 3}
        assert server.http.post("/v1/completions", json=body).status_code == 200
        server.begin_stop()
        wait_for(tmp_path, events.ServerStopping)
        source.engine.may_free.set()
        server.join()
    assert len(recorded(tmp_path, events.KvFreed)) == 1
