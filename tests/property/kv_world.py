"""A random world in which KV is saved: prompts that share prefixes, writers, and a faulty disk."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
from hypothesis import strategies as st

from journal import events
from journal.blocks import BLOCK_PART, STATE_PART, BlockRow, apply, changes_of
from journal.events import AnyEvent, KvLimits
from scheduler import effects
from scheduler.deadlines import deadline_ns
from scheduler.prefix import block_bytes, state_bytes
from tests.property import fake_world
from tests.property.fake_world import CEILING, HEAVY_MODEL, LIMITS, MODEL, NARROW, Setup, World
from tests.property.kv_engine import Disk, File, KvEngine
from tests.unit.core_driver import only

BLOCK = 16
BLOCK_BYTES = BLOCK * MODEL.kv_bytes_per_token
KV = KvLimits(
    block_tokens=BLOCK,
    max_bytes=14 * BLOCK_BYTES,
    memory_bytes=4 * BLOCK_BYTES,
    writing_bytes=5 * BLOCK_BYTES,
    reserve_bytes=1_000,
    max_age_ns=0,
    state_every_blocks=0,
    await_ns=20_000,
)
PLAIN = msgspec.structs.replace(MODEL, state_bytes=0)
STATEFUL = msgspec.structs.replace(MODEL, state_bytes=2 * BLOCK_BYTES)
HEAVY = msgspec.structs.replace(HEAVY_MODEL, state_bytes=0)


def saving(limits: events.Limits = LIMITS, **changes: int) -> events.Limits:
    """Limits with saved KV."""
    return msgspec.structs.replace(limits, kv=msgspec.structs.replace(KV, **changes))


@dataclass(frozen=True)
class KvSetup(Setup):
    """A run whose KV has this domain."""

    domain: str = "one"


SETUPS = (
    KvSetup(saving(), PLAIN, PLAIN),
    KvSetup(saving(), STATEFUL, STATEFUL, domain="stateful"),
    KvSetup(saving(max_bytes=8 * BLOCK_BYTES), STATEFUL, STATEFUL, domain="stateful"),
    KvSetup(saving(state_every_blocks=2), MODEL, MODEL, domain="small states"),
    KvSetup(saving(max_bytes=4 * BLOCK_BYTES, await_ns=0), PLAIN, PLAIN),
    KvSetup(saving(max_age_ns=60_000, memory_bytes=0), PLAIN, PLAIN, domain="two"),
    KvSetup(saving(CEILING, writing_bytes=400), PLAIN, HEAVY, domain="heavy"),
    KvSetup(saving(NARROW), PLAIN, PLAIN),
    KvSetup(LIMITS, PLAIN, PLAIN, domain=""),
)


class KvWorld(World):
    """`labels` say what each request's full blocks hold, one by one, as far as it is known."""

    setup: KvSetup

    def __init__(self, setup: KvSetup = SETUPS[0]) -> None:
        self.disk = Disk()
        self.labels: dict[str, list[str]] = {}
        self.prompts: dict[str, int] = {}
        self.rows: dict[str, BlockRow] = {}
        self.num_viewed = 0
        self.num_named: Counter[str] = Counter()
        self.domain = ""
        self.max_bytes = 0
        super().__init__(setup)

    def make_engine(self, setup: Setup) -> KvEngine:
        assert isinstance(setup, KvSetup)
        self.setup, self.domain = setup, ""
        self.num_named.clear()
        kv = setup.limits.kv
        self.max_bytes = kv.max_bytes if kv else 0
        each = block_bytes(setup.measured, kv) if kv else 0
        if kv:
            num_done = self.state.seq % 3
            self.said += self.disk.restart(self.known_files(), num_done)
        return KvEngine(
            setup.measured,
            setup.one_row_only,
            disk=self.disk,
            domain=setup.domain,
            block_tokens=kv.block_tokens if kv else 0,
            sizes={"block": each, "state": state_bytes(setup.measured)},
        )

    def known_files(self) -> set[File]:
        """The files that the core knows."""
        blocks = self.state.index.blocks
        files: set[File] = set()
        for name, block in blocks.items():
            files.add((block.domain, name, "block"))
            if block.state_bytes:
                files.add((block.domain, name, "state"))
        return files

    # Names

    def ask(
        self, letters: str, more_tokens: int, max_tokens: int | None, stop_in: int, suffix: int
    ) -> None:
        """A prompt of these blocks and some tokens more. What a request without a suffix puts out
        is not kept.
        """
        self.receive([*letters], more_tokens, max_tokens, stop_in, suffix)

    def follow(self, which: int, more_tokens: int, stop_in: int) -> None:
        """The next turn of some request: its whole chain, and some tokens more."""
        chains = list(self.labels.values())
        if chains:
            self.receive(chains[which % len(chains)][:12], more_tokens, 8, stop_in, 3)

    def receive(
        self,
        labels: list[str],
        more_tokens: int,
        max_tokens: int | None,
        stop_in: int,
        suffix: int,
    ) -> None:
        num_tokens = max(1, len(labels) * BLOCK + more_tokens)
        self.arrive(num_tokens, max_tokens, stop_in)
        arrival = self.said[-1]
        assert isinstance(arrival, events.RequestReceived)
        name = arrival.request_id
        self.said[-1] = msgspec.structs.replace(
            arrival, num_suffix_tokens=suffix, keep_output=suffix > 0
        )
        own = range(len(labels), num_tokens // BLOCK)
        self.labels[name] = [*labels, *(f"{name}.{number}" for number in own)]
        self.prompts[name] = num_tokens

    def names(self, name: str) -> tuple[str, ...]:
        """The hashes of a request's full blocks: each names all that is before it."""
        known = self.prompts[name] + self.outputs[name]
        labels = self.labels[name]
        labels += [f"{name}.{number}" for number in range(len(labels), known // BLOCK)]
        return tuple(f"{self.domain}:{'/'.join(labels[: end + 1])}" for end in range(len(labels)))

    def with_names(self, facts: list[AnyEvent]) -> list[AnyEvent]:
        named: list[AnyEvent] = []
        for fact in facts:
            named.append(fact)
            if isinstance(fact, events.EngineReady) and fact.kv_domain:
                self.domain = fact.kv_domain
                arrived = [r.request_id for r in only(named, events.RequestReceived)]
                named += self.name_all([*self.state.numbers, *arrived])
            elif isinstance(fact, events.RequestReceived) and self.domain:
                named += self.name_all([fact.request_id])
            elif isinstance(fact, events.TokensDecoded) and self.domain:
                rows = [self.state.requests.get(number) for number in fact.numbers]
                named += self.name_all([row.request_id for row in rows if row is not None])
        return named

    def name_all(self, request_ids: list[str]) -> list[AnyEvent]:
        """The names of the blocks of these requests that have none yet."""
        found: list[AnyEvent] = []
        for name in request_ids:
            hashes = self.names(name)
            first = self.num_named[name]
            self.num_named[name] = len(hashes)
            if hashes[first:]:
                found.append(
                    events.BlocksNamed(request_id=name, first=first, hashes=hashes[first:])
                )
        return found

    # What happens

    def write(self, count: int, which: int) -> None:
        for _ in range(count):
            self.disk.write(which)

    def trouble(self, kind: Literal["disk_full", "io_error", "obstructed"]) -> None:
        self.disk.trouble = kind

    def heal(self) -> None:
        self.disk.heal()

    def pick(self, which: int) -> File | None:
        files = sorted(self.disk.sizes)
        return files[which % len(files)] if files else None

    def break_file(self, which: int) -> None:
        file = self.pick(which)
        if file is not None:
            self.disk.broken.add(file)

    def lose_file(self, which: int) -> None:
        file = self.pick(which)
        if file is not None:
            del self.disk.sizes[file]
            self.disk.broken.discard(file)
            self.disk.lost.add(file)

    def verify(self, reason: Literal["missing", "corrupt"]) -> None:
        if self.setup.limits.kv:
            self.said += self.disk.verify(self.known_files(), reason)

    def clear(self) -> None:
        self.said.append(events.ClearRequested(by="test"))

    def measure(self, free_bytes: int) -> None:
        self.said.append(events.StoreMeasured(free_bytes=free_bytes, num_swept=0, swept_bytes=0))

    def wait(self, steps: int) -> None:
        self.driver.now_ns += steps * 1_000

    def run(self, amount: int) -> None:
        for _ in range(amount):
            self.engine.advance()
            self.disk.write(0)
            self.collect(3)

    def collect(self, most: int, results_first: bool = False) -> bool:
        """As before, with what the writers report, and a tick when time itself must act."""
        self.said += self.disk.results
        self.disk.results.clear()
        due_ns = deadline_ns(self.state)
        idle = not self.said and not (self.engine.results and most)
        is_due = due_ns is not None and due_ns <= self.driver.now_ns + 1_000
        if idle and is_due:
            self.said.append(events.ClockTicked())
        was_now = due_ns == self.state.now_ns
        first = len(self.driver.records)
        stepped = super().collect(most, results_first)
        self.check_step(first)
        if idle and is_due and was_now:
            decided = [r for r in self.driver.records[first:] if r.source == "decision"]
            assert decided, "a tick that is due at once changes something"
        return stepped

    def check_step(self, first: int) -> None:
        """What is planned keeps the budget, and a prompt's tokens add up."""
        step = [record.event for record in self.driver.records[first:]]
        index = self.state.index
        if only(step, events.BlockSavePlanned):
            assert index.disk_bytes + index.writing_bytes <= self.max_bytes
        self.check_view()
        for finished in only(step, events.RequestFinished):
            restored = finished.num_memory_tokens + finished.num_disk_tokens
            total = restored + finished.num_prefilled_tokens
            assert total == finished.num_prompt_tokens, "prompt = memory + SSD + prefilled"

    def check_view(self) -> None:
        """The journal's table of blocks says what the index does."""
        for record in self.driver.records[self.num_viewed :]:
            for change in changes_of(record, self.setup.domain, BLOCK):
                apply(self.rows, change)
        self.num_viewed = len(self.driver.records)
        index = self.state.index
        sizes = {name: (b.block_bytes, b.state_bytes) for name, b in index.blocks.items()}
        for name in (*index.early_states, *index.writing, *index.writing_states):
            sizes.setdefault(name, (0, index.early_states.get(name, 0)))
        assert {n: (row.block_bytes, row.state_bytes) for n, row in self.rows.items()} == sizes
        saved = {name for name, row in self.rows.items() if row.saved_ns is not None}
        assert saved == set(index.blocks)
        for name, row in self.rows.items():
            on_the_way = (name in index.writing, name in index.writing_states)
            assert row.writing_parts == on_the_way[0] * BLOCK_PART + on_the_way[1] * STATE_PART

    def perform_other(self, effect: effects.Effect) -> None:
        match effect:
            case effects.SaveBlocks():
                self.engine.commands.append(effect)
            case effects.RestoreRow():
                name = self.state.requests[effect.number].request_id
                assert effect.hashes == self.names(name)[: len(effect.hashes)]
                self.engine.commands.append(effect)
            case effects.RemoveFiles():
                self.disk.remove(effect)
            case _:
                pass

    def settle(self) -> None:
        """Nothing fails any more, and time passes where it must."""
        self.disk.heal()
        if self.state.stopping:
            self.restart(self.setup)
        for _ in range(20_000):
            worked = self.engine.advance() + self.disk.write(0)
            if self.collect(64) or worked:
                continue
            due_ns = deadline_ns(self.state)
            if due_ns is None:
                return
            self.driver.now_ns = max(self.driver.now_ns, due_ns)
        raise AssertionError("the world does not come to rest")


LETTERS = st.text("ab", max_size=7)
MORE = st.sampled_from([0, 1, 3, 15])
ASKS = st.tuples(
    st.just("ask"),
    LETTERS,
    MORE,
    st.one_of(st.none(), st.integers(1, 40)),
    st.integers(0, 40),
    st.integers(0, 20),
)
FOLLOWS = st.tuples(st.just("follow"), st.integers(0, 9), MORE, st.integers(0, 30))
RUNS = st.tuples(st.just("run"), st.integers(1, 25))
WRITES = st.tuples(st.just("write"), st.integers(1, 4), st.integers(0, 1))
FILES = st.tuples(st.sampled_from(["break_file", "lose_file"]), st.integers(0, 30))
TROUBLES = st.tuples(st.just("trouble"), st.sampled_from(["disk_full", "io_error", "obstructed"]))
SPACE = st.tuples(st.just("measure"), st.sampled_from([0, 900, 10_000]))
WAITS = st.tuples(st.just("wait"), st.sampled_from([5, 30, 100]))
SIMPLE = st.sampled_from(["heal", "heal", "clear"]).map(lambda name: (name,))
VERIFIES = st.tuples(st.just("verify"), st.sampled_from(["missing", "corrupt"]))
RESTARTS = st.tuples(st.sampled_from(["restart", "stop"]), st.sampled_from(SETUPS))
WEIGHTS = (
    (ASKS, 6), (FOLLOWS, 4), (RUNS, 7), (fake_world.COLLECTS, 4), (fake_world.ADVANCES, 3),
    (WRITES, 3), (fake_world.WISHES, 2), (fake_world.BREAKS, 2), (FILES, 4), (TROUBLES, 1),
    (SPACE, 1), (WAITS, 1), (SIMPLE, 2), (VERIFIES, 1), (RESTARTS, 1),
)  # fmt: skip
ANY = st.sampled_from([s for s, weight in WEIGHTS for _ in range(weight)])
ACTIONS = st.tuples(
    st.sampled_from(SETUPS[:-1]), *[st.lists(ANY.flatmap(lambda s: s), max_size=20)] * 6
).map(lambda parts: (parts[0], [action for part in parts[1:] for action in part]))
"""The first setup, and what may happen then."""


def play(story: tuple[KvSetup, Sequence[tuple[Any, ...]]]) -> KvWorld:
    """A world in which these things have happened."""
    setup, actions = story
    world = KvWorld(setup)
    for name, *details in actions:
        getattr(world, name)(*details)
    return world
