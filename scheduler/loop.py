"""The loop: one thread, the only writer of the state and of the journal.

A step is: collect facts, fold them, decide, commit, fold the decisions, perform the effects. What
is performed carries the seq of a committed event; a step without facts is not taken.
"""

from collections.abc import Callable, Sequence
from typing import assert_never

import structlog

from journal import events
from journal.crashpoints import reach, reach_kinds
from journal.database import Durability
from journal.errors import JournalFull
from journal.events import Decision, Fact, Record
from journal.journal import Journal
from journal.place import Position, place
from journal.tokens import NO_ROWS, SideRows
from scheduler import effects
from scheduler.effects import Effect, EngineEffect, effects_of
from scheduler.engine import base
from scheduler.engine.base import Engine
from scheduler.evolve import fold
from scheduler.invariants import check_cheap
from scheduler.keptfiles import known_files
from scheduler.known import KnownRequest
from scheduler.kvstore import KvStore
from scheduler.metrics import Metrics
from scheduler.policy import decide
from scheduler.recovery import Recovered, code_digest, encode_state
from scheduler.sensors import MAX_EVENTS, Collected, Sensors
from scheduler.settings import Settings
from scheduler.state import STATE_VERSION
from scheduler.streams import Accepted, Joined, Rejected, StreamEnd
from scheduler.waits import has_work

LASTING = (events.RequestFinished, events.ChainPinned, events.ServerStarted)
REMOVING = (events.ChainUnpinned, events.BlocksEvicted)

log = structlog.get_logger(__name__)


NO_PROGRESS = (
    events.MemorySampled,
    events.StoreMeasured,
    events.ClockTicked,
    events.RequestReceived,
    events.BlocksNamed,
    events.RequestQueued,
    events.RequestRejected,
    events.RequestDeferred,
)
"""A step of these alone brings nobody on: they also come while the engine hangs."""


class StopNow(Exception):
    """The loop is to end while it waits for space in the journal."""


