"""mlx-lm's `BatchGenerator` on the mixed workload, as a process: `MODEL_FOLDER BLAS`.

Each line of stdin is a round: a list of objects with `tokens` and `max_tokens`, the answer that
runs first. Each line of stdout is a `Played`.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import msgspec

from scheduler.engine import description
from scheduler.engine.blas import choose
from tools.bench_mixed_load import STREAM_BEFORE, Played


def play(model: Any, asked: list[dict[str, Any]]) -> Played:
    """One round, on a generator of its own with mlx-lm's own settings."""
    from mlx_lm.generate import BatchGenerator

    generator = BatchGenerator(model)
    limits = [each["max_tokens"] for each in asked]
    uids: list[int] = generator.insert([asked[0]["tokens"]], limits[:1])
    times: dict[int, list[float]] = {uids[0]: []}
    sent = 0.0
    while any(len(times[uid]) < limit for uid, limit in zip(uids, limits, strict=False)):
        for response in generator.next()[1]:
            times[response.uid].append(time.monotonic())
        if len(uids) == 1 and len(times[uids[0]]) == STREAM_BEFORE:
            sent = time.monotonic()
            uids += generator.insert([each["tokens"] for each in asked[1:]], limits[1:])
            times |= {uid: [] for uid in uids[1:]}
    generator.close()
    stream, *four = ([at - sent for at in times[uid]] for uid in uids)
    return Played(stream, four)


def main() -> None:
    """Loads the model and plays rounds until stdin ends."""
    folder, blas = Path(sys.argv[1]), sys.argv[2]
    choose(blas, description.open_folder(folder).num_parameters)  # pyright: ignore[reportArgumentType]
    from mlx_lm.utils import load_model

    model, _ = load_model(folder)
    for line in sys.stdin:
        sys.stdout.write(msgspec.json.encode(play(model, json.loads(line))).decode() + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
