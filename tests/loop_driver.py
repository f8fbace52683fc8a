"""Drives the loop on the fake engine in one thread, piece by piece: no clock, no sleeping."""

from array import array
from collections.abc import Callable
from pathlib import Path

from journal.journal import Journal
from scheduler.engine.fake import FakeEngine, FakeSource
from scheduler.engine.fake_tokenizer import FakeTokenizer
from scheduler.loop import Loop
from scheduler.parameters import RequestParameters, SamplingParameters
from scheduler.recovery import recover
from scheduler.run import server_started
from scheduler.sensors import Sensors
from scheduler.settings import Settings
from scheduler.streams import Arrival, RequestStream

MAX_TURNS = 20_000


def settings_of(**groups: dict[str, object]) -> Settings:
    """Settings of a small server; `groups` are those that a test changes."""
    return Settings.model_validate({"model": "fake", **groups})


class LoopDriver:
    """A server without HTTP and threads. `restart` is what a process does that finds the journal
    of one that was killed.
    """

    def __init__(self, folder: Path, settings: Settings | None = None, nonce: int = 1) -> None:
        self.folder = folder
        self.settings = settings or settings_of()
        self.nonce = nonce
        self.tokenizer = FakeTokenizer()
        self.num_requests = 0
        self.streams: dict[str, RequestStream] = {}
        self.open()

    def open(self) -> None:
        """Recovers, and begins a run."""
        self.journal = Journal.open(self.folder)
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
        raise AssertionError("the journal has no space")

    def submit(self, text: str, max_tokens: int | None = 8, **sampling: object) -> RequestStream:
        """A request as HTTP hands it over. It is looked at by the next step."""
        self.num_requests += 1
        request_id = f"req_{self.num_requests:026}"
        parameters = RequestParameters(
            route="completions",
            model="fake",
            created=1,
            stream=True,
            sampling=SamplingParameters(**{"seed": self.num_requests, **sampling}),  # pyright: ignore[reportArgumentType]
        )
        prompt = array("I", self.tokenizer.encode(text))
        arrival = Arrival(request_id, None, "completions", True, prompt, max_tokens, parameters)
        stream = RequestStream(request_id, parameters, len(prompt))
        self.hub.add(stream)
        self.sensors.arrive(arrival)
        return stream

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

    def restart(self, nonce: int = 2) -> None:
        """The process is gone, with all it had in memory; another one takes the journal up."""
        self.journal.close()
        self.nonce = nonce
        self.open()
