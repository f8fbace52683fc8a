"""Drives the core while clients leave, come back and send their requests again."""

import msgspec

from journal import events
from journal.events import AnyEvent, Decision, Limits, OrphanLimits
from scheduler.deadlines import deadline_ns
from tests.unit.core_driver import LIMITS, only
from tests.unit.hold_driver import HoldDriver, hold_limits

SECOND = 1_000_000_000
ORPHANS = OrphanLimits(
    grace_ns=60 * SECOND,
    restart_grace_ns=1_800 * SECOND,
    on_restart="resume",
    adopt=True,
    retention_ns=3_600 * SECOND,
)


def orphan_limits(limits: Limits = LIMITS, /, **changes: object) -> Limits:
    """Limits with saved KV, marks and clients that are looked after; `changes` are of any part."""
    about_orphans = {n: v for n, v in changes.items() if n in OrphanLimits.__struct_fields__}
    others = {name: value for name, value in changes.items() if name not in about_orphans}
    orphans = {"orphans": msgspec.structs.replace(ORPHANS, **about_orphans)}
    return hold_limits(limits, **orphans | others)


class OrphanDriver(HoldDriver):
    """What a request asks is known by the letters of its prompt."""

    def __init__(self, limits: Limits | None = None, /, **changes: object) -> None:
        super().__init__(orphan_limits(**changes) if limits is None else limits)

    def start(self, **changes: object) -> None:
        """Begins a run; with changes its limits are other ones."""
        if changes:
            self.limits = orphan_limits(**changes)
        super().start()

    def sent(
        self,
        chain: str = "x",
        *,
        key: str = "",
        session: str = "",
        max_tokens: int | None = 100,
        more: int = 0,
    ) -> list[AnyEvent]:
        """A request with this prompt and one token more, with its names. `more` numbers those that
        arrive in one step.
        """
        number = self.state.next_number + more
        name = self.name_of(number)
        arrival = self.receive(len(chain) * 16 + 1, max_tokens, name=name)
        arrival = msgspec.structs.replace(
            arrival,
            number=number,
            content_digest=f"content {chain}",
            session_digest=session and f"session {session}",
            key_digest=key and f"key {key}",
        )
        return [arrival, *([self.named(name, chain)] if chain else [])]

    def send(self, chain: str = "x", **details: object) -> list[Decision]:
        """A request arrives alone."""
        return self.step(*self.sent(chain, **details))  # pyright: ignore[reportArgumentType]

    def decode_sent(self, *chains: str, **details: object) -> None:
        """Requests with these prompts, fed, saved and in the batch."""
        for chain in chains:
            self.send(chain, **details)
            self.feed()
        self.save_all()

    # Clients

    def gone(self, *names: str) -> list[Decision]:
        """Nobody follows these any more."""
        return self.step(*(events.ClientGone(request_id=name) for name in names))

    def attached(self, name: str) -> list[Decision]:
        """Somebody follows it again."""
        return self.step(events.ClientAttached(request_id=name))

    def lose(self, *names: str) -> None:
        """Their clients leave, and their rows come to rest."""
        for name in names:
            self.gone(name)
            if self.number(name) in self.state.admitted:
                self.come_to_rest(name)

    def tick(self, seconds: int = 0) -> list[Decision]:
        """Time passes, and acts."""
        self.pass_ns(seconds * SECOND)
        return self.step(events.ClockTicked())

    # The engine and the writers by themselves

    def work(self) -> bool:
        """One piece of work that is there to be done; whether there was any."""
        state = self.state
        if self.plans:
            self.step(self.saved(self.plans.pop(0)))
        elif state.leaving:
            self.step(self.freed(self.name_of(next(iter(state.leaving)))))
        elif rows := [r.request_id for r in state.requests.values() if r.restoring]:
            self.step(self.restored(rows[0]))
        elif tails := [self.name_of(number) for number in state.index.writing_tails]:
            self.step(self.tail_written(tails[0]))
        elif state.chunk is not None:
            self.step(self.chunk_done())
        elif state.batch_rows:
            rows = [state.requests[number] for number in state.batch_rows]
            last = [row for row in rows if row.num_output_tokens + 1 == row.max_tokens]
            self.step(self.decoded(**{row.request_id: "length" for row in last}))
        else:
            return False
        return True

    def tail_written(self, name: str) -> AnyEvent:
        """What the writers say of a tail: there is none where the row has failed meanwhile."""
        request = self.state.find(name)
        is_there = request is not None and request.tail_planned
        return self.tail_saved(name) if is_there else self.tail_failed(name, "not_taken")

    def settle(self) -> None:
        """Works until nothing is left to do. Time brings what is due now, and does not pass."""
        for _ in range(2_000):
            due_ns = deadline_ns(self.state)
            if due_ns is not None and due_ns <= self.now_ns:
                self.step(events.ClockTicked())
            elif not self.work():
                return
        raise AssertionError("it does not come to rest")

    def name_of(self, number: int) -> str:
        """The id of the request with this number, also when it has ended."""
        return f"req_{chr(ord('a') + number - 1)}"

    # What came of it

    @property
    def joined(self) -> dict[str, str]:
        """Which arrival is which request."""
        found = only([record.event for record in self.records], events.RequestJoined)
        return {event.request_id: event.joined_id for event in found}

    @property
    def ends(self) -> dict[str, str]:
        """How requests ended."""
        ended: dict[str, str] = {}
        for event in (record.event for record in self.records):
            match event:
                case events.RequestFinished() | events.RequestCancelled() | events.RequestAborted():
                    ended[event.request_id] = event.reason
                case _:
                    pass
        return ended
