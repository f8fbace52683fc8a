"""`fermata bench pause`: from the decision to hold a row to its memory, and back from its files.

The production loop, journal, writers and files, with rows of real size (`bench_pause_rows.py`). A
short and a long row are held by hand in turn, one in memory at a time; each had its whole blocks
saved while it ran. All times are the journal's: a pause is from the step of `pause_started` to
that of `kv_freed`, with both commits in it, a resume from `resume_started` to `request_resumed`.

Beside each pause, in the same round and folder: a plain writer that writes what that pause wrote,
and one block (write, flush, rename, flush of the folder), and a bare flush of a small file. A pause
is to take no longer than these together: the write of what the row holds behind its blocks, one
block's write, and one flush, which the commit takes before the memory is let go.

What the allocator takes to give a row's memory back is measured apart (`freeing`), and both targets
of a pause leave it out. mlx keeps the memory for reuse on a GPU; on a CPU it returns it to the
system, page by page, which takes the longer the more it is, whoever asks. `whole` has it in.

Beside each resume a plain reader of the row's files, by turns before it and after it; they are
dropped from the page cache before each of the two, where the system has a call for that. A resume
also makes the row's memory and copies twice: on a machine that does other things too, its processor
time, which all threads share, tells more than the clock.
"""

import os
import shutil
import statistics
import tempfile
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import mlx.core as mx

from journal import events
from journal.events import AnyEvent, Record
from journal.reader import JournalReader
from scheduler.kvcache.naming import BlockFile, TailFile
from scheduler.parameters import RequestParameters, SamplingParameters
from scheduler.request import Phase, Request
from scheduler.state import SchedulerState
from scheduler.streams import Arrival
from tools.bench_common import Measurement, Number, measure, show
from tools.bench_kv import (
    BenchError,
    drop_from_file_cache,
    timed_plain_read,
    timed_plain_write,
)
from tools.bench_pause_rows import HYBRID, PLAIN, Shape
from tools.bench_pause_server import MAX_TOKENS, STEP_MS, Server, serving

SEED = 1
FIRST_TAIL_TOKENS = 128
TOKENS_BETWEEN = 4
"""Of output between two pauses of a row: tails stay within one block, and grow alike."""

FLUSHED_BYTES = 4_096

KEPT_PART = 20
"""A held row may leave a twentieth of its bytes in use."""

NEEDED_SHARE = 1.0
SAME_SHARE = 1.2
READ_SHARE = 0.8

