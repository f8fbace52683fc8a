"""Drives the core while memory is short and requests are held: a test plays the engine, the writers
and the readings of memory.
"""

from collections.abc import Sequence

import msgspec

from journal import events
from journal.events import AnyEvent, Decision, Limits, ModelFacts
from scheduler.request import Phase
from tests.unit.core_driver import LIMITS, MEMORY, MODEL, kinds, only
from tests.unit.kv_driver import BLOCK, KV, KvDriver

CEILING = 2_000_000
"""Low mark 1,600,000, high mark 1,840,000 (left below 1,760,000), emergency mark 2,000,000 (left
below 1,920,000).
"""
FINE, HIGH, EMERGENCY = 1_300_000, 1_850_000, 2_010_000
"""Readings: under every mark, over the high mark, over the emergency mark."""

SMALL = msgspec.structs.replace(MODEL, kv_step_tokens=BLOCK)
"""A row takes 16,000 bytes for each 16 tokens that it has begun."""

HOLD_MEMORY = msgspec.structs.replace(MEMORY, growth_tokens=16)


def hold_limits(limits: Limits = LIMITS, /, **changes: object) -> Limits:
    """Limits with saved KV and marks; `changes` are of memory, of saved KV, or of the rest."""
    fields = {"kv": KV, "memory": HOLD_MEMORY, "ceiling_bytes": CEILING}
    for name, value in changes.items():
        for part, kind in (("kv", KV), ("memory", HOLD_MEMORY)):
            if name in kind.__struct_fields__:
                fields[part] = msgspec.structs.replace(fields[part], **{name: value})
                break
        else:
            fields[name] = value
    return msgspec.structs.replace(limits, **fields)


class HoldDriver(KvDriver):
    """Requests are named req_a, req_b and so on, as the names of tails want it."""

    PREFIX = "req_"

    def __init__(self, limits: Limits | None = None, model: ModelFacts = SMALL) -> None:
        super().__init__(hold_limits() if limits is None else limits, model)

    def decode(self, *chains: str, more_tokens: int = 1, max_tokens: int = 100) -> None:
        """Requests with these chains and some tokens more, fed, saved and in the batch."""
        for chain in chains:
            self.ask(chain, more_tokens, max_tokens=max_tokens)
            self.feed()
        self.save_all()

    def feed(self) -> None:
        """Feeds every chunk, with a decode step of the running rows after each."""
        while self.state.chunk is not None:
            self.step(self.chunk_done())
            if self.state.chunk is None and self.state.batch_rows:
                self.step(self.decoded())

    # Readings

    def sampled(
        self, active_bytes: int, cached_bytes: int = 0, available_bytes: int = 0
    ) -> events.MemorySampled:
        """A reading."""
        return events.MemorySampled(
            active_bytes=active_bytes,
            cached_bytes=cached_bytes,
            peak_bytes=active_bytes,
            process_bytes=active_bytes,
            available_bytes=available_bytes,
        )

    def press(self, active_bytes: int = HIGH, cached_bytes: int = 0) -> list[Decision]:
        """Two readings; what the second of them led to. The first must lead to nothing."""
        reading = self.sampled(active_bytes, cached_bytes)
        first = self.step(reading)
        assert first == [], f"one reading led to {kinds(first)}"
        return self.step(reading)

    def reclaimed(self, freed_bytes: int, active_bytes: int = HIGH) -> events.MemoryReclaimed:
        """The allocator gave back what it kept."""
        return events.MemoryReclaimed(
            freed_bytes=freed_bytes, active_bytes=active_bytes, cached_bytes=0, duration_ns=1
        )

    def pass_ns(self, duration_ns: int) -> None:
        """The next step is so much later."""
        self.now_ns += duration_ns

    # Pausing and going on

    def hold(self, name: str) -> list[Decision]:
        """An operator asks to hold this request."""
        return self.step(events.HoldRequested(request_id=name))

    def release(self, name: str) -> list[Decision]:
        """An operator lets it go on."""
        return self.step(events.ReleaseRequested(request_id=name))

    def tail_saved(self, name: str) -> events.ChainSaved:
        """The writers are done with what the row holds behind its last whole block."""
        request = self.request(name)
        assert request.tail_planned, f"no tail of {name} is planned"
        end = request.num_cached_tokens
        num_bytes = (end - request.tail_start) * self.model.kv_bytes_per_token
        return events.ChainSaved(
            request_id=name,
            number=request.number,
            tail_start=request.tail_start,
            num_tokens=end,
            tail_bytes=num_bytes + self.model.state_bytes,
            duration_ns=1,
        )

    def tail_failed(self, name: str, reason: str = "io_error") -> AnyEvent:
        """The tail came to nothing."""
        fields = {"request_id": name, "number": self.number(name), "reason": reason, "detail": ""}
        return msgspec.convert(fields, events.ChainSaveFailed)

    def tail_lost(self, name: str) -> events.ChainRestoreFailed:
        """The tail cannot be read."""
        return events.ChainRestoreFailed(
            request_id=name, number=self.number(name), reason="corrupt", detail=""
        )

    def come_to_rest(self, name: str) -> None:
        """Writers and engine do what is left of a pause that has begun; the row is freed."""
        self.save_all()
        if self.request(name).phase is Phase.PAUSING:
            self.step(self.tail_saved(name))
        assert self.request(name).phase is Phase.PAUSED
        if self.number(name) in self.state.leaving:
            self.step(self.freed(name))

    def pause(self, name: str) -> None:
        """Holds this request by hand, until its row is freed."""
        self.hold(name)
        self.come_to_rest(name)


def phases(driver: HoldDriver) -> dict[str, str]:
    """Where each open request is."""
    return {r.request_id: r.phase.value for r in driver.state.requests.values()}


def running(*chains: str, **changes: object) -> HoldDriver:
    """Requests with these chains in the batch."""
    driver = HoldDriver(hold_limits(**changes))
    driver.decode(*chains)
    return driver


def victims(decisions: Sequence[AnyEvent]) -> list[int]:
    """Whose pause begins."""
    return [d.number for d in only(decisions, events.PauseStarted)]


def decoded(driver: HoldDriver, times: int) -> None:
    """So many steps of all rows, and what they save."""
    for _ in range(times):
        driver.step(driver.decoded())
    driver.save_all()


def long_chain(num_blocks: int) -> str:
    """A chain of so many blocks, unlike one of another length."""
    return "".join(chr(1_000 * num_blocks + number) for number in range(num_blocks))


def paused(*chains: str, limits: Limits | None = None) -> HoldDriver:
    """Requests with these chains, all of them held by hand."""
    driver = HoldDriver(limits)
    driver.decode(*chains)
    for name in [r.request_id for r in driver.state.requests.values()]:
        driver.pause(name)
    return driver


def release_all(driver: HoldDriver) -> list[Decision]:
    """Releases everybody in one step."""
    names = [r.request_id for r in driver.state.requests.values() if r.hold]
    return driver.step(*(events.ReleaseRequested(request_id=name) for name in names))
