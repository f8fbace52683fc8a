"""What came of a number of requests, from the records of a journal, whoever wrote them: a server,
or a what-if.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from journal import events
from journal.events import Record
from scheduler.request import Phase
from scheduler.whatif.carried import open_requests, state_of

NS_PER_MS = 1_000_000

End = (
    events.RequestFinished
    | events.RequestCancelled
    | events.RequestAborted
    | events.RequestRejected
    | events.RequestJoined
)
HELD = (Phase.PAUSED, Phase.RESUMING)

OUTCOMES: dict[type[End], str] = {
    events.RequestFinished: "finished",
    events.RequestCancelled: "cancelled",
    events.RequestAborted: "aborted",
    events.RequestRejected: "rejected",
    events.RequestJoined: "joined",
}


class Totals(msgspec.Struct, kw_only=True, frozen=True):
    """The numbers that are compared. Times are milliseconds; null where nothing was measured.

    `requests` came, or were open where the journal begins, which is when they are taken to come.
    `total_ms` is from the first arrival to the last end, `held_ms` the sum over all requests (one
    that is still held is so up to where the journal ends), `pauses` how often one was held;
    `first_token_p50_ms` and `_p99_ms` from arrival, `gap_p99_ms` and `gap_max_ms` between two
    tokens of a request that was not held meanwhile. `peak_bytes` is the most that a reading has
    told, or a chunk. `hit_tokens` of the finished prompts were restored, `prefilled_tokens`
    computed: of requests that came. `output_tokens` are of all.
    """

    requests: int
    finished: int
    cancelled: int
    aborted: int
    rejected: int
    joined: int
    pauses: int
    held_ms: int
    total_ms: int
    first_token_p50_ms: int | None
    first_token_p99_ms: int | None
    gap_p99_ms: int | None
    gap_max_ms: int | None
    peak_bytes: int | None
    hit_tokens: int
    prefilled_tokens: int
    output_tokens: int


@dataclass(slots=True)
class Counting:
    """Counts records of the requests that are wanted; of all without a choice. `carried` are those
    that were open before the first record, and whether they had put out anything.
    """

    wanted: frozenset[str] | None = None
    carried: dict[str, bool] = field(default_factory=dict[str, bool])
    counts: dict[str, int] = field(default_factory=dict[str, int])
    names: dict[int, str] = field(default_factory=dict[int, str])
    arrived_ns: dict[str, int] = field(default_factory=dict[str, int])
    held_since_ns: dict[str, int] = field(default_factory=dict[str, int])
    token_ns: dict[int, int] = field(default_factory=dict[int, int])
    first_token_ms: Counter[int] = field(default_factory=Counter[int])
    gaps_ms: Counter[int] = field(default_factory=Counter[int])
    held_ns: int = 0
    last_end_ns: int = 0
    last_ns: int = 0
    peak_bytes: int | None = None

    def take(self, record: Record) -> None:
        """One record."""
        event = record.event
        self.last_ns = max(self.last_ns, record.at_ns)
        match event:
            case events.RequestReceived() if self.is_wanted(event.request_id):
                self.arrive(event.number, event.request_id, record.at_ns)
            case events.StateCarried():
                self.carry(record.at_ns, event)
            case events.TokensDecoded():
                self.tokens(record.at_ns, event)
            case events.RequestPaused() if event.number in self.names:
                if event.request_id not in self.held_since_ns:
                    self.add("pauses", 1)
                self.held_since_ns.setdefault(event.request_id, record.at_ns)
                self.token_ns.pop(event.number, None)
            case events.RequestResumed() if event.number in self.names:
                self.release(event.request_id, record.at_ns)
            case events.MemorySampled():
                self.peak(max(event.active_bytes, event.peak_bytes))
            case events.PrefillChunkDone():
                self.peak(event.peak_bytes)
            case _ if isinstance(event, End) and event.request_id in self.arrived_ns:
                self.ended(record.at_ns, event)
            case _:
                pass

    def is_wanted(self, request_id: str) -> bool:
        return self.wanted is None or request_id in self.wanted

    def arrive(self, number: int, request_id: str, at_ns: int) -> None:
        """A request comes."""
        self.names[number] = request_id
        self.arrived_ns[request_id] = at_ns

    def carry(self, at_ns: int, event: events.StateCarried) -> None:
        """Requests that were open before come now."""
        for request in open_requests(state_of(event)):
            if self.is_wanted(request.request_id):
                self.carried[request.request_id] = request.num_output_tokens > 0
                self.arrive(request.number, request.request_id, at_ns)
                if request.phase in HELD:
                    self.held_since_ns[request.request_id] = at_ns

    def add(self, what: str, count: int) -> None:
        self.counts[what] = self.counts.get(what, 0) + count

    def peak(self, num_bytes: int) -> None:
        self.peak_bytes = max(self.peak_bytes or 0, num_bytes)

    def tokens(self, at_ns: int, event: events.TokensDecoded) -> None:
        """A decode step: first tokens, and what lies between two."""
        for number, count in zip(event.numbers, event.counts, strict=True):
            if count == 0 or number not in self.names:
                continue
            self.add("output", count)
            before_ns = self.token_ns.get(number)
            name = self.names[number]
            if before_ns is not None:
                self.gaps_ms[(at_ns - before_ns) // NS_PER_MS] += 1
            elif f"first:{name}" not in self.counts and not self.carried.get(name):
                self.counts[f"first:{name}"] = 1
                self.first_token_ms[(at_ns - self.arrived_ns[name]) // NS_PER_MS] += 1
            self.token_ns[number] = at_ns

    def ended(self, at_ns: int, event: End) -> None:
        """The end of a request that is counted."""
        if isinstance(event, events.RequestFinished) and event.request_id not in self.carried:
            self.add("hits", event.num_memory_tokens + event.num_disk_tokens)
            self.add("prefilled", event.num_prefilled_tokens)
        self.add(OUTCOMES[type(event)], 1)
        self.release(event.request_id, at_ns)
        self.last_end_ns = max(self.last_end_ns, at_ns)

    def release(self, request_id: str, at_ns: int) -> None:
        since_ns = self.held_since_ns.pop(request_id, None)
        self.held_ns += 0 if since_ns is None else at_ns - since_ns

    def still_held_ns(self, until_ns: int) -> int:
        """How long those are held by then that nothing has let go."""
        return sum(max(0, until_ns - since_ns) for since_ns in self.held_since_ns.values())

    def totals(self, until_ns: int | None = None) -> Totals:
        """What the records came to. What is still held is so until then; until the last record
        without a time.
        """
        held_ns = self.held_ns + self.still_held_ns(self.last_ns if until_ns is None else until_ns)
        began_ns = min(self.arrived_ns.values(), default=0)
        return Totals(
            requests=len(self.arrived_ns),
            finished=self.counts.get("finished", 0),
            cancelled=self.counts.get("cancelled", 0),
            aborted=self.counts.get("aborted", 0),
            rejected=self.counts.get("rejected", 0),
            joined=self.counts.get("joined", 0),
            pauses=self.counts.get("pauses", 0),
            held_ms=held_ns // NS_PER_MS,
            total_ms=max(0, self.last_end_ns - began_ns) // NS_PER_MS,
            first_token_p50_ms=percentile(self.first_token_ms, 50),
            first_token_p99_ms=percentile(self.first_token_ms, 99),
            gap_p99_ms=percentile(self.gaps_ms, 99),
            gap_max_ms=percentile(self.gaps_ms, 100),
            peak_bytes=self.peak_bytes,
            hit_tokens=self.counts.get("hits", 0),
            prefilled_tokens=self.counts.get("prefilled", 0),
            output_tokens=self.counts.get("output", 0),
        )


def totals_of(records: Iterable[Record], wanted: frozenset[str] | None = None) -> Totals:
    """Of all requests in these records, or of those with the ids that are wanted."""
    counting = Counting(wanted)
    for record in records:
        counting.take(record)
    return counting.totals()


def percentile(counts: Counter[int], percent: int) -> int | None:
    """The smallest value that so many in a hundred do not exceed."""
    left = -(-counts.total() * percent // 100)
    for value in sorted(counts):
        left -= counts[value]
        if left <= 0:
            return value
    return None
