"""A random but plausible world around the core: clients, an engine, crashes and restarts."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from hypothesis import strategies as st

from journal import events
from journal.events import AnyEvent, Limits, ModelFacts
from scheduler import effects
from scheduler.evolve import is_decoding
from scheduler.state import SchedulerState
from tests.property.fake_engine import FakeEngine, MakeRow, Row
from tests.unit.core_driver import CoreDriver, only

LIMITS = Limits(
    max_rows=3,
    max_waiting=4,
    token_budget=600,
    chunk_tokens=64,
    chunk_tokens_beside_rows=16,
    default_max_tokens=8,
    ceiling_bytes=None,
    max_retries=1,
    max_deaths=2,
)
MODEL = ModelFacts(
    name="fake",
    fingerprint="f" * 64,
    context_tokens=256,
    weights_bytes=1_000,
    kv_bytes_per_token=10,
    kv_step_tokens=16,
    window_layers=(),
    state_bytes=5,
    transient_bytes_per_token=1,
)
OTHER_MODEL = msgspec.structs.replace(MODEL, fingerprint="0" * 64)
HEAVY_MODEL = msgspec.structs.replace(MODEL, kv_bytes_per_token=25)
CEILING = msgspec.structs.replace(LIMITS, ceiling_bytes=4_000)
NARROW = msgspec.structs.replace(
    LIMITS, max_rows=2, token_budget=100, max_waiting=2, max_retries=0, max_deaths=1
)


@dataclass(frozen=True)
class Setup:
    """What a run is started with, and what its engine measures once it is loaded."""

    limits: Limits = LIMITS
    model: ModelFacts = MODEL
    measured: ModelFacts = MODEL
    one_row_only: bool = False


SETUPS = (
    Setup(),
    Setup(limits=CEILING),
    Setup(limits=CEILING, measured=HEAVY_MODEL),
    Setup(limits=NARROW),
    Setup(one_row_only=True),
    Setup(model=OTHER_MODEL, measured=OTHER_MODEL),
)


class World:
    """Plays actions against the core. Every step is checked by the driver."""

    def __init__(self, setup: Setup = SETUPS[0]) -> None:
        self.driver = CoreDriver()
        self.stops: dict[int, int] = {}
        self.said: list[AnyEvent] = []
        self.outputs: Counter[str] = Counter()
        self.ends: Counter[str] = Counter()
        self.setup = setup
        self.restart(setup)

    @property
    def state(self) -> SchedulerState:
        return self.driver.state

    def restart(self, setup: Setup) -> None:
        """A new process: what was on its way to or from the engine and clients is lost."""
        self.said.clear()
        self.engine = self.make_engine(setup)
        self.driver.limits, self.driver.model = setup.limits, setup.model
        self.driver.begin_run()
        self.count_ends()
        self.perform()

    def make_engine(self, setup: Setup) -> FakeEngine:
        return FakeEngine(setup.measured, setup.one_row_only)

    def arrive(self, num_prompt_tokens: int, max_tokens: int | None, stop_in: int) -> None:
        number = self.state.next_number + len(only(self.said, events.RequestReceived))
        arrival = self.driver.receive(num_prompt_tokens, max_tokens, name=f"r{number}")
        self.stops[number] = stop_in
        self.said.append(msgspec.structs.replace(arrival, number=number))

    def cancel(self, which: int) -> None:
        """Somebody wants a request to end."""
        self.said.append(events.CancelRequested(request_id=self.name_of(which)))

    def lose_client(self, which: int) -> None:
        self.said.append(events.ClientGone(request_id=self.name_of(which)))

    def name_of(self, which: int) -> str:
        """One of the open requests, or any, which may have ended, or never have been."""
        names = [*self.state.numbers, f"r{which % (self.state.next_number + 1)}"]
        return names[which % len(names)]

    def stop(self, setup: Setup) -> None:
        """A clean stop with a little time for what is in the engine, and the next start."""
        self.said.append(events.ServerStopping(reason="SIGTERM"))
        self.run(3)
        self.restart(setup)

    def advance(self, amount: int) -> None:
        for _ in range(amount):
            self.engine.advance()

    def break_row(self, which: int, during: Literal["start", "prefill", "decode"]) -> None:
        self.engine.break_row(which, during)

    def collect(self, most: int, results_first: bool = False) -> bool:
        """One step: what was said, and the first results of the engine; whether there was any."""
        pending = self.engine.results
        results = [pending.popleft() for _ in range(min(most, len(pending)))]
        facts = results + self.said if results_first else self.said + results
        self.said = []
        if not facts:
            return False
        for tokens in only(results, events.TokensDecoded):
            self.count_tokens(tokens)
        waited, were_open = list(self.state.waiting), set(self.state.numbers)
        decisions = self.driver.step(*self.with_names(facts))
        wait = [n for n in self.state.waiting if not self.state.requests[n].deferred_until_ns]
        self.check_order(decisions, waited, wait)
        wishes: list[events.CancelRequested | events.ClientGone] = [
            *only(facts, events.CancelRequested)
        ]
        if self.setup.limits.orphans is None:
            wishes += only(facts, events.ClientGone)
        wanted = {wish.request_id for wish in wishes} & were_open
        assert not wanted & set(self.state.numbers), "whoever is cancelled ends in that step"
        self.count_ends()
        self.perform()
        return True

    def check_order(
        self, decisions: Sequence[events.Decision], waited: Sequence[int], wait: Sequence[int]
    ) -> None:
        """Nobody was admitted before somebody who waited longer, and waits still for a row."""
        passed_over = set(waited) & set(wait)
        for admitted in only(decisions, events.RequestAdmitted):
            assert not [n for n in passed_over if n < admitted.number], "somebody overtook"

    def with_names(self, facts: list[AnyEvent]) -> list[AnyEvent]:
        """The facts with what the loop adds to them: nothing, where no KV is saved."""
        return facts

    def count_tokens(self, event: events.TokensDecoded) -> None:
        for number, count in zip(event.numbers, event.counts, strict=True):
            request = self.state.requests.get(number)
            if request is not None and is_decoding(request, event.batch):
                self.outputs[request.request_id] += count

    def count_ends(self) -> None:
        for effect in self.driver.effects:
            match effect:
                case effects.EndRequest():
                    self.ends[effect.request_id] += 1
                    assert effect.num_output_tokens == self.outputs[effect.request_id]
                case effects.RejectRequest():
                    self.ends[effect.request_id] += 1
                case _:
                    pass

    def perform(self) -> None:
        """Hands the engine its commands."""
        for effect in self.driver.effects:
            match effect:
                case effects.StartRow():
                    self.engine.commands.append(MakeRow(effect.number, self.row_of(effect)))
                case effects.RunChunk() | effects.SetBatch() | effects.DropRow():
                    self.engine.commands.append(effect)
                case effects.SendTokens():
                    self.engine.commands.append(effect)
                case _:
                    self.perform_other(effect)

    def perform_other(self, effect: effects.Effect) -> None:
        """What is neither for the engine nor for its batch."""

    def row_of(self, effect: effects.StartRow) -> Row:
        request = self.state.requests[effect.number]
        num_output_tokens = self.outputs[effect.request_id]
        assert effect.num_known_tokens == request.num_prompt_tokens + num_output_tokens
        return Row(
            request_id=effect.request_id,
            known=effect.num_known_tokens,
            left=request.max_tokens - num_output_tokens,
            stop_in=self.stops[effect.number] - num_output_tokens,
        )

    def run(self, amount: int) -> None:
        """The engine works and the loop steps, in turns."""
        for _ in range(amount):
            self.engine.advance()
            self.collect(2)

    def settle(self) -> None:
        """Nothing fails any more: engine and loop go on until nothing is left to do."""
        if self.state.stopping:
            self.restart(self.setup)
        for _ in range(20_000):
            worked = self.engine.advance()
            if not self.collect(64) and not worked:
                return
        raise AssertionError("the world does not come to rest")


ARRIVALS = st.tuples(
    st.just("arrive"),
    st.one_of(st.just(1), st.integers(1, 20), st.integers(1, 150), st.integers(1, 300)),
    st.one_of(st.none(), st.integers(1, 12)),
    st.integers(0, 12),
)
RUNS = st.tuples(st.just("run"), st.integers(1, 12))
COLLECTS = st.tuples(st.just("collect"), st.integers(0, 4), st.booleans())
ADVANCES = st.tuples(st.just("advance"), st.integers(1, 6))
WISHES = st.tuples(st.sampled_from(["cancel", "lose_client"]), st.integers(0, 40))
BREAKS = st.tuples(
    st.just("break_row"), st.integers(0, 5), st.sampled_from(["start", "prefill", "decode"])
)
RESTARTS = st.tuples(st.sampled_from(["restart", "stop"]), st.sampled_from(SETUPS))
WEIGHTS = ((ARRIVALS, 5), (RUNS, 5), (COLLECTS, 5), (ADVANCES, 2), (WISHES, 3), (BREAKS, 3))
ANY = st.sampled_from([s for s, weight in (*WEIGHTS, (RESTARTS, 1)) for _ in range(weight)])
ACTIONS = st.tuples(*[st.lists(ANY.flatmap(lambda s: s), max_size=30)] * 8).map(
    lambda lists: [action for part in lists for action in part]
)
"""What may happen to a server, as plain values, so that a failing example reads like a story. One
list alone would seldom be long.
"""


def play(actions: Sequence[tuple[Any, ...]]) -> World:
    """A world in which these things have happened."""
    world = World()
    for name, *details in actions:
        getattr(world, name)(*details)
    return world