E = TypeVar("E", bound=AnyEvent)


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured: the tokens of the short row and of the long one, and rounds, at most
    10, over both. Before each use the disk is left alone for `rest_s`.
    """

    rounds: int = 5
    rest_s: float = 2.0
    num_tokens: tuple[int, int] = (2_048, 32_768)
    shapes: tuple[Shape, ...] = (HYBRID, PLAIN)


QUICK = Size(rounds=2, num_tokens=(2_048, 6_144), shapes=(HYBRID,))


@dataclass
class Times:
    """Of one row, in seconds, one entry a round."""

    pause: list[float] = field(default_factory=list[float])
    freeing: list[float] = field(default_factory=list[float])
    needed: list[float] = field(default_factory=list[float])
    own_write: list[float] = field(default_factory=list[float])
    flush: list[float] = field(default_factory=list[float])
    resume: list[float] = field(default_factory=list[float])
    processor: list[float] = field(default_factory=list[float])
    plain_read: list[float] = field(default_factory=list[float])
    parts: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    read_bytes: list[int] = field(default_factory=list[int])


def run(size: Size, folder: Path | None, *, as_json: bool) -> int:
    """Measures, prints, and returns 0 when every target is met, else 1. Files go to `folder`,
    whose disk is the one that is measured; they are removed again.

    Raises BenchError when something ends or fails that should not.
    """
    measurements: list[Measurement] = []
    details: dict[str, Number | str | bool | None] = {
        "file_cache_dropped": hasattr(os, "posix_fadvise"),
        "step_ms": STEP_MS,
        "rest_s": size.rest_s,
    }
    for shape in size.shapes:
        with tempfile.TemporaryDirectory(prefix="fermata-bench-", dir=folder) as name:
            rows = measure_shape(shape, size, Path(name))
        measurements += compare(shape.name, size, rows)
        details |= explain(shape.name, size, rows)
    show("pause", measurements, seed=SEED, as_json=as_json, details=details)
    return int(any(measurement.met is False for measurement in measurements))


def measure_shape(shape: Shape, size: Size, folder: Path) -> list[Times]:
    """The times of the short row and the long one."""
    with serving(shape, folder / "state", size.rest_s) as server:
        held: list[HeldRow] = []
        for number, num_tokens in enumerate(size.num_tokens):
            row = HeldRow(server, number, num_tokens, folder / "plain")
            row.begin()
            held.append(row)
        for number in range(size.rounds):
            for row in held:
                row.take_round(plain_first=number % 2 == 0)
    return [row.times for row in held]


class HeldRow:
    """A request that is held and goes on, again and again. `num_tokens` are in whole blocks."""

    def __init__(self, server: Server, number: int, num_tokens: int, plain: Path) -> None:
        self.server = server
        self.request_id = f"req_{number:026d}"
        self.num_prompt_tokens = num_tokens + FIRST_TAIL_TOKENS
        self.plain = plain
        self.held_at = self.num_prompt_tokens + TOKENS_BETWEEN
        self.idle_bytes = mx.get_active_memory()
        self.times = Times()

    def begin(self) -> None:
        """It comes in, runs until all of its blocks are saved, and is held a first time."""
        arrival = Arrival(
            request_id=self.request_id,
            client_request_id=None,
            route="completions",
            stream=True,
            prompt=array("I", [32 + self.num_prompt_tokens % 64]) * self.num_prompt_tokens,
            max_tokens=MAX_TOKENS,
            parameters=RequestParameters(
                route="completions",
                model="fake",
                created=0,
                stream=True,
                sampling=SamplingParameters(seed=SEED, ignore_end_of_turn=True),
            ),
        )
        self.server.run.sensors.arrive(arrival)
        self.hold()

    def take_round(self, *, plain_first: bool) -> None:
        """Lets it go on, holds it, and writes what that wrote plainly. Before that or after it its
        files are read plainly: a disk may give more to the one who comes first.
        """
        if plain_first:
            self.read_plainly()
        num_bytes = self.forget_files()
        mx.clear_cache()
        seq, held_tokens = self.server.ask(lambda state: (state.seq, self.of(state).saved_tokens))
        self.held_at = held_tokens + TOKENS_BETWEEN
        time.sleep(self.server.rest_s)
        processor_s = time.process_time()
        self.server.run.sensors.wish(events.ReleaseRequested(request_id=self.request_id))
        self.server.wait_until(self.is_filled, f"{self.request_id} goes on")
        self.times.processor.append(time.process_time() - processor_s)
        self.hold()
        self.take_times(seq, num_bytes)
        if not plain_first:
            self.read_plainly()
        *blocks, tail = (path.stat().st_size for path in self.paths())
        self.write_plainly(blocks[0], tail)

    def forget_files(self) -> int:
        """What is read next comes from the disk. Returns the bytes of the row's files."""
        paths = self.paths()
        drop_from_file_cache(paths)
        return sum(path.stat().st_size for path in paths)

    def read_plainly(self) -> None:
        """The row's files, by a plain reader."""
        paths = self.paths()
        self.forget_files()
        time.sleep(self.server.rest_s)
        largest = max(path.stat().st_size for path in paths)
        self.times.plain_read.append(timed_plain_read(paths, largest))

    def hold(self) -> None:
        """Holds the row when it has decoded a few tokens and all its blocks are saved; returns when
        its memory is free.
        """
        self.server.wait_until(self.may_be_held, f"{self.request_id} runs")
        self.server.run.sensors.wish(events.HoldRequested(request_id=self.request_id))
        self.server.wait_until(self.is_held, f"{self.request_id} is held")
        left_bytes = mx.get_active_memory() - self.idle_bytes
        if left_bytes > self.row_bytes() // KEPT_PART:
            raise BenchError(f"{left_bytes} bytes of the row are still in use")

    def row_bytes(self) -> int:
        """Of all that the row holds."""
        shape = self.server.shape
        return self.num_prompt_tokens * shape.bytes_per_token + shape.state_bytes

    def of(self, state: SchedulerState) -> Request:
        """The request, which has come in, and never ends."""
        request = state.find(self.request_id)
        assert request is not None, "it never ends"
        return request

    def may_be_held(self, state: SchedulerState) -> bool:
        request = state.find(self.request_id)
        if request is None or request.phase is not Phase.DECODING:
            return False
        is_saved = not request.unsaved and not state.index.writing_bytes
        return is_saved and request.num_cached_tokens >= self.held_at

    def is_filled(self, state: SchedulerState) -> bool:
        return self.of(state).phase is Phase.DECODING

    def is_held(self, state: SchedulerState) -> bool:
        return self.of(state).phase is Phase.PAUSED and not state.leaving

    def paths(self) -> list[Path]:
        """The files that it will be filled from, the tail last."""

        def files(state: SchedulerState) -> list[BlockFile | TailFile]:
            request = self.of(state)
            domain = request.pin_domain
            blocks = [BlockFile(domain, name) for name in request.hashes[: request.chain_blocks]]
            return [*blocks, TailFile(domain, self.request_id, request.saved_tokens)]

        kv = self.server.run.kv
        assert kv is not None, "KV is saved"
        return [kv.store.path(file) for file in self.server.ask(files)]

    def take_times(self, after_seq: int, num_bytes: int) -> None:
        """The round as the journal has it."""
        with JournalReader.open(self.server.state_folder) as reader:
            records = reader.events_of(self.request_id, after_seq)
        saved = last(records, events.ChainSaved)[1]
        restored = last(records, events.ChainRestored)[1]
        if restored.num_disk_tokens != restored.num_tokens:
            raise BenchError(f"not all came from disk: {restored}")
        times = self.times
        times.read_bytes.append(num_bytes)
        times.resume.append(between(records, events.ResumeStarted, events.RequestResumed))
        freeing = self.server.freeing_s
        times.freeing.append(freeing)
        times.pause.append(between(records, events.PauseStarted, events.KvFreed) - freeing)
        written = saved.duration_ns / 1e9
        until_saved = between(records, events.PauseStarted, events.ChainSaved)
        parts = {
            "step under way, cut": until_saved - written,
            "write": written,
            "commit of the pin, drop": between(records, events.ChainSaved, events.KvFreed)
            - freeing,
            "restore in the engine": restored.duration_ns / 1e9,
        }
        for name, seconds in parts.items():
            times.parts.setdefault(name, []).append(seconds)

    def write_plainly(self, block_bytes: int, tail_bytes: int) -> None:
        """What the pause may take, by a plain writer in the same folder."""
        names = [self.plain / "ab" / name for name in ("tail", "block")]
        names[0].parent.mkdir(parents=True)
        time.sleep(self.server.rest_s)
        own = timed_plain_write(names[:1], [tail_bytes])
        block = timed_plain_write(names[1:], [block_bytes])
        flush = timed_flush(self.plain / "small")
        shutil.rmtree(self.plain)
        self.times.own_write.append(own)
        self.times.flush.append(flush)
        self.times.needed.append(own + block + flush)


