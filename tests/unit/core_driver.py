"""Drives the pure core without a journal, an engine or a clock: a test plays all of them."""

from collections.abc import Sequence
from itertools import groupby
from string import ascii_lowercase
from typing import Literal, TypeVar

import msgspec

from journal import events
from journal.events import AnyEvent, Decision, Limits, MemoryLimits, ModelFacts, Record
from scheduler.effects import Effect, SendTokens, effects_of
from scheduler.evolve import fold
from scheduler.invariants import check
from scheduler.policy import POLICY_VERSION, decide
from scheduler.request import Phase, Request
from scheduler.state import SchedulerState

E = TypeVar("E", bound=AnyEvent)

LIMITS = Limits(
    max_rows=4,
    max_waiting=8,
    token_budget=100_000,
    chunk_tokens=512,
    chunk_tokens_beside_rows=64,
    default_max_tokens=1_000,
    ceiling_bytes=None,
    max_retries=2,
    max_deaths=2,
)
MEMORY = MemoryLimits(
    low_permille=800,
    high_permille=920,
    emergency_permille=1000,
    hysteresis_permille=40,
    act_limit_ns=2_000_000_000,
    reserve="expected",
    growth_tokens=256,
    min_progress_tokens=16,
    pause=True,
    is_auto=False,
    machine_reserve_bytes=0,
    wait_limit_ns=600_000_000_000,
)
MODEL = ModelFacts(
    name="fake",
    fingerprint="f" * 64,
    context_tokens=8_192,
    weights_bytes=1_000_000,
    kv_bytes_per_token=1_000,
    kv_step_tokens=256,
    window_layers=(),
    state_bytes=0,
    transient_bytes_per_token=10,
)


def server_started(limits: Limits = LIMITS, model: ModelFacts = MODEL) -> events.ServerStarted:
    """The first fact of a run."""
    return events.ServerStarted(
        policy_version=POLICY_VERSION,
        code_digest="",
        limits=limits,
        model=model,
        engine_nonce=0,
        configuration={},
        platform="test",
        blas="none",
        versions={},
        process_id=1,
    )


def engine_ready(model: ModelFacts = MODEL, *, one_row_only: bool = False) -> events.EngineReady:
    """The engine has loaded its model."""
    return events.EngineReady(model=model, one_row_only=one_row_only, note="", load_ns=1)


def request_in(phase: Phase) -> Request:
    """A request that has just come into this phase."""
    return Request(
        number=1,
        request_id="a",
        model_fingerprint="f",
        route="chat.completions",
        num_prompt_tokens=1,
        asked_max_tokens=1,
        received_ns=1,
        phase=phase,
    )


