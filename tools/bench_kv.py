"""`fermata bench kv`: saving and restoring a row, against one plain writer and one plain reader.

A chain of 1 GiB goes to disk as the server does it: blocks are cut from a row, handed to the
writers' queue, and saved; then it is read ahead, checked and copied into a new row. The plain
writer and reader move files of the same sizes, from and into one buffer, with the same flushes, in
the same folder. Rounds are taken in turn (save, plain write, restore, plain read, and again), and
a ratio is that of one round.

Before anything is read its files are dropped from the page cache, where the system has a call for
that; `file_cache_dropped` says so.
"""

import os
import shutil
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache

from scheduler.kvcache.arrays import tensors
from scheduler.kvcache.filling import RowFiller
from scheduler.kvcache.layout import Layout, layout_of
from scheduler.kvcache.naming import BlockFile, BlockNamer, Chain
from scheduler.kvcache.readahead import Read, ReadAhead
from scheduler.kvcache.reading import read
from scheduler.kvcache.store import BlockStore, Saved
from scheduler.kvcache.writers import WriterResult, Writers
from tools.bench_common import Measurement, measure, show

LAYERS, HEADS, HEAD_SIZE = 16, 4, 128
"""In 16-bit numbers: 32 KiB a token, so a block of 256 tokens has 8 MiB."""

DOMAIN = "00" * 32
QUEUE_BLOCKS = 4
NUM_WRITERS = 2
HASHED_TOKENS = 100_000
HASHED_BLOCK_TOKENS = 256
SEED = 1


class BenchError(Exception):
    """A file could not be written or read: there is nothing to measure."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured: for each block size so many rounds over a chain of so many tokens."""

    rounds: int = 5
    chain_tokens: int = 32_768
    block_tokens: tuple[int, ...] = (256, 2_048)


QUICK = Size(rounds=2, chain_tokens=2_048, block_tokens=(256,))


@dataclass
class Rates:
    """Bytes per second, one entry a round, and what a restore needed beyond the row."""

    save: list[float] = field(default_factory=list[float])
    plain_write: list[float] = field(default_factory=list[float])
    restore: list[float] = field(default_factory=list[float])
    plain_read: list[float] = field(default_factory=list[float])
    beyond_row_bytes: list[int] = field(default_factory=list[int])


def run(size: Size, folder: Path | None, *, as_json: bool) -> int:
    """Measures, prints, and returns 0 when every target is met, else 1. Files go to `folder`,
    whose disk is the one that is measured; they are removed again.

    Raises BenchError when the disk fails, or when what comes back is not what was saved.
    """
    row = make_row(size.chain_tokens)
    layout = layout_of(row, size.chain_tokens)
    measurements: list[Measurement] = []
    with tempfile.TemporaryDirectory(prefix="fermata-bench-", dir=folder) as name:
        for block_tokens in size.block_tokens:
            chain = SavedChain(Path(name), layout, row, size.chain_tokens, block_tokens)
            print(f"{len(chain.files)} blocks of {chain.block_bytes >> 20} MiB", flush=True)
            rates = Rates()
            for _ in range(size.rounds):
                take_round(chain, rates)
            measurements += compare(f"{chain.block_bytes >> 20}_mib", rates, chain.block_bytes)
    measurements.append(measure_hashing(size.rounds))
    details = {
        "file_cache_dropped": hasattr(os, "posix_fadvise"),
        "chain_bytes": size.chain_tokens * layout.bytes_per_token,
        "writers": NUM_WRITERS,
    }
    show("kv", measurements, seed=SEED, as_json=as_json, details=details)
    return int(any(measurement.met is False for measurement in measurements))


def make_row(num_tokens: int) -> list[KVCache]:
    """The caches of one row of a model that is not there."""
    mx.random.seed(SEED)
    shape = (1, HEADS, num_tokens, HEAD_SIZE)
    base = mx.random.randint(0, 2**16, shape, dtype=mx.uint16)
    caches: list[KVCache] = []
    for number in range(LAYERS):
        cache = KVCache()
        pair = [(base + 2 * number + side).view(mx.bfloat16) for side in (0, 1)]
        cache.update_and_fetch(*pair)
        mx.eval(cache.state)
        caches.append(cache)
    return caches