def timed_flush(path: Path) -> float:
    """Seconds for a few bytes that are added to a file, and made durable."""
    with path.open("wb", buffering=0) as file:
        file.write(bytes(FLUSHED_BYTES))
        os.fsync(file.fileno())
        begun = time.perf_counter()
        file.write(bytes(FLUSHED_BYTES))
        os.fsync(file.fileno())
        return time.perf_counter() - begun


def last(records: Sequence[Record], kind: type[E]) -> tuple[int, E]:
    """The last event of this kind, and its step's time. Raises BenchError when there is none."""
    for record in reversed(records):
        if isinstance(record.event, kind):
            return record.at_ns, record.event
    raise BenchError(f"no {kind.__name__}: the pause or the resume went another way")


def between(records: Sequence[Record], first: type[AnyEvent], second: type[AnyEvent]) -> float:
    """Seconds from the step of one event to that of another."""
    return (last(records, second)[0] - last(records, first)[0]) / 1e9


def compare(name: str, size: Size, rows: Sequence[Times]) -> list[Measurement]:
    """The ratios of the rounds, and what they are made of."""
    short, long = rows
    found = [
        measure(
            f"{name}.pause.long_to_short",
            "of short",
            ratios(long.pause, short.pause),
            at_most=SAME_SHARE,
        )
    ]
    for num_tokens, times in zip(size.num_tokens, rows, strict=True):
        found += compare_row(f"{name}.{num_tokens}", times)
    return found


def compare_row(row: str, times: Times) -> list[Measurement]:
    """What one row's pauses and resumes are held against."""
    whole = [pause + freeing for pause, freeing in zip(times.pause, times.freeing, strict=True)]
    return [
        measure(
            f"{row}.pause.share",
            "of tail_block_flush",
            ratios(times.pause, times.needed),
            at_most=NEEDED_SHARE,
        ),
        measure(
            f"{row}.resume.ratio",
            "of plain_read",
            ratios(times.plain_read, times.resume),
            at_least=READ_SHARE,
        ),
        measure(f"{row}.pause.ratio", "of own_write", ratios(times.pause, times.own_write)),
        measure(f"{row}.pause", "ms", ms(times.pause)),
        measure(f"{row}.freeing", "ms", ms(times.freeing)),
        measure(f"{row}.whole", "ms", ms(whole)),
        measure(f"{row}.own_write", "ms", ms(times.own_write)),
        measure(f"{row}.tail_block_flush", "ms", ms(times.needed)),
        measure(f"{row}.resume", "ms", ms(times.resume)),
        measure(f"{row}.resume.processor", "ms", ms(times.processor)),
        measure(f"{row}.plain_read", "ms", ms(times.plain_read)),
    ]


def ratios(one: Sequence[float], other: Sequence[float]) -> list[float]:
    """Round by round."""
    return [a / b for a, b in zip(one, other, strict=True)]


def ms(seconds: Sequence[float]) -> list[float]:
    """The same in milliseconds."""
    return [1e3 * each for each in seconds]


def explain(name: str, size: Size, rows: Sequence[Times]) -> dict[str, Number | str | bool | None]:
    """Where the time goes: medians."""
    found: dict[str, Number | str | bool | None] = {}
    for num_tokens, times in zip(size.num_tokens, rows, strict=True):
        row = f"{name}.{num_tokens}"
        for part, seconds in {**times.parts, "a bare flush": times.flush}.items():
            found[f"{row}, ms: {part}"] = round(1e3 * statistics.median(seconds), 2)
        found[f"{row}, bytes read"] = int(statistics.median(times.read_bytes))
    return found
