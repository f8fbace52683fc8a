"""Machines and models for simulations, by the sizes and speeds of real ones."""

from journal.events import ModelFacts
from scheduler.simulation.cost import DiskCost, EngineCost
from scheduler.simulation.world import Hardware

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