class SavedChain:
    """One row, and where its blocks are saved."""

    def __init__(
        self,
        folder: Path,
        layout: Layout,
        row: Sequence[KVCache],
        chain_tokens: int,
        block_tokens: int,
    ) -> None:
        self.folder = folder
        self.layout = layout
        self.row = row
        self.chain_tokens = chain_tokens
        self.block_tokens = block_tokens
        self.block_bytes = block_tokens * layout.bytes_per_token
        self.store = BlockStore(folder / "kv")
        self.files = [
            BlockFile(DOMAIN, f"{number % 251:02x}{number:062x}")
            for number in range(chain_tokens // block_tokens)
        ]
        self.plain = [folder / "plain" / file.path for file in self.files]

    @property
    def num_bytes(self) -> int:
        """Of the whole chain, without headers."""
        return len(self.files) * self.block_bytes


def take_round(chain: SavedChain, rates: Rates) -> None:
    """One round of each, and the files removed again."""
    rates.save.append(chain.num_bytes / timed_save(chain))
    saved = [chain.store.path(file) for file in chain.files]
    sizes = [path.stat().st_size for path in saved]
    rates.plain_write.append(chain.num_bytes / timed_plain_write(chain.plain, sizes))
    drop_from_file_cache(saved)
    mx.clear_cache()
    seconds, beyond_row_bytes = timed_restore(chain)
    rates.restore.append(chain.num_bytes / seconds)
    rates.beyond_row_bytes.append(beyond_row_bytes)
    drop_from_file_cache(chain.plain)
    rates.plain_read.append(chain.num_bytes / timed_plain_read(chain.plain, max(sizes)))
    for name in ("kv", "plain"):
        shutil.rmtree(chain.folder / name)


def timed_save(chain: SavedChain) -> float:
    """Seconds from the first cut to the last block that is durable."""
    results: list[WriterResult] = []
    progress = threading.Semaphore(0)

    def deliver(result: WriterResult) -> None:
        results.append(result)
        progress.release()

    writers = Writers(
        chain.store,
        deliver,
        capacity_bytes=QUEUE_BLOCKS * chain.block_bytes,
        num_threads=NUM_WRITERS,
        probe_interval_s=60,
    )
    begun = time.perf_counter()
    for number, file in enumerate(chain.files):
        start = number * chain.block_tokens
        block = tensors(chain.layout.cut_block(chain.row, start, chain.block_tokens))
        while not writers.offer(file, block):
            progress.acquire()
    unsaved = writers.close(limit_s=600)
    seconds = time.perf_counter() - begun
    failed = [result for result in results if not isinstance(result, Saved)]
    if failed or unsaved:
        raise BenchError(f"not saved: {failed or unsaved}")
    return seconds


def timed_plain_write(paths: Sequence[Path], sizes: Sequence[int]) -> float:
    """Seconds for the same files from one buffer: write, flush, rename, flush of the folder."""
    buffer = memoryview(os.urandom(max(sizes)))
    files = BlockStore(paths[0].parents[2]).files
    begun = time.perf_counter()
    for path, size in zip(paths, sizes, strict=True):
        files.make_folder(path.parent)
        temporary = path.with_suffix(".tmp")
        with temporary.open("wb", buffering=0) as file:
            file.write(buffer[:size])
            files.flush(file.fileno())
        temporary.rename(path)
        files.flush_folder(path.parent)
    return time.perf_counter() - begun


def timed_restore(chain: SavedChain) -> tuple[float, int]:
    """Seconds until a new row holds the chain, and the most memory beyond that row meanwhile."""
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    begun = time.perf_counter()
    ahead = ReadAhead(
        lambda file: read(chain.store, file),
        chain.files,
        lambda: None,
        mx.clear_streams,
        announce=chain.store.read_soon,
    )
    caches = [KVCache() for _ in range(LAYERS)]
    filler = RowFiller(chain.layout, caches, chain.chain_tokens)
    for _ in chain.files:
        result = ahead.take(wait=True)
        if not isinstance(result, Read):
            raise BenchError(f"not read: {result}")
        filler.fill(result.block, chain.block_tokens)
        del result
    filler.finish(chain.chain_tokens)
    seconds = time.perf_counter() - begun
    ahead.close()
    beyond_row_bytes = mx.get_peak_memory() - before - sum(cache.nbytes for cache in caches)
    check_equal(chain.row, caches)
    return seconds, beyond_row_bytes


def check_equal(expected: Sequence[KVCache], found: Sequence[KVCache]) -> None:
    """Raises BenchError unless both rows hold the same bits."""
    for old, new in zip(expected, found, strict=True):
        pairs: Any = zip(old.keys_and_values(), new.keys_and_values(), strict=True)
        for one, other in pairs:
            if not mx.array_equal(one.view(mx.uint16), other.view(mx.uint16)):
                raise BenchError("the restored row is not the one that was saved")


def timed_plain_read(paths: Sequence[Path], largest: int) -> float:
    """Seconds for the same files into one buffer, whose memory is there before the clock starts."""
    buffer = memoryview(bytearray(b"\1") * largest)
    begun = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            rest = buffer
            while num_bytes := file.readinto(rest):
                rest = rest[num_bytes:]
    return time.perf_counter() - begun


def drop_from_file_cache(paths: Sequence[Path]) -> None:
    """Where the system can: what is read next comes from the disk."""
    if not hasattr(os, "posix_fadvise"):
        return
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def compare(name: str, rates: Rates, block_bytes: int) -> list[Measurement]:
    """The ratios of the rounds, what they are made of, and the memory."""
    pairs = (
        ("save", rates.save, "plain_write", rates.plain_write),
        ("restore", rates.restore, "plain_read", rates.plain_read),
    )
    measurements: list[Measurement] = []
    for ours, our_rates, plain, plain_rates in pairs:
        ratios = [a / b for a, b in zip(our_rates, plain_rates, strict=True)]
        headline = measure(f"{name}.{ours}.ratio", f"of {plain}", ratios, at_least=0.8)
        measurements += [
            headline,
            measure(f"{name}.{ours}", "MB/s", [rate / 1e6 for rate in our_rates]),
            measure(f"{name}.{plain}", "MB/s", [rate / 1e6 for rate in plain_rates]),
        ]
    blocks = [size / block_bytes for size in rates.beyond_row_bytes]
    measurements.append(measure(f"{name}.restore.peak", "blocks over the row", blocks, at_most=2))
    return measurements


def measure_hashing(rounds: int) -> Measurement:
    """Naming all blocks of a long prompt."""
    tokens = [(31 * index) % 150_000 for index in range(HASHED_TOKENS)]
    samples: list[float] = []
    for _ in range(rounds):
        chain = Chain(BlockNamer(bytes(32), DOMAIN), HASHED_BLOCK_TOKENS)
        begun = time.perf_counter()
        chain.extend(tokens)
        samples.append((time.perf_counter() - begun) * 1e3)
    return measure("hash_100k_tokens", "ms", samples, at_most=20)
