"""The rows of requests without a client say what the scheduler knows of them, whatever happens."""

import msgspec
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from journal import events
from journal.events import AnyEvent, OrphanLimits
from journal.projections import Projection
from journal.rows import AdoptionRow, OpenRows, OrphanRow, RequestRow
from scheduler.request import Request
from tests.unit.core_driver import LIMITS, CoreDriver, engine_ready

SECOND_NS = 10**9
NAMES = st.integers(1, 6).map(lambda number: f"req_{number}")
ABOUT_CLIENTS = st.one_of(
    st.builds(events.ClientGone, request_id=NAMES),
    st.builds(events.ClientGone, request_id=NAMES),
    st.builds(events.ClientAttached, request_id=NAMES),
    st.builds(events.ReleaseRequested, request_id=NAMES),
    st.builds(events.HoldRequested, request_id=NAMES),
    st.builds(events.CancelRequested, request_id=NAMES),
)
CLIENTS = st.builds(
    OrphanLimits,
    grace_ns=st.sampled_from([0, 5 * SECOND_NS, 5 * SECOND_NS]),
    restart_grace_ns=st.just(20 * SECOND_NS),
    on_restart=st.sampled_from(["resume", "hold", "cancel"]),
    adopt=st.just(True),
    retention_ns=st.just(30 * SECOND_NS),
)


class Core(RuleBasedStateMachine):
    """A core whose engine and clients are played, and the projection of what it has recorded."""

    num_orphans = 0

    @initialize(clients=CLIENTS)
    def begin(self, clients: OrphanLimits) -> None:
        self.core = CoreDriver(msgspec.structs.replace(LIMITS, orphans=clients))
        self.projection = Projection()
        self.requests: dict[int, RequestRow] = {}
        self.orphans: dict[tuple[int, int], OrphanRow] = {}
        self.adoptions: dict[int, AdoptionRow] = {}
        self.num_told = 0
        self.core.start()

    @rule(content=st.sampled_from("ab"), key=st.sampled_from(["", "", "k"]))
    def arrive(self, content: str, key: str) -> None:
        arrival = self.core.receive(3, 4)
        digests = {"content_digest": content, "key_digest": key}
        self.core.step(msgspec.structs.replace(arrival, **digests))

    @rule(facts=st.lists(ABOUT_CLIENTS, min_size=1, max_size=3))
    def know(self, facts: list[AnyEvent]) -> None:
        self.core.step(*facts)

    @precondition(lambda self: self.core.state.chunk is not None)
    @rule()
    def feed(self) -> None:
        self.core.step(self.core.chunk_done())

    @precondition(lambda self: self.core.state.batch_rows)
    @rule(stop=st.booleans())
    def decode(self, stop: bool) -> None:
        """One token for each; the first row may stop, and others end by their length."""
        rows = [self.core.state.requests[number] for number in self.core.state.batch_rows]
        ends = {row.request_id: "stop" for row in rows[: int(stop)]}
        full = [row for row in rows if row.num_output_tokens + 1 == row.max_tokens]
        ends |= {row.request_id: "length" for row in full}
        self.core.step(self.core.decoded(**ends))

    @precondition(lambda self: self.core.state.leaving)
    @rule()
    def free(self) -> None:
        """The engine lets the rows go that were dropped."""
        names = [f"req_{number}" for number in self.core.state.leaving]
        self.core.step(*(self.core.freed(name) for name in names))

    @rule(seconds=st.integers(1, 40))
    def wait(self, seconds: int) -> None:
        self.core.now_ns += seconds * SECOND_NS
        self.core.step(events.ClockTicked())

    @rule(clients=CLIENTS)
    def restart(self, clients: OrphanLimits) -> None:
        """Another process finds the rows that were open, with other settings perhaps."""
        self.core.limits = msgspec.structs.replace(LIMITS, orphans=clients)
        self.projection = reopened(self.projection)
        self.core.begin_run()
        self.core.step(engine_ready())

    @invariant()
    def the_same_clients_are_missed(self) -> None:
        self.tell()
        state = self.core.state
        still_open = {row.number: row for row in self.orphans.values() if row.outcome == "open"}
        for number, request in state.requests.items():
            until_ns = state.lost.get(number, state.found.get(number))
            row = still_open.pop(number, None)
            assert seen(row) == known(request, until_ns)
        assert not still_open, "nobody who has ended misses a client"

    @invariant()
    def times_without_a_client_add_up(self) -> None:
        for number, request in self.requests.items():
            rows = [row for row in self.orphans.values() if row.number == number]
            over = [row.ended_ns - row.lost_ns for row in rows if row.ended_ns is not None]
            assert (request.num_orphaned, request.orphaned_ns) == (len(rows), sum(over))

    @invariant()
    def who_joined_has_adopted(self) -> None:
        joined = [row for row in self.requests.values() if row.outcome == "joined"]
        pairs = [(row.adopter_number, row.request_id) for row in self.adoptions.values()]
        assert sorted((row.number, row.joined_id) for row in joined) == sorted(pairs)
        for row in self.adoptions.values():
            ended_ns = self.requests[row.number].ended_ns
            was_over = ended_ns is not None and ended_ns < row.at_ns
            assert (row.phase == "finished") == was_over

    def teardown(self) -> None:
        Core.num_orphans += len(self.orphans)

    def tell(self) -> None:
        """Folds what is new, as the commits of the journal do."""
        for record in self.core.records[self.num_told :]:
            self.projection.apply(record)
        self.num_told = len(self.core.records)
        changes = self.projection.take_changes(self.num_told)
        if changes is not None:
            self.requests.update(changes.requests)
            self.orphans.update(changes.orphans)
            self.adoptions.update(changes.adoptions)


def reopened(projection: Projection) -> Projection:
    """The projection as a process finds it whose predecessor was killed."""
    rows = msgspec.json.decode(msgspec.json.encode(projection.open_rows()), type=OpenRows)
    again = Projection()
    again.restore(rows)
    return again


def known(request: Request, until_ns: int | None) -> tuple[object, ...] | None:
    """What the scheduler knows of the client that a request misses."""
    if request.orphaned_by is None:
        return None
    return (request.orphaned_by, request.orphaned_ns, request.needs_client, until_ns)


def seen(row: OrphanRow | None) -> tuple[object, ...] | None:
    """The same, as the journal has it."""
    if row is None:
        return None
    return (row.orphaned_by, row.lost_ns, bool(row.needs_client), row.until_ns)


def test_the_journal_and_the_scheduler_miss_the_same_clients() -> None:
    limits = settings(
        max_examples=40,
        stateful_step_count=30,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
    # Raises an AssertionError with the steps that lead to a difference.
    run_state_machine_as_test(Core, settings=limits)
    assert Core.num_orphans, "clients were lost in these stories"
