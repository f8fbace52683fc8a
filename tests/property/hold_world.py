"""A random world in which memory is short: readings, ballast of others, tails, and an operator."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from hypothesis import strategies as st

from journal import events
from journal.events import AnyEvent, MemoryLimits
from scheduler import effects
from scheduler.memory import row_bytes
from scheduler.prefix import tail_name
from scheduler.usage import mark_bytes, memory_of
from tests.property import kv_world
from tests.property.fake_engine import Command, Row
from tests.property.fake_world import LIMITS, Setup
from tests.property.kv_engine import Disk, File, KvEngine
from tests.property.kv_world import HEAVY, PLAIN, STATEFUL, KvSetup, KvWorld, saving
from tests.unit.core_driver import only

MEMORY = MemoryLimits(
    low_permille=800,
    high_permille=920,
    emergency_permille=1000,
    hysteresis_permille=40,
    act_limit_ns=30_000,
    reserve="chunk",
    growth_tokens=16,
    min_progress_tokens=4,
    pause=True,
    is_auto=False,
    machine_reserve_bytes=0,
    wait_limit_ns=1_000_000,
)


CEILING = msgspec.structs.replace(LIMITS, ceiling_bytes=3_200)
"""Weights, a chunk, and about one and a half of the larger requests."""


def short(limits: events.Limits = CEILING, **changes: Any) -> events.Limits:
    """Limits with marks."""
    return msgspec.structs.replace(limits, memory=msgspec.structs.replace(MEMORY, **changes))


AGED = msgspec.structs.replace(CEILING, max_age_ns=3_000_000)
SETUPS = (
    KvSetup(short(saving(CEILING)), PLAIN, PLAIN),
    KvSetup(short(saving(CEILING), reserve="expected"), PLAIN, PLAIN),
    KvSetup(short(saving(CEILING), reserve="bound"), PLAIN, PLAIN),
    KvSetup(short(saving(CEILING)), STATEFUL, STATEFUL, domain="stateful"),
    KvSetup(short(saving(AGED, max_bytes=640)), STATEFUL, STATEFUL, domain="stateful"),
    KvSetup(short(saving(CEILING, writing_bytes=320)), PLAIN, HEAVY, domain="heavy"),
    KvSetup(short(saving(CEILING), pause=False), PLAIN, PLAIN),
    KvSetup(short(CEILING), PLAIN, PLAIN, domain=""),
    KvSetup(short(saving(AGED), is_auto=True), PLAIN, PLAIN),
)


class HoldDisk(Disk):
    """Tails are files too; what comes of them is said in their own facts."""

    def __init__(self) -> None:
        super().__init__()
        self.tails: dict[File, events.ChainSaved] = {}

    def fail(self, file: File, reason: str) -> None:
        tail = self.tails.pop(file, None)
        if tail is None:
            super().fail(file, reason)
            return
        known = ("disk_full", "io_error", "not_taken")
        self.results.append(
            events.ChainSaveFailed(
                request_id=tail.request_id,
                number=tail.number,
                reason=reason if reason in known else "io_error",  # pyright: ignore[reportArgumentType]
                detail="",
            )
        )

    def write(self, which: int) -> bool:
        wrote = super().write(which)
        if self.results and isinstance(self.results[-1], events.BlockSaved):
            saved = self.results[-1]
            for file, tail in list(self.tails.items()):
                if file[1] == saved.hash and file[2] == "tail":
                    del self.tails[file]
                    self.results[-1] = tail
        return wrote

    def remove(self, effect: effects.RemoveFiles) -> None:
        super().remove(effect)
        for name in effect.tails:
            self.unlink((effect.domain, name, "tail"))  # pyright: ignore[reportArgumentType]


@dataclass
class HoldEngine(KvEngine):
    """An engine that counts its memory; `ballast` is what something else in the process takes."""

    ballast: int = 0
    cached: int = 0
    tails: list[tuple[effects.SaveTail, Row | None]] = field(default_factory=list)
    rooms: dict[int, int] = field(default_factory=dict)

    def advance(self) -> bool:
        return (self.loaded and not self.commands and self.save_tails()) or super().advance()

    def active_bytes(self) -> int:
        rows = sum(self.row_bytes(number) for number in self.rows)
        return self.measured.weights_bytes + rows + self.ballast

    def row_bytes(self, number: int) -> int:
        """A row that is filled from disk has room for all its known tokens at once."""
        return row_bytes(self.measured, max(self.rows[number].cached, self.rooms.get(number, 0)))

    def obey_about_blocks(self, command: Command) -> None:
        match command:
            case effects.SaveTail():
                self.tails.append((command, self.rows.get(command.number)))
            case effects.ReclaimMemory():
                freed, self.cached = self.cached, 0
                self.results.append(
                    events.MemoryReclaimed(
                        freed_bytes=freed,
                        active_bytes=self.active_bytes(),
                        cached_bytes=0,
                        duration_ns=1,
                    )
                )
            case _:
                super().obey_about_blocks(command)

    def drop(self, number: int) -> None:
        freed = self.row_bytes(number)
        self.rooms.pop(number, None)
        super().drop(number)
        self.cached += freed
        [result] = [self.results.pop()]
        assert isinstance(result, events.KvFreed)
        self.results.append(msgspec.structs.replace(result, freed_bytes=freed))

    def save_tails(self) -> bool:
        """The tail of a row for which no step is under way any more."""
        for command, row in self.tails:
            under_way = [self.batch_rows, self.launched[1] if self.launched else {}]
            busy = any(row is other for rows in under_way for other in rows.values())
            if row is not None and row.runs and (busy or self.held_back):
                continue
            self.tails.remove((command, row))
            self.save_tail(row, command)
            return True
        return False

    def save_tail(self, row: Row | None, command: effects.SaveTail) -> None:
        assert isinstance(self.disk, HoldDisk)
        if row is None or not row.runs:
            failed = events.ChainSaveFailed(
                request_id=command.request_id,
                number=command.number,
                reason="not_taken",
                detail="",
            )
            self.results.append(failed)
            return
        end = row.cached
        assert end == row.known - 1 or row.request_id not in self.decoded_ids(), "one is pending"
        assert command.tail_start <= end
        has_state = self.sizes["state"] > 0
        num_bytes = (end - command.tail_start) * self.measured.kv_bytes_per_token
        num_bytes += self.sizes["state"]
        saved = events.ChainSaved(
            request_id=command.request_id,
            number=command.number,
            tail_start=command.tail_start,
            num_tokens=end,
            tail_bytes=num_bytes,
            duration_ns=1,
        )
        if end == command.tail_start and not has_state:
            self.results.append(saved)
            return
        file: File = (self.domain, tail_name(command.request_id, end), "tail")  # pyright: ignore[reportAssignmentType]
        self.disk.tails[file] = saved
        self.disk.offer(file, num_bytes)

    def decoded_ids(self) -> set[str]:
        return {row.request_id for row in self.batch_rows.values()}

    def restore(self, row: Row, command: effects.RestoreRow) -> None:
        if not row.runs:
            return
        self.rooms[command.number] = row.known
        if command.tail is None:
            super().restore(row, command)
            return
        name = tail_name(command.tail.request_id, command.tail.end)
        file: File = (self.domain, name, "tail")  # pyright: ignore[reportAssignmentType]
        is_good = file in self.disk.sizes and file not in self.disk.broken
        bad: list[AnyEvent] = []
        whole = all(self.is_good(name, "block", bad) for name in command.hashes)
        if not whole or not is_good:
            if whole:
                self.results.append(
                    events.ChainRestoreFailed(
                        request_id=row.request_id,
                        number=command.number,
                        reason="corrupt",
                        detail="",
                    )
                )
            super().restore(row, command)
            return
        assert command.num_tokens == command.tail.end
        row.cached = command.num_tokens
        self.results.append(
            events.ChainRestored(
                request_id=row.request_id,
                number=command.number,
                num_tokens=row.cached,
                num_memory_tokens=0,
                num_disk_tokens=row.cached,
                read_bytes=0,
                duration_ns=1,
            )
        )


class HoldWorld(KvWorld):
    """`sample_every` steps there is a reading, and at each while memory is short."""

    engine: HoldEngine

    def __init__(self, setup: KvSetup = SETUPS[0]) -> None:
        self.steps = 0
        super().__init__(setup)

    def make_engine(self, setup: Setup) -> KvEngine:
        if not isinstance(self.disk, HoldDisk):
            self.disk = HoldDisk()
        plain = super().make_engine(setup)
        self.disk.tails.clear()
        names = plain.__dataclass_fields__
        return HoldEngine(**{name: getattr(plain, name) for name in names})

    def known_files(self) -> set[File]:
        tails = self.state.index.tails.items()
        more = {(tail.domain, name, "tail") for name, tail in tails}
        return super().known_files() | more  # pyright: ignore[reportReturnType]

    def check_order(
        self, decisions: Sequence[events.Decision], waited: Sequence[int], wait: Sequence[int]
    ) -> None:
        """Where there are marks, some may be passed for a while."""

    def crowd(self, which: int) -> None:
        """Three requests at once that have room for less than two, and some work on them."""
        chains = (("aaaab", "bbbb", "abab"), ("aaaaaa", "aaaaaa", "b"), ("bb", "abbbb", "aaab"))
        for letters in chains[which]:
            self.ask(letters, 3, 30, 0, 3)
        self.run(20)

    def ballast(self, num_bytes: int) -> None:
        self.engine.ballast = num_bytes

    def hold(self, which: int) -> None:
        self.said.append(events.HoldRequested(request_id=self.name_of(which)))

    def release(self, which: int) -> None:
        self.said.append(events.ReleaseRequested(request_id=self.name_of(which)))

    def sample(self) -> None:
        engine = self.engine
        active = engine.active_bytes() if engine.loaded else 0
        self.said.append(
            events.MemorySampled(
                active_bytes=active,
                cached_bytes=engine.cached,
                peak_bytes=active,
                process_bytes=active,
                available_bytes=max(0, 3_200 - active - engine.ballast),
            )
        )

    def needs_sample(self) -> bool:
        limits = memory_of(self.state)
        if limits is None or not self.engine.loaded:
            return False
        self.steps += 1
        seen = self.engine.active_bytes() + self.engine.cached
        over = seen >= mark_bytes(self.state, limits.high_permille)
        short = self.state.memory.level or self.state.reliefs
        return bool(over or short or self.steps % 7 == 0)

    def collect(self, most: int, results_first: bool = False) -> bool:
        worked = bool(self.said or (self.engine.results and most))
        if worked and self.needs_sample():
            self.sample()
        return super().collect(most, results_first)

    def perform_other(self, effect: effects.Effect) -> None:
        match effect:
            case effects.SaveTail() | effects.ReclaimMemory():
                self.engine.commands.append(effect)  # pyright: ignore[reportArgumentType]
            case _:
                super().perform_other(effect)

    def check_step(self, first: int) -> None:
        step = [record.event for record in self.driver.records[first:]]
        for finished in only(step, events.RequestFinished):
            restored = finished.num_memory_tokens + finished.num_disk_tokens
            total = restored + finished.num_prefilled_tokens
            assert total == finished.num_prompt_tokens, "prompt = memory + SSD + prefilled"
        assert len(step) <= 256

    def settle(self) -> None:
        self.engine.ballast = 0
        self.collect(0)
        for name in self.state.numbers:
            self.said.append(events.ReleaseRequested(request_id=name))
        self.sample()
        for _ in range(3):
            super().settle()
            self.engine.ballast = 0
            self.sample()
            self.sample()
        super().settle()


HOLDS = st.tuples(st.sampled_from(["hold", "hold", "release"]), st.integers(0, 20))
BALLASTS = st.tuples(st.just("ballast"), st.sampled_from([0, 0, 0, 0, 200, 300, 1_000]))
SAMPLES = st.just(("sample",))
CROWDS = st.tuples(st.just("crowd"), st.integers(0, 2))
RESTARTS = st.tuples(st.sampled_from(["restart", "stop"]), st.sampled_from(SETUPS))
WEIGHTS = (
    *(pair for pair in kv_world.WEIGHTS if pair[0] is not kv_world.RESTARTS),
    (HOLDS, 3), (BALLASTS, 2), (SAMPLES, 3), (RESTARTS, 1), (CROWDS, 4),
)  # fmt: skip
ANY = st.sampled_from([s for s, weight in WEIGHTS for _ in range(weight)])
ACTIONS = st.tuples(
    st.sampled_from(SETUPS), *[st.lists(ANY.flatmap(lambda s: s), max_size=20)] * 6
).map(lambda parts: (parts[0], [action for part in parts[1:] for action in part]))


def play(story: tuple[KvSetup, Sequence[tuple[Any, ...]]]) -> HoldWorld:
    """A world in which these things have happened."""
    setup, actions = story
    world = HoldWorld(setup)
    for name, *details in actions:
        getattr(world, name)(*details)
    return world