class Loop:
    """See the module's text. `step` is called by one thread only. Others read `full`, and when a
    step brought work on last, or found that there is some (`last_step_ns`).
    """

    def __init__(
        self,
        settings: Settings,
        journal: Journal,
        recovered: Recovered,
        sensors: Sensors,
        wait_for_space: Callable[[], None],
    ) -> None:
        self.settings = settings
        self.journal = journal
        self.state = recovered.state
        self.known = recovered.known
        self.hub = recovered.hub
        self.sensors = sensors
        self.wait_for_space = wait_for_space
        self.clock = sensors.clock
        self.metrics = Metrics()
        self.engine: Engine | None = None
        self.kv: KvStore | None = None
        self.full = False
        self.unpinned = False
        self.last_step_ns = self.clock.monotonic_ns()
        self.had_work = False
        self.snapshot_seq = recovered.snapshot_seq

    def begin(
        self, started: events.ServerStarted, engine: Engine, kv: KvStore | None = None
    ) -> None:
        """The first step of a run, and the start of its engine."""
        self.engine = engine
        self.kv = kv
        self.take(Collected(facts=[started]))
        reach("recovery.started")
        if kv is not None:
            self.sensors.name_source = kv.names
            kv.begin(known_files(self.state.index))
        engine.start(self.sensors.deliver, kv)

    def step(self) -> bool:
        """One step, if there is a fact. Raises EngineDeath, JournalBroken and StopNow."""
        collected = self.sensors.collect(self.state)
        if not collected.facts:
            return False
        self.take(collected)
        return True

    def take(self, collected: Collected) -> None:
        """The step that these facts make."""
        began_ns = self.clock.monotonic_ns()
        state = self.state
        at_ns = max(state.now_ns, self.clock.wall_ns())
        before = Position(state.seq, state.step, state.now_ns, state.run_id)
        fold(state, place(before, state.step + 1, at_ns, collected.facts, ()))
        decisions = decide(state)
        records = self.commit(state.step, at_ns, collected, decisions)
        fold(state, records[len(collected.facts) :])
        check_cheap(state)
        self.receive(collected)
        self.perform(effects_of(state, records), records, collected)
        self.observe(records, began_ns)
        self.keep_up()
        reach("step.done")

    def commit(
        self, step: int, at_ns: int, collected: Collected, decisions: list[Decision]
    ) -> list[Record]:
        """Commits the step. While the disk is full it is tried again; nothing else happens."""
        assert len(collected.facts) + len(decisions) <= MAX_EVENTS, "a step is bounded"
        reach_kinds("commit.before.", (*collected.facts, *decisions))
        side = side_rows(collected, decisions)
        durability = self.durability([*collected.facts, *decisions])
        while True:
            try:
                records = self.journal.commit(
                    step, at_ns, collected.facts, decisions, side, durability=durability
                )
            except JournalFull:
                self.full = True
                self.metrics.journal_full_waits += 1
                self.wait_for_space()
            else:
                self.full = False
                assert records[len(collected.facts) - 1].seq == self.state.seq
                reach_kinds("commit.after.", (*collected.facts, *decisions))
                return records

    def durability(self, step: Sequence[Fact | Decision]) -> Durability:
        """An end must survive the machine's death: its client may act on it. So must a pinned
        chain: the row that it stands for is let go.

        Nor may the journal come back with a pin whose file is gone. So an unpinning must survive
        before anything that was pinned is removed: by this step, by a later one, or by the sweep
        of a start, which trusts what the run before has committed.
        """
        self.unpinned |= any(isinstance(event, events.ChainUnpinned) for event in step)
        removes = self.unpinned and any(isinstance(event, REMOVING) for event in step)
        if removes or any(isinstance(event, LASTING) for event in step):
            self.unpinned = False
            return "power"
        return self.settings.journal.durability

    def receive(self, collected: Collected) -> None:
        """Keeps what the committed facts brought beside their counts: prompts, output tokens."""
        state = self.state
        for arrival in collected.arrivals:
            number = state.numbers.get(arrival.request_id)
            if number is not None:
                self.known.add(
                    KnownRequest(
                        number=number,
                        request_id=arrival.request_id,
                        num_prompt_tokens=len(arrival.prompt),
                        tokens=arrival.prompt[:],
                        parameters=arrival.parameters,
                    )
                )
        if collected.arrivals:
            for fact in collected.facts:
                if isinstance(fact, events.RequestReceived) and fact.number not in state.requests:
                    self.sensors.names.forget(fact.number)  # refused, or gone by now
        for row in collected.rows:
            if row.token_ids:
                self.known.append(row.number, row.token_ids)

    def perform(self, todo: list[Effect], records: list[Record], collected: Collected) -> None:
        """Performs the effects of a committed step, then hands the streams their news at once."""
        first_seq, last_seq = records[0].seq, records[-1].seq
        assert last_seq <= self.journal.last_seq, "effects come after the commit"
        for effect in todo:
            assert first_seq <= effect.seq <= last_seq, f"no event of this step caused {effect}"
            self.perform_one(effect, collected)
            reach_kinds("effect.after.", (effect,))
        reach("hub.flush.before")
        self.hub.flush()
        reach("hub.flush.after")
        if collected.rows:
            self.submit(base.ReleaseStep())

    def perform_one(self, effect: Effect, collected: Collected) -> None:
        """One arm per effect, those of the engine apart."""
        match effect:
            case effects.SendTokens():
                self.send_tokens(collected)
            case effects.AcceptRequest():
                self.hub.update(effect.request_id).judgement = Accepted(effect.max_tokens)
            case effects.RejectRequest():
                self.hub.update(effect.request_id).judgement = Rejected(effect.event)
            case effects.JoinRequest():
                self.hub.update(effect.request_id).judgement = Joined(effect.joined_id)
            case effects.EndRequest():
                self.end_request(effect)
            case effects.RemoveFiles():
                self.store.remove(effect)
            case effects.ShrinkTier():
                self.store.shrink(effect.names)
            case _:
                self.command(effect)

    def command(self, effect: EngineEffect) -> None:
        """What an effect asks of the engine."""
        match effect:
            case effects.StartRow():
                self.start_row(effect)
            case effects.RestoreRow():
                self.submit(restore_row(effect))
            case effects.SaveBlocks():
                self.submit(base.SaveBlocks(effect.number, effect.blocks))
            case effects.SaveTail():
                self.submit(base.SaveTail(effect.number, effect.request_id, effect.tail_start))
            case effects.ReclaimMemory():
                self.submit(base.ReclaimMemory())
            case effects.RunChunk():
                self.submit(base.RunChunk(effect.number, effect.chunk, effect.start, effect.length))
            case effects.SetBatch():
                self.submit(base.SetBatch(effect.batch, effect.numbers))
            case effects.DropRow():
                self.submit(base.DropRow(effect.number))
            case _:
                assert_never(effect)

    @property
    def store(self) -> KvStore:
        """The store that a decision about blocks needs."""
        assert self.kv is not None, "blocks are decided upon where they are saved"
        return self.kv

    def submit(self, command: base.EngineCommand) -> None:
        """A command to the engine, which `begin` has set."""
        assert self.engine is not None
        self.engine.submit(command)

    def start_row(self, effect: effects.StartRow) -> None:
        request = self.state.requests[effect.number]
        self.known.row_ids[effect.number] = effect.request_id
        self.submit(self.known.by_number[effect.number].start_row(effect, request.max_tokens))

    def send_tokens(self, collected: Collected) -> None:
        """The committed tokens of this step go to their streams."""
        for row in collected.rows:
            if row.token_ids:
                update = self.hub.update(self.known.by_number[row.number].request_id)
                update.token_ids = row.token_ids
                update.logprobs = row.logprobs

    def end_request(self, effect: effects.EndRequest) -> None:
        known = self.known.end(effect.request_id)
        if known is not None:
            self.sensors.names.forget(known.number)
        if known is not None and known.number not in self.state.leaving:
            self.known.row_ids.pop(known.number, None)
        self.hub.update(effect.request_id).end = StreamEnd(
            kind=effect.outcome,
            reason=effect.reason,
            detail=effect.detail,
            num_prompt_tokens=0 if known is None else known.num_prompt_tokens,
            num_output_tokens=effect.num_output_tokens,
            num_cached_prompt_tokens=effect.num_cached_prompt_tokens,
        )

    def observe(self, records: list[Record], began_ns: int) -> None:
        """Counts what the step was."""
        now_ns = self.clock.monotonic_ns()
        if not self.had_work or not all(isinstance(r.event, NO_PROGRESS) for r in records):
            self.last_step_ns = now_ns
        self.had_work = has_work(self.state)
        self.metrics.count(self.state, records)
        self.metrics.step_ns.observe(now_ns - began_ns)

    def keep_up(self) -> None:
        """Saves a snapshot every so many events. It is a cache: without space there is none."""
        if self.state.seq - self.snapshot_seq < self.settings.journal.snapshot_events:
            return
        try:
            self.save_snapshot()
        except JournalFull:
            log.warning("no space for a snapshot: the next start folds more events")

    def save_snapshot(self) -> None:
        """Keeps the state, so that the next start folds what comes after it."""
        state = self.state
        self.snapshot_seq = state.seq
        self.metrics.snapshots += 1
        self.journal.save_snapshot(state.seq, STATE_VERSION, code_digest(), encode_state(state))


def restore_row(effect: effects.RestoreRow) -> base.RestoreRow:
    """The command that fills a row."""
    tail = None
    if effect.tail is not None:
        tail = base.Tail(effect.tail.request_id, effect.tail.start, effect.tail.end)
    return base.RestoreRow(effect.number, effect.hashes, effect.num_tokens, effect.states, tail)


def side_rows(collected: Collected, decisions: list[Decision]) -> SideRows:
    """The side rows of a step, most often the tokens of a decode step alone."""
    if not collected.arrivals and not collected.rows:
        return NO_ROWS
    not_taken = frozenset(
        decision.request_id
        for decision in decisions
        if isinstance(decision, events.RequestRejected | events.RequestJoined)
    )
    return collected.side_rows(not_taken)
