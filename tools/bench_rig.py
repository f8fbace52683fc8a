"""The real loop on a real journal with an engine that computes nothing: what the scheduler's
benchmark drives.

Everything is in one thread. The engine works outside of the measured time, and so does what the
asyncio thread would do: the calls that the loop hands over are kept and made between two steps.
"""

import random
import time
from array import array
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from journal.journal import Journal
from scheduler.engine.fake import FakeEngine, FakeSource
from scheduler.loop import Loop
from scheduler.parameters import RequestParameters, SamplingParameters
from scheduler.recovery import recover
from scheduler.run import server_started
from scheduler.sensors import Sensors
from scheduler.service import ALPHABET
from scheduler.settings import Settings, load_settings
from scheduler.streams import Arrival, RequestStream

NONCE = 1
ROUTE = "/v1/chat/completions"
"""Of all requests. A server that takes a journal of the rig over can serve their streams."""

PROMPT_TOKENS = 64
MAX_TOKENS = 1_000_000
"""Of a request that is not to end while it is measured."""

SETTINGS = {
    "model": "fake",
    "fake.context_tokens": 10 * MAX_TOKENS,
    "scheduler.token_budget": 10**12,
    "scheduler.max_waiting": 10_000,
    "scheduler.max_inbox": 10_000,
}
"""Room for everything; whatever is not named here is as users have it."""


def rig_settings(state: Path, max_rows: int) -> Settings:
    """The settings of a rig on this state folder."""
    overrides = {**SETTINGS, "state": state, "scheduler.max_rows": max_rows}
    return load_settings(overrides=overrides)


class Arrivals:
    """Requests from a seed: ids and prompts."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)

    def draw(self, max_tokens: int) -> Arrival:
        """One more request."""
        return Arrival(
            request_id="req_" + "".join(self.chance.choices(ALPHABET, k=26)),
            client_request_id=None,
            route=ROUTE,
            stream=True,
            prompt=array("I", [self.chance.randrange(32, 127) for _ in range(PROMPT_TOKENS)]),
            max_tokens=max_tokens,
            parameters=RequestParameters(
                route=ROUTE,
                model="fake",
                created=0,
                stream=True,
                sampling=SamplingParameters(seed=1, ignore_end_of_turn=True),
            ),
        )


class StepTime(NamedTuple):
    """What a step took: on the clock, and of the processor. On a machine that does other things at
    the same time, the clock also counts how long the step had to wait for the processor.
    """

    clock: int
    processor: int


class Rig:
    """A running scheduler that takes a step when it is told to."""

    def __init__(self, settings: Settings, seed: int) -> None:
        self.journal = Journal.open(settings.state, durability=settings.journal.durability)
        recovered = recover(self.journal, settings.requests.max_lingering)
        self.sensors = Sensors(recovered.known, settings.scheduler.max_inbox)
        self.loop = Loop(settings, self.journal, recovered, self.sensors, no_space)
        self.state = self.loop.state
        self.calls: deque[Callable[[], None]] = deque()
        self.loop.hub.call_soon = self.calls.append
        self.arrivals = Arrivals(seed)
        description = FakeSource(settings.fake).describe()
        self.engine = FakeEngine(description.facts, NONCE, threaded=False)
        self.loop.begin(server_started(settings, description, NONCE), self.engine)

    def submit(self, max_tokens: int = MAX_TOKENS) -> None:
        """A request comes in, and somebody reads its stream."""
        arrival = self.arrivals.draw(max_tokens)
        stream = RequestStream(arrival.request_id, arrival.parameters, len(arrival.prompt))
        self.loop.hub.add(stream)
        self.sensors.arrive(arrival)

    def fill(self, num_rows: int, num_waiting: int) -> None:
        """Goes on until so many rows decode and so many requests wait."""
        for _ in range(num_rows + num_waiting - len(self.state.requests)):
            self.submit()
        while len(self.state.batch_rows) < num_rows or self.sensors.inbox:
            self.step_ns()
        assert len(self.state.waiting) == num_waiting, f"{len(self.state.waiting)} wait"

    def step_ns(self) -> StepTime:
        """One step; returns what it took: fold, decide, commit, fold, effects."""
        self.engine.work_until_idle()
        thread_ns, begun_ns = time.thread_time_ns(), time.perf_counter_ns()
        stepped = self.loop.step()
        taken_ns = time.perf_counter_ns() - begun_ns
        thread_ns = time.thread_time_ns() - thread_ns
        assert stepped, "the engine has nothing to do: nothing is measured"
        while self.calls:
            self.calls.popleft()()
        return StepTime(taken_ns, thread_ns)

    def steps_ns(self, count: int) -> list[StepTime]:
        """So many steps."""
        return [self.step_ns() for _ in range(count)]

    def close(self) -> None:
        """Gives the journal back, as it is."""
        self.journal.close()


def no_space() -> None:
    """The loop waits for space: a benchmark does not."""
    raise SystemExit("the benchmark's disk is full")


class Stopwatch:
    """Where the time of a step goes, by the loop's own parts."""

    def __init__(self, loop: Loop) -> None:
        self.spent_ns: dict[str, int] = {}
        for part, owner, name in (
            ("collect", loop.sensors, "collect"),
            ("commit and its side rows", loop, "commit"),
            ("journal.commit", loop.journal, "commit"),
            ("known tokens", loop, "receive"),
            ("effects", loop, "perform"),
            ("metrics", loop, "observe"),
            ("snapshots", loop, "keep_up"),
        ):
            setattr(owner, name, self.timed(part, getattr(owner, name)))

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, with its time added to the part's."""

        def run(*arguments: Any, **options: Any) -> Any:
            begun_ns = time.perf_counter_ns()
            try:
                return function(*arguments, **options)
            finally:
                spent_ns = time.perf_counter_ns() - begun_ns
                self.spent_ns[part] = self.spent_ns.get(part, 0) + spent_ns

        return run
