"""`decide` alone on a full server whose memory is short: rows that decode, requests that are held
and do not fit, and a long queue behind them. No loop, no journal, no engine: facts are made up.

Each decision is taken on the state as a step leaves it. Usage is between the low mark and the high
one, so that every step looks for somebody who fits and finds nobody: the dearest case that lasts.
"""

import time
from collections.abc import Sequence

from journal import events
from journal.events import AnyEvent, Decision, KvLimits, Limits, MemoryLimits, ModelFacts, Record
from scheduler.evolve import fold
from scheduler.policy import POLICY_VERSION, decide
from scheduler.state import SchedulerState

DECIDING_ROWS, PAUSED, WAITING = 64, 64, 1_000
GB = 10**9
CEILING_BYTES = 100 * GB
ENOUGH = 10**9
"""Of what does not bound anything here."""

MODEL = ModelFacts(
    name="none",
    fingerprint="f" * 64,
    context_tokens=ENOUGH,
    weights_bytes=20 * GB,
    kv_bytes_per_token=20_000,
    kv_step_tokens=256,
    window_layers=(),
    state_bytes=0,
    transient_bytes_per_token=100_000,
)
LIMITS = Limits(
    max_rows=DECIDING_ROWS + PAUSED,
    max_waiting=10 * WAITING,
    token_budget=ENOUGH,
    chunk_tokens=2_048,
    chunk_tokens_beside_rows=256,
    default_max_tokens=1_000,
    ceiling_bytes=CEILING_BYTES,
    max_retries=2,
    max_deaths=2,
    kv=KvLimits(
        block_tokens=256,
        max_bytes=1_000 * GB,
        memory_bytes=GB,
        writing_bytes=GB,
        reserve_bytes=0,
        max_age_ns=0,
        state_every_blocks=0,
        await_ns=GB,
    ),
    memory=MemoryLimits(
        low_permille=800,
        high_permille=920,
        emergency_permille=1_000,
        hysteresis_permille=40,
        act_limit_ns=2 * GB,
        reserve="expected",
        growth_tokens=1_024,
        min_progress_tokens=64,
        pause=True,
        is_auto=True,
        machine_reserve_bytes=0,
        wait_limit_ns=600 * GB,
    ),
    gap_ns=250_000_000,
    max_age_ns=86_400 * GB,
)


class Full:
    """A state with so many rows, held requests and waiting ones, and the steps that it goes on
    with.
    """

    def __init__(self, num_rows: int, num_paused: int, num_waiting: int) -> None:
        self.state = SchedulerState()
        self.now_ns = 1
        self.step(
            events.ServerStarted(
                policy_version=POLICY_VERSION,
                code_digest="",
                limits=LIMITS,
                model=MODEL,
                engine_nonce=0,
                configuration={},
                platform="",
                blas="",
                versions={},
                process_id=1,
            )
        )
        self.step(
            events.EngineReady(
                model=MODEL, one_row_only=False, note="", load_ns=1, kv_domain="d" * 64
            )
        )
        while len(self.state.batch_rows) < num_rows + num_paused:
            self.step(self.arrival())
        self.hold(self.state.batch_rows[num_rows:])
        self.step(self.reading())
        for _ in range(num_waiting):
            self.step(self.arrival())
        state = self.state
        sizes = (len(state.batch_rows), len(state.paused), len(state.waiting))
        assert sizes == (num_rows, num_paused, num_waiting), f"not what is measured: {sizes}"

    def step(self, *facts: AnyEvent) -> int:
        """Folds facts and what follows from them; how long `decide` took of the processor, in
        nanoseconds: it waits for nothing, so the rest would be other programs.
        """
        self.now_ns += 10_000_000
        self.fold("fact", facts)
        begun_ns = time.thread_time_ns()
        decisions: Sequence[Decision] = decide(self.state)
        taken_ns = time.thread_time_ns() - begun_ns
        self.fold("decision", decisions)
        return taken_ns

    def fold(self, source: events.Source, placed: Sequence[AnyEvent]) -> None:
        """Folds events as the next of the journal."""
        step = self.state.step + (source == "fact")
        fold(
            self.state,
            [
                Record(self.state.seq + 1 + at, 1, step, source, self.now_ns, event)
                for at, event in enumerate(placed)
            ],
        )

    def hold(self, numbers: Sequence[int]) -> None:
        """Holds these by hand, saves them, and lets go of them again, as memory is short."""
        ids = [self.state.requests[number].request_id for number in numbers]
        self.step(*(events.HoldRequested(request_id=name) for name in ids))
        while self.state.pausing:
            self.step(*self.saved())
        for name, number in zip(ids, numbers, strict=True):
            self.step(events.KvFreed(request_id=name, number=number, freed_bytes=1))
        self.step(self.reading(), *(events.ReleaseRequested(request_id=name) for name in ids))

    def saved(self) -> list[AnyEvent]:
        """The tails that are planned are on disk."""
        rows = [self.state.requests[number] for number in self.state.pausing]
        return [
            events.ChainSaved(
                request_id=row.request_id,
                number=row.number,
                tail_start=0,
                num_tokens=row.num_cached_tokens,
                tail_bytes=row.num_cached_tokens * MODEL.kv_bytes_per_token,
                duration_ns=1,
            )
            for row in rows
            if row.tail_planned
        ] or [events.ClockTicked()]

    def arrival(self) -> events.RequestReceived:
        """One more request. Its prompt of one token needs no prefill."""
        number = self.state.next_number
        return events.RequestReceived(
            request_id=f"req_{number}",
            number=number,
            client_request_id=None,
            model_fingerprint=MODEL.fingerprint,
            route="chat.completions",
            stream=True,
            num_prompt_tokens=1,
            max_tokens=100_000,
            seed=1,
            parameters_digest="",
        )

    def reading(self) -> events.MemorySampled:
        """Usage between the low mark and the high one."""
        used = CEILING_BYTES * 85 // 100
        unallocated = DECIDING_ROWS * MODEL.kv_bytes_per_token * LIMITS.chunk_tokens
        return events.MemorySampled(
            active_bytes=used - unallocated,
            cached_bytes=0,
            peak_bytes=used,
            process_bytes=used,
            available_bytes=CEILING_BYTES,
        )

    def decoded(self) -> events.TokensDecoded:
        """One token for each row."""
        numbers = tuple(self.state.batch_rows)
        return events.TokensDecoded(
            batch=self.state.batch,
            numbers=numbers,
            counts=(1,) * len(numbers),
            ended=(),
            duration_ns=GB // 100,
        )

    def decisions_ns(self, count: int) -> list[int]:
        """What `decide` took in so many steps: tokens in each, a reading in every tenth, a request
        that comes and one that goes in every seventh.
        """
        taken: list[int] = []
        for at in range(count):
            facts: list[AnyEvent] = [self.decoded()]
            if at % 10 == 0:
                facts.append(self.reading())
            if at % 7 == 0:
                last = self.state.requests[self.state.waiting[-1]].request_id
                facts += [events.CancelRequested(request_id=last), self.arrival()]
            taken.append(self.step(*facts))
        return taken
