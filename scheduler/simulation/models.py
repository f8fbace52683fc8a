"""Machines and models for simulations, by the sizes and speeds of real ones."""

from journal.events import ModelFacts
from scheduler.settings import Settings, load_settings
from scheduler.simulation.cost import DiskCost, EngineCost
from scheduler.simulation.hardware import Hardware

STATE_BYTES = 150_994_944
"""48 layers with linear attention: 48 heads of 128 by 128 float32 numbers each."""

KV_BYTES_PER_TOKEN = 65_536
"""16 layers with full attention: keys and values of 4 heads of 256 bfloat16 numbers each."""

FOUR_BIT_BYTES = 15_200_000_000
EIGHT_BIT_BYTES = 28_700_000_000

BYTES_PER_S = 700_000_000_000
"""At which the engine reads weights, keys and values while it decodes."""


def hybrid_27b(weights_bytes: int = FOUR_BIT_BYTES) -> ModelFacts:
    """A model of 27 billion parameters in 64 layers, of which 16 have keys and values and 48 a
    recurrent state, like Qwen3.5-27B. A chunk needs 200 kB for each of its tokens.
    """
    return ModelFacts(
        name="hybrid-27b",
        fingerprint="27" * 32,
        context_tokens=524_288,
        weights_bytes=weights_bytes,
        kv_bytes_per_token=KV_BYTES_PER_TOKEN,
        kv_step_tokens=256,
        window_layers=(),
        state_bytes=STATE_BYTES,
        transient_bytes_per_token=200_000,
    )


def workstation(weights_bytes: int = FOUR_BIT_BYTES) -> Hardware:
    """25 TFLOP/s and 700 GB/s of memory: 54 GFLOP for a token (2.16 ms), and 4 x 24 heads x 256 x
    16 layers = 393 kFLOP for each position that it attends to (15.7 ns); 5 ms for what a chunk
    costs whatever its length. Its disk moves 1.6 GB/s both ways, and takes 20 ms for a flush.
    """
    engine = EngineCost(
        token_ns=2_160_000,
        attend_ps=15_700,
        weights_ns=weights_bytes * 1_000_000_000 // BYTES_PER_S,
        read_ps=KV_BYTES_PER_TOKEN * 1_000_000_000_000 // BYTES_PER_S,
        row_ns=1_000_000,
        copy_ns=300_000,
        launch_ns=5_000_000,
    )
    disk = DiskCost(
        write_bytes_per_s=1_600_000_000, read_bytes_per_s=1_600_000_000, flush_ns=20_000_000
    )
    return Hardware(hybrid_27b(weights_bytes), engine, disk)


# A small machine, on which much happens in little work

SMALL_BLOCK = 16
SMALL_CHUNK = 128
SMALL_TOKEN_BYTES = 1_000
SMALL_WEIGHTS_BYTES = 1_000_000
SMALL_TRANSIENT_BYTES = 100

SMALL_ENGINE = EngineCost(
    token_ns=1_000_000,
    attend_ps=200_000,
    weights_ns=40_000_000,
    read_ps=20_000_000,
    row_ns=5_000_000,
    copy_ns=500_000,
    launch_ns=2_000_000,
)
SMALL_DISK = DiskCost(write_bytes_per_s=4_000_000, read_bytes_per_s=4_000_000, flush_ns=20_000_000)


def small_model(state_bytes: int = 0) -> ModelFacts:
    """A model of a megabyte, with a kilobyte of keys and values for a token."""
    return ModelFacts(
        name="simulated",
        fingerprint="5" * 64,
        context_tokens=8_192,
        weights_bytes=SMALL_WEIGHTS_BYTES,
        kv_bytes_per_token=SMALL_TOKEN_BYTES,
        kv_step_tokens=SMALL_BLOCK,
        window_layers=(),
        state_bytes=state_bytes,
        transient_bytes_per_token=SMALL_TRANSIENT_BYTES,
    )


def small_machine(state_bytes: int = 0) -> Hardware:
    """The small model on an engine of some 20 steps a second, and a slow disk."""
    return Hardware(small_model(state_bytes), SMALL_ENGINE, SMALL_DISK)


def small_ceiling(num_tokens: int, state_bytes: int = 0, num_rows: int = 1) -> int:
    """A ceiling under which rows of so many tokens together stay below the low mark."""
    step_bytes = SMALL_BLOCK * SMALL_TOKEN_BYTES
    rows_bytes = num_tokens * SMALL_TOKEN_BYTES + num_rows * (state_bytes + step_bytes)
    chunk_bytes = SMALL_CHUNK * SMALL_TRANSIENT_BYTES
    return (SMALL_WEIGHTS_BYTES + chunk_bytes + rows_bytes) * 100 // 79


def small_settings(ceiling_bytes: int, **overrides: object) -> Settings:
    """Settings of a small server below this ceiling, which keeps nothing in memory. Names are
    `group__name`.
    """
    small: dict[str, object] = {
        "model": "fake",
        "memory__ceiling": ceiling_bytes,
        "scheduler__chunk_tokens": SMALL_CHUNK,
        "scheduler__chunk_tokens_beside_rows": SMALL_BLOCK,
        "kv__block_tokens": SMALL_BLOCK,
        "kv__memory_bytes": 0,
        "kv__writing_bytes": 400_000,
        "kv__max_bytes": 10**9,
        "kv__reserve_bytes": 0,
        "fake__turn_tokens": 0,
        "fake__context_tokens": 8_192,
    }
    named = {name.replace("__", "."): value for name, value in (small | overrides).items()}
    return load_settings(overrides=named)
