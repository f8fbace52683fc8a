"""A long journal in a short time: the real journal and the real core, with few and large steps.

A server would take hours for it. Here each request's whole output comes in one step of a thousand
decode results; the events, their tokens and the snapshots are those that a server would write.
"""

import time
from pathlib import Path

from journal import events
from journal.events import Fact
from journal.journal import Journal
from journal.place import Position, place
from journal.tokens import NO_ROWS, SideRows, StepTokens
from scheduler.engine.fake import FakeSource
from scheduler.evolve import fold
from scheduler.outcomes import received
from scheduler.policy import decide
from scheduler.recovery import code_digest, encode_state
from scheduler.run import server_started
from scheduler.sensors import Collected
from scheduler.state import STATE_VERSION, SchedulerState
from tools.bench_rig import MAX_TOKENS, NONCE, Arrivals, rig_settings

ROWS = 8
OUTPUT_TOKENS = 1_000
STEP_NS = 20_000_000_000
"""Between two steps on the journal's clock; it ends now."""


class HistoryWriter:
    """Folds, decides and commits, as the loop does, without its bound on a step's events."""

    def __init__(self, state_folder: Path, seed: int, at_ns: int) -> None:
        self.settings = rig_settings(state_folder, ROWS)
        self.journal = Journal.open(state_folder)
        self.state = SchedulerState()
        self.arrivals = Arrivals(seed)
        self.at_ns = at_ns
        self.snapshot_seq = 0
        description = FakeSource(self.settings.fake).describe()
        self.commit([server_started(self.settings, description, NONCE)])
        ready = events.EngineReady(model=description.facts, one_row_only=False, note="", load_ns=0)
        self.commit([ready])

    def commit(self, facts: list[Fact], side: SideRows = NO_ROWS) -> None:
        """One step."""
        state = self.state
        before = Position(state.seq, state.step, state.now_ns, state.run_id)
        fold(state, place(before, state.step + 1, self.at_ns, facts, ()))
        decisions = decide(state)
        records = self.journal.commit(state.step, self.at_ns, facts, decisions, side)
        fold(state, records[len(facts) :])
        if state.seq - self.snapshot_seq >= self.settings.journal.snapshot_events:
            self.snapshot_seq = state.seq
            body = encode_state(state)
            self.journal.save_snapshot(state.seq, STATE_VERSION, code_digest(), body)

    def receive(self, count: int, max_tokens: int) -> None:
        """Requests come in."""
        arrivals = [self.arrivals.draw(max_tokens) for _ in range(count)]
        facts: list[Fact] = [received(arrival, self.state, i) for i, arrival in enumerate(arrivals)]
        self.commit(facts, Collected(facts, arrivals).side_rows(frozenset()))

    def prefill(self) -> None:
        """All rows are prefilled, until they decode together."""
        state = self.state
        while len(state.batch_rows) < ROWS:
            if state.chunk is None:
                self.decode(1)
                continue
            chunk = state.chunk
            done = events.PrefillChunkDone(
                request_id=state.requests[chunk.number].request_id,
                chunk=chunk.chunk,
                start=chunk.start,
                length=chunk.length,
                duration_ns=1_000_000,
                peak_bytes=0,
                active_bytes=0,
            )
            self.commit([done])

    def decode(self, count: int) -> None:
        """So many decode steps of the batch; rows that reach their length end."""
        numbers = tuple(self.state.batch_rows)
        requests = [self.state.requests[number] for number in numbers]
        facts: list[Fact] = []
        for index in range(1, count + 1):
            ended = tuple(
                events.RowEnd(number=r.number, reason="length")
                for r in requests
                if r.num_output_tokens + index == r.max_tokens
            )
            facts.append(
                events.TokensDecoded(
                    batch=self.state.batch,
                    numbers=numbers,
                    counts=(1,) * len(numbers),
                    ended=ended,
                    duration_ns=20_000_000,
                )
            )
        tokens = StepTokens.of([((65,), None)] * len(numbers))
        self.commit(facts, SideRows(tokens=dict.fromkeys(range(count), tokens)))

    def generation(self) -> None:
        """As many requests as there are rows, from their arrival to their end."""
        state = self.state
        self.receive(ROWS, OUTPUT_TOKENS)
        self.prefill()
        while state.batch_rows:
            left = [state.requests[n] for n in state.batch_rows]
            self.decode(min(r.max_tokens - r.num_output_tokens for r in left))
        self.at_ns += STEP_NS


def write_history(state_folder: Path, num_events: int, num_open: int, seed: int) -> None:
    """A journal of at least so many events, with so many requests that have not ended: as many as
    there are rows decode, the rest wait. The server died then.
    """
    generations = num_events // OUTPUT_TOKENS + 1
    writer = HistoryWriter(state_folder, seed, time.time_ns() - generations * STEP_NS)
    while writer.state.seq < num_events:
        writer.generation()
    for _ in range(0, num_open, 50):
        writer.receive(min(50, num_open - len(writer.state.requests)), MAX_TOKENS)
    writer.prefill()
    writer.decode(100)
    writer.journal.close()
