"""How long the engine and the disk take, fitted to what a journal has recorded of them.

A chunk costs so much to begin, for each token, and for each earlier position that a token attends
to. A decode step costs so much by itself, for each row, and for each position that is read. Both
are fitted by least squares with coefficients that are not negative: a term that would be is left
out. Errors are relative, so that the short ones are something beside the long ones; that makes the
sum too small where times vary, so it is scaled to the recorded sum.

What is fitted to is the time from the end of one piece of work to the end of the next one, as the
journal has it, and not what the engine says of each: so what the loop, the commits and a machine
that does other things add to it counts too. Where the engine waited for work, the time begins when
the work came; while a row is filled from saved files there is more than one kind of work, and
nothing is taken.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median

import numpy as np

from journal import events
from journal.events import Record
from scheduler.simulation.cost import DiskCost, EngineCost
from scheduler.whatif.carried import open_requests, state_of

LEAST_FACTS = 8
"""Fewer facts of a kind tell nothing: with fewer, the numbers of the fallback hold."""

MAX_GAP_FACTOR = 20
"""Between two steps there was more than a step when it took so many times the median."""

FALLBACK_NS = 1_000_000
FALLBACK_BYTES_PER_S = 1_000_000_000


@dataclass(frozen=True, slots=True)
class FittedCost(EngineCost):
    """Work in the fitted terms: a chunk waits for no reading of weights that is not in them."""

    def chunk_ns(self, start: int, length: int) -> int:
        attended = length * start + length * (length - 1) // 2
        return self.launch_ns + length * self.token_ns + attended * self.attend_ps // 1000


Terms = list[tuple[int, int, int]]


@dataclass(slots=True)
class Facts:
    """What is fitted to. Chunks are (start, length, ns), steps (rows, positions, ns), saves
    (begin, end, bytes), restores (disk bytes, memory tokens, ns).
    """

    chunks: Terms = field(default_factory=Terms)
    steps: Terms = field(default_factory=Terms)
    saves: Terms = field(default_factory=Terms)
    restores: Terms = field(default_factory=Terms)
    transients: list[int] = field(default_factory=list[int])

    def halves(self) -> "tuple[Facts, Facts]":
        """The first and the second half of each kind, in their order."""
        first, second = Facts(), Facts()
        for name in ("chunks", "steps", "saves", "restores", "transients"):
            values = getattr(self, name)
            setattr(first, name, values[: len(values) // 2])
            setattr(second, name, values[len(values) // 2 :])
        return first, second


@dataclass(frozen=True, slots=True)
class Sizes:
    """What files take by the model's own numbers, which are those of the simulation: how long one
    of so many bytes takes is what is to be known, whatever became of it on the disk.
    """

    token_bytes: int
    block_tokens: int
    state_bytes: int

    @property
    def block_bytes(self) -> int:
        return self.token_bytes * self.block_tokens


class Gathering:
    """Reads the records of a journal once. `known` is how many positions each row has, `ready_ns`
    since when the engine could do the next piece: null while that cannot be said; `decodes_ns`
    since when there is a batch.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.sizes = sizes
        self.facts = Facts()
        self.known: dict[int, int] = {}
        self.planned_ns: dict[int, int] = {}
        self.filling: set[str] = set()
        self.decodes_ns: int | None = None
        self.ready_ns: int | None = 0

    def take(self, record: Record) -> None:
        """One record."""
        event = record.event
        match event:
            case events.StateCarried():
                self.carry(event)
            case events.RequestReceived():
                self.known[event.number] = event.num_prompt_tokens
            case events.BatchChanged():
                self.change_batch(record.at_ns, event)
            case events.PrefillChunkPlanned():
                self.planned_ns[event.chunk] = record.at_ns
            case events.PrefillChunkDone():
                self.chunk(record.at_ns, event)
            case events.TokensDecoded():
                self.step(record.at_ns, event)
            case events.ServerStarted():
                self.begin()
            case _:
                self.files(record)

    def carry(self, event: events.StateCarried) -> None:
        """Rows that were there before."""
        for request in open_requests(state_of(event)):
            self.known[request.number] = request.num_known_tokens
            if request.restoring:
                self.filling.add(request.request_id)

    def begin(self) -> None:
        """A run: nothing of the last one goes on."""
        self.planned_ns.clear()
        self.filling.clear()
        self.decodes_ns, self.ready_ns = None, 0

    def files(self, record: Record) -> None:
        """What is written, and what is read."""
        event = record.event
        match event:
            case events.RequestAdmitted() | events.ResumeStarted() if event.num_cached_tokens:
                self.filling.add(event.request_id)
            case events.KvFreed() | events.ChainRestoreFailed() | events.RequestRetried():
                self.filling.discard(event.request_id)
            case events.BlockSaved() if event.duration_ns:
                self.save(record.at_ns, event)
            case events.ChainRestored():
                self.filling.discard(event.request_id)
                self.ready_ns = None
                read_bytes = event.num_disk_tokens * self.sizes.token_bytes
                restore = (read_bytes, event.num_memory_tokens, event.duration_ns)
                if event.duration_ns:
                    self.facts.restores.append(restore)
            case _:
                pass

    def save(self, at_ns: int, event: events.BlockSaved) -> None:
        """A file that is durable."""
        sizes = self.sizes
        num_bytes = sizes.state_bytes if event.part == "state" else sizes.block_bytes
        self.facts.saves.append((at_ns - event.duration_ns, at_ns, num_bytes))

    def change_batch(self, at_ns: int, event: events.BatchChanged) -> None:
        """Rows decode, or none does any more."""
        if not event.numbers:
            self.decodes_ns = None
        elif self.decodes_ns is None:
            self.decodes_ns = at_ns

    def took_ns(self, at_ns: int, came_ns: int | None) -> int | None:
        """How long a piece took that ends now and was there to be done since it came."""
        ready_ns, self.ready_ns = self.ready_ns, at_ns
        if self.filling or came_ns is None or ready_ns is None:
            return None
        return max(1, at_ns - max(came_ns, ready_ns))

    def chunk(self, at_ns: int, event: events.PrefillChunkDone) -> None:
        """A chunk that was fed."""
        took_ns = self.took_ns(at_ns, self.planned_ns.pop(event.chunk, None))
        if event.length == 0:
            return
        if took_ns is not None:
            self.facts.chunks.append((event.start, event.length, took_ns))
        need_bytes = max(0, event.peak_bytes - event.active_bytes)
        self.facts.transients.append(need_bytes // event.length)

    def step(self, at_ns: int, event: events.TokensDecoded) -> None:
        """A decode step."""
        positions = 0
        for number, count in zip(event.numbers, event.counts, strict=True):
            positions += self.known.get(number, 0)
            self.known[number] = self.known.get(number, 0) + count
        rows = sum(count > 0 for count in event.counts)
        took_ns = self.took_ns(at_ns, self.decodes_ns)
        if took_ns is not None and rows:
            self.facts.steps.append((rows, positions, took_ns))


def gather(records: Iterable[Record], sizes: Sizes) -> Facts:
    """What of these records is fitted to."""
    gathering = Gathering(sizes)
    for record in records:
        gathering.take(record)
    facts = gathering.facts
    if facts.steps:
        most_ns = MAX_GAP_FACTOR * median(ns for _, _, ns in facts.steps)
        facts.steps = [step for step in facts.steps if step[2] <= most_ns]
    return facts


def fit_engine(facts: Facts, block_tokens: int) -> FittedCost:
    """The engine's cost. What was hardly seen costs what the fallback says."""
    launch_ns, token_ns, attend_ns = FALLBACK_NS, 0.0, 0.0
    if len(facts.chunks) >= LEAST_FACTS:
        rows = [(1.0, length, attended(start, length)) for start, length, _ in facts.chunks]
        fitted = least_squares(rows, [ns for _, _, ns in facts.chunks])
        launch_ns, token_ns, attend_ns = fitted
    elif facts.chunks:
        launch_ns = 0
        token_ns = sum(ns for _, _, ns in facts.chunks) / sum(n for _, n, _ in facts.chunks)
    weights_ns, row_ns, read_ns = FALLBACK_NS, 0.0, 0.0
    if len(facts.steps) >= LEAST_FACTS:
        rows = [(1.0, num_rows, positions) for num_rows, positions, _ in facts.steps]
        weights_ns, row_ns, read_ns = least_squares(rows, [ns for _, _, ns in facts.steps])
    return FittedCost(
        token_ns=round(token_ns),
        attend_ps=round(attend_ns * 1000),
        weights_ns=round(weights_ns),
        read_ps=round(read_ns * 1000),
        row_ns=round(row_ns),
        copy_ns=copy_ns(facts, block_tokens),
        launch_ns=round(launch_ns),
    )


def attended(start: int, length: int) -> int:
    """Pairs of positions that a chunk computes, as `EngineCost.chunk_ns` counts them."""
    return length * start + length * (length - 1) // 2


def copy_ns(facts: Facts, block_tokens: int) -> int:
    """What a block takes from memory into a row, from restores that read nothing. Where all have
    read, their rate has it.
    """
    copies = [
        ns * block_tokens // tokens for read, tokens, ns in facts.restores if tokens and not read
    ]
    if copies:
        return round(median(copies))
    return 0 if facts.restores else FALLBACK_NS


def fit_disk(facts: Facts) -> DiskCost:
    """The disk's cost: its rate while something was being written, by however many writers, and
    what is left of a save.
    """
    write_rate = FALLBACK_BYTES_PER_S
    flush_ns = 0
    if facts.saves:
        busy_ns = covered_ns([(begin, end) for begin, end, _ in facts.saves])
        write_rate = max(1, sum(size for _, _, size in facts.saves) * 10**9 // max(1, busy_ns))
        rests = [end - begin - size * 10**9 // write_rate for begin, end, size in facts.saves]
        flush_ns = max(0, round(median(rests)))
    return DiskCost(write_rate, read_rate(facts), flush_ns)


def read_rate(facts: Facts) -> int:
    """Bytes a second of the faster half of the restores: the others had to take turns with chunks
    and steps, which is not the disk's doing, and is simulated.
    """
    reads = sorted(((size, ns) for size, _, ns in facts.restores if size), key=ns_per_byte)
    fast = reads[: (len(reads) + 1) // 2]
    if not fast:
        return FALLBACK_BYTES_PER_S
    return max(1, sum(size for size, _ in fast) * 10**9 // sum(ns for _, ns in fast))


def ns_per_byte(read: tuple[int, int]) -> float:
    """How slow a restore was."""
    size, ns = read
    return ns / size


def covered_ns(spans: Sequence[tuple[int, int]]) -> int:
    """How much time lies in at least one of these spans."""
    total, until = 0, 0
    for begin, end in sorted(spans):
        total += max(0, end - max(begin, until))
        until = max(until, end)
    return total


def least_squares(rows: Sequence[Sequence[float]], times: Sequence[int]) -> list[float]:
    """Coefficients, none negative, that make the sum of the squared errors least, each relative to
    the time or to the median, whichever is more: after one that was told late the next one looks as
    if it had taken nothing. Terms
    that come out negative are left out, the most negative first (an active set); so are those that
    never vary, such as the rows where one was alone all the time: the first term has what they do.
    """
    recorded = np.asarray(times, dtype=np.float64)
    scale = np.maximum(recorded, np.median(recorded))
    terms = np.asarray(rows, dtype=np.float64)
    matrix = terms / scale[:, None]
    kept = [0, *(i for i in range(1, terms.shape[1]) if np.ptp(terms[:, i]) > 0)]
    while True:
        found = np.linalg.lstsq(matrix[:, kept], recorded / scale, rcond=None)[0]
        worst = int(np.argmin(found))
        if found[worst] >= 0 or len(kept) == 1:
            break
        del kept[worst]
    coefficients = [0.0] * matrix.shape[1]
    for place, value in zip(kept, found, strict=True):
        coefficients[place] = max(0.0, float(value))
    fitted = float(np.sum(terms @ np.asarray(coefficients)))
    factor = float(np.sum(recorded)) / fitted if fitted else 1.0
    return [coefficient * factor for coefficient in coefficients]


@dataclass(frozen=True, slots=True)
class FitError:
    """How far the fit on the first half is from the second, in permille of the recorded sum: 0 is
    exact, 1000 is twice or nothing. Null: there was nothing to check.
    """

    prefill_permille: int | None
    decode_permille: int | None


def check_fit(facts: Facts, block_tokens: int) -> FitError:
    """Fits to the first half of the facts and compares with the second."""
    first, second = facts.halves()
    cost = fit_engine(first, block_tokens)
    chunks = [(cost.chunk_ns(start, n), ns) for start, n, ns in second.chunks]
    steps = [
        (cost.weights_ns + rows * cost.row_ns + positions * cost.read_ps // 1000, ns)
        for rows, positions, ns in second.steps
    ]
    return FitError(error_permille(chunks), error_permille(steps))


def error_permille(pairs: Sequence[tuple[int, int]]) -> int | None:
    """The difference of the sums, in permille of the recorded one."""
    recorded = sum(ns for _, ns in pairs)
    if not recorded:
        return None
    return abs(sum(ns for ns, _ in pairs) - recorded) * 1000 // recorded
