"""Drives the loop on the fake engine in one thread, piece by piece: no clock, no sleeping."""

from array import array
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

from journal.journal import Journal
from journal.memory import MemoryJournal
from scheduler.engine.fake import FakeEngine, FakeSource
from scheduler.engine.fake_row import fake_token, prompt_digest
from scheduler.engine.fake_tokenizer import FakeTokenizer
from scheduler.loop import Loop
from scheduler.parameters import RequestParameters, SamplingParameters
from scheduler.recovery import recover
from scheduler.request import Request
from scheduler.run import server_started
from scheduler.sensors import Sensors
from scheduler.settings import Settings, load_settings
from scheduler.streams import Arrival, RequestStream

MAX_TURNS = 20_000
SAMPLING = SamplingParameters(seed=1)


def settings_of(**overrides: object) -> Settings:
    """Settings of a small server that no memory holds back. Names are `group__name`."""
    named = {name.replace("__", "."): value for name, value in overrides.items()}
    return load_settings(overrides={"model": "fake", "memory.ceiling": "none", **named})


def expected_tokens(text: str, num_tokens: int, nonce: int = 1) -> list[int]:
    """What one engine life puts out for a prompt."""
    digest = prompt_digest(FakeTokenizer().encode(text))
    return [fake_token(digest, index, nonce) for index in range(num_tokens)]


def arrival_of(
    request_id: str, text: str, max_tokens: int | None = 8, sampling: SamplingParameters = SAMPLING
) -> Arrival:
    """A request as HTTP hands it over."""
    parameters = RequestParameters(
        route="completions", model="fake", created=1, stream=True, sampling=sampling
    )
    prompt = array("I", FakeTokenizer().encode(text))
    return Arrival(request_id, None, "completions", True, prompt, max_tokens, parameters)


class LoopDriver:
    """A server without HTTP and threads.

    `restart` is what a process does that finds the journal of one that was killed; each life has
    its own nonce: 1, 2, 3. Without a folder the journal is in memory.
    """

    def __init__(self, folder: Path | None = None, settings: Settings | None = None) -> None:
        self.folder = folder
        self.settings = settings or settings_of()
        self.memory = MemoryJournal()
        self.nonce = 0
        self.num_requests = 0
        self.open()

    def open(self) -> None:
        """Recovers, and begins a run."""
        self.nonce += 1
        twin = cast("Journal", self.memory)
        self.journal = twin if self.folder is None else Journal.open(self.folder)
        recovered = recover(self.journal, self.settings.requests.max_lingering)
        self.state, self.hub, self.known = recovered.state, recovered.hub, recovered.known
        self.snapshot_seq = recovered.snapshot_seq
        self.sensors = Sensors(self.known, self.settings.scheduler.max_inbox)
        self.loop = Loop(self.settings, self.journal, recovered, self.sensors, self.wait_for_space)
        description = FakeSource(self.settings.fake).describe()
        self.engine = FakeEngine(description.facts, self.nonce, self.settings.fake, threaded=False)
        self.loop.begin(server_started(self.settings, description, self.nonce), self.engine)

    def wait_for_space(self) -> None:
        """What a test does while the disk is full."""

    def restart(self) -> None:
        """The process is gone, with all it had in memory; another one takes the journal up."""
        self.journal.close()
        self.open()

    def submit(
        self,
        text: str,
        max_tokens: int | None = 8,
        sampling: SamplingParameters = SAMPLING,
        content_digest: str = "",
    ) -> RequestStream:
        """A request, which the next step looks at."""
        self.num_requests += 1
        arrival = arrival_of(f"req_{self.num_requests:026}", text, max_tokens, sampling)
        arrival = replace(arrival, content_digest=content_digest)
        stream = RequestStream(arrival.request_id, arrival.parameters, len(arrival.prompt))
        self.hub.add(stream)
        self.sensors.arrive(arrival)
        return stream

    def stream(self, request_id: str) -> RequestStream:
        """The stream of a request in this life."""
        stream = self.hub.find(request_id)
        assert stream is not None
        return stream

    def request(self, stream: RequestStream) -> Request:
        """The open request of a stream."""
        return self.state.get(stream.request_id)

    def turn(self) -> bool:
        """One piece of the engine's work, and one step of the loop. False: nothing was done."""
        worked = self.engine.work()
        return self.loop.step() or worked

    def run_until(self, reached: Callable[[], bool]) -> None:
        """Turns until the condition holds after a step."""
        for _ in range(MAX_TURNS):
            if reached():
                return
            assert self.turn(), "nothing is left to do, and the condition does not hold"
        raise AssertionError("too many turns")

    def run_until_idle(self) -> None:
        """Turns until nobody has anything to do."""
        for _ in range(MAX_TURNS):
            if not self.turn():
                return
        raise AssertionError("too many turns")

    def assert_empty(self) -> None:
        """Nothing is left of requests: no row, no byte, no token in memory."""
        state = self.state
        assert not state.requests
        assert not state.numbers
        assert (state.reserved_bytes, state.reserved_tokens, state.leaving) == (0, 0, {})
        assert not self.engine.rows
        assert not list(self.known)
        assert not self.known.row_ids
        assert not self.hub.open