class CoreDriver:
    """A state with all records that were folded into it, and the effects that came out."""

    def __init__(self, limits: Limits = LIMITS, model: ModelFacts = MODEL) -> None:
        self.state = SchedulerState()
        self.records: list[Record] = []
        self.effects: list[Effect] = []
        self.now_ns = 1_000
        self.run_id = 0
        self.limits, self.model = limits, model

    def start(self) -> None:
        """Begins a run with a loaded engine."""
        self.begin_run()
        self.step(engine_ready(self.model))

    def begin_run(self) -> list[Decision]:
        """Begins a run whose engine is still loading."""
        self.run_id += 1
        return self.step(server_started(self.limits, self.model))

    def step(self, *facts: AnyEvent) -> list[Decision]:
        """Folds facts and what `decide` answers, and checks what must hold after every step."""
        self.now_ns += 1_000
        records = self.place("fact", facts)
        fold(self.state, records)
        before = msgspec.json.encode(self.state)
        decisions = decide(self.state)
        assert msgspec.json.encode(self.state) == before, "decide changed the state"
        assert decide(self.state) == decisions, "decide is not a function"
        decided = self.place("decision", decisions)
        fold(self.state, decided)
        check(self.state)
        self.effects = effects_of(self.state, records + decided)
        check_causes(self.effects, records + decided)
        return decisions

    def place(self, source: events.Source, placed: Sequence[AnyEvent]) -> list[Record]:
        """Gives events their seqs, as a journal would."""
        first, step = len(self.records) + 1, self.state.step + (source == "fact")
        records = [
            Record(first + i, self.run_id, step, source, self.now_ns, event)
            for i, event in enumerate(placed)
        ]
        self.records += records
        return records

    def divergences(self) -> list[int]:
        """The steps that are decided otherwise when the records are folded anew; the last one also
        when the state comes out otherwise.
        """
        state = SchedulerState()
        found: list[int] = []
        for number, step in groupby(self.records, key=lambda record: record.step):
            records = list(step)
            decided = [record for record in records if record.source == "decision"]
            fold(state, [record for record in records if record.source == "fact"])
            if decide(state) != [record.event for record in decided]:
                found.append(number)
            fold(state, decided)
        return found if state == self.state else [*found, state.step]

    def receive(
        self, num_prompt_tokens: int, max_tokens: int | None = 10, name: str = ""
    ) -> events.RequestReceived:
        """An arrival, to be given to `step`."""
        number = self.state.next_number
        return events.RequestReceived(
            request_id=name or f"req_{number}",
            number=number,
            client_request_id=None,
            model_fingerprint=self.model.fingerprint,
            route="chat.completions",
            stream=True,
            num_prompt_tokens=num_prompt_tokens,
            max_tokens=max_tokens,
            seed=1,
            parameters_digest="",
        )

    def number(self, name: str) -> int:
        """The number of the request with this id, also when it has ended."""
        for record in self.records:
            event = record.event
            if isinstance(event, events.RequestReceived) and event.request_id == name:
                return event.number
        raise KeyError(name)

    def request(self, name: str) -> Request:
        """The open request with this id."""
        return self.state.requests[self.state.numbers[name]]

    def freed(self, name: str) -> events.KvFreed:
        """The engine has let the row of this request go."""
        return events.KvFreed(request_id=name, number=self.number(name), freed_bytes=1)

    def failed(
        self, name: str, during: Literal["start", "prefill", "decode"] = "decode"
    ) -> events.EngineFailed:
        """An exception in this row's work."""
        return events.EngineFailed(
            request_id=name, number=self.number(name), during=during, error="boom"
        )

    def prefill(self) -> None:
        """Feeds every chunk that is planned, without decode steps between them."""
        while self.state.chunk is not None:
            self.step(self.chunk_done())

    def serve(self, *sizes: int) -> list[Decision]:
        """Receives requests with prompts of these sizes in one step; the decisions that it led to.

        Number 1 is named a, number 2 b, and so on.
        """
        arrivals = [
            msgspec.structs.replace(
                self.receive(size, name=ascii_lowercase[number - 1]), number=number
            )
            for number, size in enumerate(sizes, self.state.next_number)
        ]
        return self.step(*arrivals)

    def chunk_done(self) -> events.PrefillChunkDone:
        """The result of the chunk that is planned."""
        chunk = self.state.chunk
        assert chunk is not None
        return events.PrefillChunkDone(
            request_id=self.state.requests[chunk.number].request_id,
            chunk=chunk.chunk,
            start=chunk.start,
            length=chunk.length,
            duration_ns=1,
            peak_bytes=1,
            active_bytes=1,
        )

    def decoded(self, **ends: str) -> events.TokensDecoded:
        """One token for each row of the batch; `ends` names those that end, by request id."""
        numbers = tuple(self.state.batch_rows)
        ended = [
            events.RowEnd(number=n, reason=ends[self.state.requests[n].request_id])  # pyright: ignore[reportArgumentType]
            for n in numbers
            if self.state.requests[n].request_id in ends
        ]
        return events.TokensDecoded(
            batch=self.state.batch,
            numbers=numbers,
            counts=(1,) * len(numbers),
            ended=tuple(ended),
            duration_ns=1,
        )


def check_causes(effects: Sequence[Effect], records: Sequence[Record]) -> None:
    """Every effect names an event of its own step: a decision, or the tokens that it sends."""
    causes = {record.seq: record for record in records}
    for effect in effects:
        cause = causes[effect.seq]
        if isinstance(effect, SendTokens):
            assert isinstance(cause.event, events.TokensDecoded)
        else:
            assert cause.source == "decision"


def only(decisions: Sequence[AnyEvent], kind: type[E]) -> list[E]:
    """Those of this kind."""
    return [event for event in decisions if isinstance(event, kind)]


def kinds(decisions: Sequence[AnyEvent]) -> list[str]:
    """The kinds of events, in their order."""
    return [events.kind_of(type(event).__name__) for event in decisions]
