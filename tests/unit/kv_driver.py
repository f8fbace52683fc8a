"""Drives the core with saved KV: a test plays the writers and the disk as well."""

from collections.abc import Sequence
from string import ascii_lowercase

import msgspec

from journal import events
from journal.events import AnyEvent, Decision, KvLimits, Limits, ModelFacts, PlannedBlock
from tests.unit.core_driver import LIMITS, MODEL, CoreDriver, only

BLOCK = 16
"""Tokens in a block."""

KV = KvLimits(
    block_tokens=BLOCK,
    max_bytes=100_000_000,
    memory_bytes=0,
    writing_bytes=10_000_000,
    reserve_bytes=0,
    max_age_ns=0,
    state_every_blocks=0,
    await_ns=1_000_000,
)
KV_LIMITS = msgspec.structs.replace(LIMITS, kv=KV)
STATEFUL = msgspec.structs.replace(MODEL, state_bytes=20_000)
"""A state takes more than one block, so that one is kept at every second boundary."""

BLOCK_BYTES = BLOCK * MODEL.kv_bytes_per_token
DOMAIN = "d" * 64


def kv_limits(limits: Limits = LIMITS, **changes: int) -> Limits:
    """Limits with saved KV, and what is to be different of it."""
    return msgspec.structs.replace(limits, kv=msgspec.structs.replace(KV, **changes))


def names_of(text: str) -> tuple[str, ...]:
    """The hashes of a chain whose blocks are these letters: each names all that is before it."""
    return tuple(text[: end + 1] for end in range(len(text)))


def ready(model: ModelFacts = MODEL, domain: str = DOMAIN) -> events.EngineReady:
    """The engine has loaded its model, and its KV can be saved."""
    return events.EngineReady(model=model, one_row_only=False, note="", load_ns=1, kv_domain=domain)


class KvDriver(CoreDriver):
    """`plans` are the saves that are planned and have not been answered, in their order."""

    PREFIX = ""
    """Before the letter that names a request."""

    def __init__(self, limits: Limits = KV_LIMITS, model: ModelFacts = MODEL) -> None:
        super().__init__(limits, model)
        self.plans: list[PlannedBlock] = []
        self.start()

    def start(self) -> None:
        self.plans = []
        self.begin_run()
        self.step(ready(self.model))

    def step(self, *facts: AnyEvent) -> list[Decision]:
        decisions = super().step(*facts)
        for planned in only(decisions, events.BlockSavePlanned):
            self.plans += planned.blocks
        return decisions

    def named(self, name: str, chain: str, first: int = 0) -> events.BlocksNamed:
        """The names of a request's blocks: a letter each."""
        return events.BlocksNamed(request_id=name, first=first, hashes=names_of(chain)[first:])

    def ask(
        self,
        chain: str,
        more_tokens: int = 0,
        *,
        max_tokens: int = 100,
        suffix_tokens: int = 0,
        keep_output: bool = True,
    ) -> list[Decision]:
        """A request whose prompt has these blocks and some tokens more. Number 1 is named a."""
        number = self.state.next_number
        name = self.PREFIX + ascii_lowercase[number - 1]
        arrival = self.receive(len(chain) * BLOCK + more_tokens, max_tokens, name=name)
        arrival = msgspec.structs.replace(
            arrival, num_suffix_tokens=suffix_tokens, keep_output=keep_output
        )
        named = [self.named(arrival.request_id, chain)] if chain else []
        return self.step(arrival, *named)

    def saved(self, planned: PlannedBlock, num_bytes: int = 0) -> events.BlockSaved:
        """A writer is done with this one."""
        size = BLOCK_BYTES if planned.part == "block" else self.model.state_bytes
        return events.BlockSaved(
            hash=planned.hash, part=planned.part, saved_bytes=num_bytes or size, duration_ns=1
        )

    def save_all(self) -> None:
        """The writers are done with everything that is planned."""
        while self.plans:
            self.step(self.saved(self.plans.pop(0)))

    def restored(self, name: str, num_tokens: int = -1, num_memory_tokens: int = 0) -> AnyEvent:
        """The row holds what was asked for, or less."""
        [command] = [
            r.event
            for r in reversed(self.records)
            if isinstance(r.event, events.RequestAdmitted | events.ResumeStarted)
            and r.event.request_id == name
        ][:1]
        num_tokens = command.num_cached_tokens if num_tokens < 0 else num_tokens
        return events.ChainRestored(
            request_id=name,
            number=command.number,
            num_tokens=num_tokens,
            num_memory_tokens=num_memory_tokens,
            num_disk_tokens=num_tokens - num_memory_tokens,
            read_bytes=0,
            duration_ns=1,
        )

    def finish(self, name: str) -> list[Decision]:
        """The request puts out one token more, its last; its row is freed."""
        decisions = self.step(self.decoded(**{name: "stop"}))
        self.step(self.freed(name))
        return decisions

    def run(self, chain: str, more_tokens: int = 1, **details: int) -> str:
        """A request from its arrival to its end, with all that it saves; its name."""
        self.ask(chain, more_tokens, **details)  # pyright: ignore[reportArgumentType]
        name = self.PREFIX + ascii_lowercase[self.state.next_number - 2]
        if self.request(name).restoring:
            self.step(self.restored(name))
        self.prefill()
        self.finish(name)
        self.save_all()
        return name

    @property
    def on_disk(self) -> list[str]:
        """The blocks that the index knows, sorted."""
        return sorted(self.state.index.blocks)


def admitted(decisions: Sequence[AnyEvent]) -> events.RequestAdmitted:
    """The one admission among these."""
    [admission] = only(decisions, events.RequestAdmitted)
    return admission


def busy_with_blocks() -> KvDriver:
    """A run in which every kind of event about blocks has happened."""
    driver = KvDriver(kv_limits(max_bytes=6 * BLOCK_BYTES, memory_bytes=2 * BLOCK_BYTES))
    driver.run("xyz")
    driver.ask("xyabc", 1)
    driver.ask("xyabc", 1)
    driver.step(
        events.BlockCorrupt(hash="xy", part="block", reason="corrupt", detail=""),
        driver.restored("b", BLOCK),
    )
    driver.prefill()
    first, second = driver.plans[:2]
    driver.step(
        driver.saved(first),
        events.BlockSaveFailed(hash=second.hash, part="block", reason="disk_full", detail=""),
        events.SavingStopped(reason="disk_full", detail=""),
    )
    driver.step(
        events.StoreMeasured(free_bytes=9, num_swept=0, swept_bytes=0),
        events.SavingResumed(stopped_ns=1),
        events.BlocksLost(hashes=("x",), states=("x",), reason="missing"),
        events.ClearRequested(by="test"),
    )
    driver.step(events.ClockTicked())
    return driver
