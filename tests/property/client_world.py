"""A random world whose clients leave, come back and send their requests again, and whose server is
stopped with a drain and started with each setting of what becomes of those that it finds.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import msgspec

from journal import events
from journal.events import OrphanLimits
from scheduler import effects
from tests.property.fake_world import LIMITS
from tests.property.hold_world import CEILING, HoldWorld, short
from tests.property.kv_world import PLAIN, STATEFUL, KvSetup, saving
from tests.unit.core_driver import only

STEP_NS = 1_000
ORPHANS = OrphanLimits(
    grace_ns=60 * STEP_NS,
    restart_grace_ns=300 * STEP_NS,
    on_restart="resume",
    adopt=True,
    retention_ns=200 * STEP_NS,
)


def looked_after(limits: events.Limits, **changes: Any) -> events.Limits:
    """Limits under which clients are looked after."""
    return msgspec.structs.replace(limits, orphans=msgspec.structs.replace(ORPHANS, **changes))


ROOMY = saving(LIMITS)
SHORT = short(saving(CEILING))
SETUPS = (
    KvSetup(looked_after(ROOMY), PLAIN, PLAIN),
    KvSetup(looked_after(SHORT), PLAIN, PLAIN),
    KvSetup(looked_after(SHORT, on_restart="hold"), PLAIN, PLAIN),
    KvSetup(looked_after(SHORT, on_restart="cancel"), PLAIN, PLAIN),
    KvSetup(looked_after(SHORT, on_restart="hold"), STATEFUL, STATEFUL, domain="stateful"),
    KvSetup(looked_after(SHORT, adopt=False, retention_ns=0), PLAIN, PLAIN),
    KvSetup(looked_after(LIMITS), PLAIN, PLAIN, domain=""),
    KvSetup(looked_after(short(CEILING), grace_ns=0), PLAIN, PLAIN, domain=""),
    KvSetup(SHORT, PLAIN, PLAIN),
)


@dataclass(frozen=True)
class Sent:
    """What a client asked, to be sent again."""

    labels: tuple[str, ...]
    more_tokens: int
    max_tokens: int | None
    stop_in: int
    key: str
    session: str

    @property
    def content(self) -> str:
        """What tells it from others, without who asks."""
        return f"{'/'.join(self.labels)} {self.more_tokens} {self.max_tokens}"


class ClientWorld(HoldWorld):
    """`followers` counts who follows each request, as the streams do; `sent` is what each asked."""

    def __init__(self, setup: KvSetup = SETUPS[0]) -> None:
        self.followers: Counter[str] = Counter()
        self.sent: dict[str, Sent] = {}
        self.adopters: dict[str, str] = {}
        self.num_keys = 0
        super().__init__(setup)

    # Clients

    def send(self, letters: str, more_tokens: int, max_tokens: int, stop_in: int, who: int) -> None:
        """Somebody asks something, with a key, in a session, or neither."""
        key = ""
        if who % 4 == 0:
            self.num_keys += 1
            key = f"key {self.num_keys}"
        session = "session" if who % 3 == 0 else ""
        self.deliver(Sent(tuple(letters), more_tokens, max_tokens, stop_in, key, session))

    def ask(
        self, letters: str, more_tokens: int, max_tokens: int | None, stop_in: int, suffix: int
    ) -> None:
        """What crowds ask: nobody of them has a key or a session."""
        super().ask(letters, more_tokens, max_tokens, stop_in, suffix)
        self.follow_new(Sent(tuple(letters), more_tokens, max_tokens, stop_in, "", ""))

    def deliver(self, sent: Sent) -> None:
        """It is on its way to the scheduler."""
        self.receive([*sent.labels], sent.more_tokens, sent.max_tokens, sent.stop_in, 3)
        self.follow_new(sent)

    def follow_new(self, sent: Sent) -> None:
        """The newest arrival is this, and its client waits."""
        arrival = self.said[-1]
        assert isinstance(arrival, events.RequestReceived)
        self.said[-1] = msgspec.structs.replace(
            arrival,
            content_digest=sent.content,
            session_digest=sent.session,
            key_digest=sent.key,
        )
        self.sent[arrival.request_id] = sent
        self.followers[arrival.request_id] = 1

    def leave(self, which: int) -> None:
        """One of those who follow a request leaves."""
        names = [name for name, count in self.followers.items() if count]
        if names:
            name = names[which % len(names)]
            self.followers[name] -= 1
            if self.followers[name] == 0:
                self.say_of_client(events.ClientGone(request_id=name))

    def come(self, which: int) -> None:
        """Somebody follows a request by its id."""
        self.follow_it(self.name_of(which))

    def follow_it(self, name: str) -> None:
        self.followers[name] += 1
        if self.followers[name] == 1:
            self.say_of_client(events.ClientAttached(request_id=name))

    def say_of_client(self, fact: events.ClientGone | events.ClientAttached) -> None:
        """The last that nobody has looked at counts; of requests that are not there nothing is."""
        said = [*only(self.said, events.ClientGone), *only(self.said, events.ClientAttached)]
        for other in said:
            if other.request_id == fact.request_id:
                self.said.remove(other)
        self.said.append(fact)

    def lose_client(self, which: int) -> None:
        self.leave(which)

    def send_again(self, which: int) -> None:
        """A request is sent once more: by a client that was cut off, or by another like it."""
        if self.sent:
            self.deliver([*self.sent.values()][-1 - which % min(8, len(self.sent))])

    def reuse_key(self, which: int) -> None:
        """Another question with a key that was used."""
        keyed = [sent for sent in self.sent.values() if sent.key]
        if keyed:
            first = keyed[which % len(keyed)]
            self.deliver(Sent((*first.labels, "b"), 1, 9, 3, first.key, first.session))

    # The server

    def restart(self, setup: Any) -> None:
        self.followers.clear()
        super().restart(setup)

    def drain(self, setup: KvSetup) -> None:
        """A stop that holds what does not finish in time, and the next start."""
        self.said.append(events.ServerStopping(reason="SIGTERM"))
        self.run(3)
        self.said.append(events.DrainEnded())
        for _ in range(400):
            self.run(1)
            if not self.state.admitted and not self.state.index.writing_bytes:
                break
        else:
            raise AssertionError("a stop comes to its end")
        self.restart(setup)

    # What must hold

    def collect(self, most: int, results_first: bool = False) -> bool:
        first = len(self.driver.records)
        self.said = [fact for fact in self.said if self.is_fact(fact)]
        stepped = super().collect(most, results_first)
        decided = [record.event for record in self.driver.records[first:]]
        joined, adopted = only(decided, events.RequestJoined), only(decided, events.RequestAdopted)
        pairs = [(event.request_id, event.joined_id, event.by) for event in joined]
        assert pairs == [(event.adopter_id, event.request_id, event.by) for event in adopted]
        for pair in pairs:
            self.check_joined(*pair)
        return stepped

    def is_fact(self, fact: events.AnyEvent) -> bool:
        """What the sensors leave out: clients of requests that have ended."""
        if not isinstance(fact, events.ClientGone | events.ClientAttached):
            return True
        name = fact.request_id
        coming = [arrival.request_id for arrival in only(self.said, events.RequestReceived)]
        attached = isinstance(fact, events.ClientAttached)
        is_known = name in self.state.numbers or name in coming
        return is_known or (attached and name in self.state.remembered)

    def check_joined(self, arrival: str, name: str, by: str) -> None:
        """It is the same request; by what it asks it is one that nobody follows. Its client follows
        that one from here on.
        """
        first, again = self.sent[name], self.sent[arrival]
        assert first.content == again.content
        assert first.key == again.key
        if by == "content":
            assert not again.key
            assert first.session == again.session
            assert self.followers[name] == 0, "it has its client"
        if self.followers.pop(arrival, 0):
            self.follow_it(name)

    def wants_release(self, name: str) -> bool:
        """Whether somebody would let it go on at the end: time ends those that nobody follows."""
        number = self.state.numbers[name]
        has_time = number in self.state.lost or number in self.state.found
        return self.followers[name] > 0 or not has_time

    def settle(self) -> None:
        """Those who are followed finish; time ends those that nobody follows."""
        self.engine.ballast = 0
        self.disk.heal()
        if self.state.stopping:
            self.restart(self.setup)
        self.collect(0)
        open_names = list(self.state.numbers)
        followed = [name for name in open_names if self.followers[name]]
        self.said += [
            events.ReleaseRequested(request_id=name)
            for name in open_names
            if self.wants_release(name)
        ]
        first = len(self.driver.records)
        self.rest()
        for record in self.driver.records[first:]:
            if isinstance(record.event, events.RequestCancelled):
                name = record.event.request_id
                assert name not in followed or record.event.reason == "deadline"

    def rest(self) -> None:
        self.sample()
        for _ in range(4):
            super(HoldWorld, self).settle()
            self.engine.ballast = 0
            self.sample()
            self.sample()
        super(HoldWorld, self).settle()

    def count_ends(self) -> None:
        super().count_ends()
        for effect in self.driver.effects:
            if isinstance(effect, effects.JoinRequest):
                self.ends[effect.request_id] += 1
