"""Plain numbers that the loop counts and others only read: HTTP shows them at /metrics."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from journal import events
from journal.events import AnyEvent, Record, RequestFinished
from scheduler.pace import Pace
from scheduler.request import Phase
from scheduler.state import SchedulerState
from scheduler.views import NO_MEMORY, MemoryView, view_memory

End = events.RequestFinished | events.RequestCancelled | events.RequestAborted

MemoryEvent = (
    events.ServerStarted
    | events.EngineReady
    | events.MemorySampled
    | events.MemoryReclaimed
    | events.ReclaimStarted
)

ClientEvent = (
    events.ServerStarted
    | events.ClientGone
    | events.ClientAttached
    | events.RequestAdopted
    | events.RequestFinished
    | events.RequestCancelled
    | events.RequestAborted
)
"""Beside these nothing changes how many requests have no client."""

NOBODY_CAME = ("client_gone", "nobody_attached")

STEP_BOUNDS_NS = (
    100_000,
    250_000,
    500_000,
    1_000_000,
    2_500_000,
    5_000_000,
    10_000_000,
    50_000_000,
    250_000_000,
    1_000_000_000,
)

HELD_BOUNDS_NS = tuple(
    seconds * 10**9 for seconds in (1, 5, 15, 60, 300, 900, 3600, 14_400, 86_400)
)


@dataclass(slots=True)
class Histogram:
    """`counts[i]` observations up to `bounds[i]`, each counted once; the last are above all."""

    bounds: tuple[int, ...]
    counts: list[int] = field(default_factory=list[int])
    total: int = 0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: int) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class Metrics:
    """Counts since the process began, except where a name says otherwise. What was refused at its
    arrival is in `requests_received` and `requests_ended`, and in nothing else.

    `requests_ended` counts by outcome and reason, as in "finished:length" or
    "rejected:queue_full". Of the prompts of finished requests so many tokens came from memory, from
    disk, and by prefill: together they are these prompts, as in the view `cache_hits`. `fed_tokens`
    are those that the engine fed in chunks, also again and for requests that did not finish. What
    was evicted, not saved or bad is counted by reason. `step_ns` is what scheduler and journal took
    for a step. `pauses` and `kv_drops` are counted by reason; `reclaimed_bytes` is what the
    allocator gave back as measured, and a negative reading counts as none; `held_ns` is how long
    requests had been held when they went on. `adoptions` counts requests that were sent again and
    are answered by another, by what they were known; `orphans_expired` those that were cancelled
    because nobody came back to them.

    Gauges: `num_waiting` (those that cannot run here and held ones with them), `num_held`,
    `num_pausing`, `num_resuming`, `num_admitted`, `batch_rows`, `reserved_bytes`, `active_bytes`,
    those of saved KV: `num_blocks`, `disk_bytes`, `hot_bytes` (in memory), `writing_bytes`, and
    those of `memory` as of the last reading, and `num_orphans`: open requests without a client.
    """

    requests_received: int = 0
    requests_ended: Counter[str] = field(default_factory=Counter[str])
    prompt_tokens: int = 0
    memory_hit_tokens: int = 0
    disk_hit_tokens: int = 0
    prefilled_tokens: int = 0
    fed_tokens: int = 0
    restores: int = 0
    evicted_blocks: Counter[str] = field(default_factory=Counter[str])
    evicted_bytes: Counter[str] = field(default_factory=Counter[str])
    saved_blocks: int = 0
    save_failures: Counter[str] = field(default_factory=Counter[str])
    bad_files: Counter[str] = field(default_factory=Counter[str])
    output_tokens: int = 0
    retries: int = 0
    steps: int = 0
    events: int = 0
    journal_full_waits: int = 0
    snapshots: int = 0
    decode_ns: int = 0
    step_ns: Histogram = field(default_factory=lambda: Histogram(STEP_BOUNDS_NS))
    pace: Pace = field(default_factory=Pace)
    pauses: Counter[str] = field(default_factory=Counter[str])
    kv_drops: Counter[str] = field(default_factory=Counter[str])
    resumes: int = 0
    reclaims: int = 0
    reclaimed_bytes: int = 0
    emergencies: int = 0
    held_ns: Histogram = field(default_factory=lambda: Histogram(HELD_BOUNDS_NS))
    adoptions: Counter[str] = field(default_factory=Counter[str])
    orphans_expired: int = 0
    memory: MemoryView = NO_MEMORY
    num_orphans: int = 0
    num_waiting: int = 0
    num_held: int = 0
    num_pausing: int = 0
    num_resuming: int = 0
    num_admitted: int = 0
    batch_rows: int = 0
    reserved_bytes: int = 0
    active_bytes: int = 0
    num_blocks: int = 0
    disk_bytes: int = 0
    hot_bytes: int = 0
    writing_bytes: int = 0

    def count(self, state: SchedulerState, records: Sequence[Record]) -> None:
        """Takes a committed step into account."""
        self.steps += 1
        self.events += len(records)
        prompts: dict[str, int] = {}
        for record in records:
            match record.event:
                case events.TokensDecoded(counts=counts, duration_ns=duration_ns):
                    self.output_tokens += sum(counts)
                    self.decode_ns += duration_ns
                case events.PrefillChunkDone(length=length, active_bytes=active_bytes):
                    self.fed_tokens += length
                    self.active_bytes = active_bytes
                case events.RequestReceived():
                    self.requests_received += 1
                    prompts[record.event.request_id] = record.event.num_prompt_tokens
                case events.RequestQueued(request_id=request_id):
                    self.prompt_tokens += prompts[request_id]
                case events.RequestRetried():
                    self.retries += 1
                case event:
                    self.count_end(event, record.at_ns)
                    self.count_kv(event)
                    self.count_holding(event, state)
        if any(isinstance(record.event, ClientEvent) for record in records):
            self.num_orphans = sum(r.orphaned_by is not None for r in state.requests.values())
        self.look(state)

    def look(self, state: SchedulerState) -> None:
        """Reads the gauges off the state."""
        self.num_waiting = len(state.waiting) + len(state.held) + len(state.paused)
        self.num_held = len(state.paused)
        self.num_pausing = len(state.pausing)
        self.num_admitted = len(state.admitted)
        if self.num_resuming:  # most steps have none, and each step comes here
            rows = [state.requests[number] for number in state.admitted]
            self.num_resuming = sum(row.phase is Phase.RESUMING for row in rows)
        self.batch_rows = len(state.batch_rows)
        self.reserved_bytes = state.reserved_bytes
        self.num_blocks = len(state.index.blocks)
        self.disk_bytes = state.index.disk_bytes
        self.hot_bytes = state.index.hot_bytes
        self.writing_bytes = state.index.writing_bytes

    def count_end(self, event: AnyEvent, at_ns: int) -> None:
        """Counts the event if it is an end."""
        if isinstance(event, End):
            self.pace.ended(at_ns)
        match event:
            case events.RequestFinished():
                self.requests_ended[f"finished:{event.reason}"] += 1
                self.count_prompt(event)
            case events.RequestCancelled():
                self.requests_ended[f"cancelled:{event.reason}"] += 1
                self.orphans_expired += event.reason in NOBODY_CAME
            case events.RequestJoined():
                self.adoptions[event.by] += 1
            case events.RequestAborted():
                self.requests_ended[f"aborted:{event.reason}"] += 1
            case events.RequestRejected():
                self.requests_ended[f"rejected:{event.reason}"] += 1
            case _:
                pass

    def count_holding(self, event: AnyEvent, state: SchedulerState) -> None:
        """Counts the event if it is about memory or a held request."""
        match event:
            case events.RequestPaused():
                self.pauses[event.reason] += 1
            case events.ResumeStarted():
                self.resumes += 1
                self.num_resuming += 1
                self.held_ns.observe(event.held_ns)
            case events.KvDropped():
                self.kv_drops[event.reason] += 1
            case events.MemoryReclaimed():
                self.reclaims += 1
                self.reclaimed_bytes += max(0, event.freed_bytes)
            case events.EmergencyDeclared():
                self.emergencies += 1
            case events.KvFreed(freed_bytes=freed_bytes):
                self.active_bytes -= min(self.active_bytes, max(0, freed_bytes))
            case _:
                pass
        is_read = state.memory.ceiling_bytes is not None
        if isinstance(event, MemoryEvent) or (is_read and isinstance(event, events.KvFreed)):
            self.active_bytes = state.memory.active_bytes
            self.memory = view_memory(state)

    def count_prompt(self, event: RequestFinished) -> None:
        """Where the tokens of a finished request's prompt came from."""
        self.memory_hit_tokens += event.num_memory_tokens
        self.disk_hit_tokens += event.num_disk_tokens
        self.prefilled_tokens += event.num_prefilled_tokens

    def count_kv(self, event: AnyEvent) -> None:
        """Counts the event if it is about saved KV."""
        match event:
            case events.ChainRestored():
                self.restores += 1
            case events.BlockSaved(part="block"):
                self.saved_blocks += 1
            case events.BlockSaveFailed():
                self.save_failures[event.reason] += 1
            case events.BlocksEvicted():
                if event.hashes:
                    self.evicted_blocks[event.reason] += len(event.hashes)
                self.evicted_bytes[event.reason] += event.freed_bytes
            case events.BlockCorrupt():
                self.bad_files[event.reason] += 1
            case events.BlocksLost():
                num_files = len(event.hashes) + len(event.states) + len(event.tails)
                self.bad_files[event.reason] += num_files
            case _:
                pass
