"""What mlx computes on, told by a process of its own: `python -m scheduler.engine.device SETTING`.

Which BLAS mlx binds is settled once in a process, before its import, so whoever only wants to know
asks another process. It prints one JSON object: `device`, `blas`, `float32_gflops`.
"""

import json
import sys
import time
from typing import cast

from scheduler.engine.blas import SMALL_MODEL_PARAMETERS, Setting, choose
from scheduler.engine.model import ModelError

SIDE = 512
ROUNDS = 3


def describe(setting: Setting) -> dict[str, str | float]:
    """The device and the BLAS for a model that is not small, and how fast they multiply.

    Raises ModelError when the setting asks for a library that is not installed.
    """
    blas = choose(setting, SMALL_MODEL_PARAMETERS + 1)

    import mlx.core as mx

    left, right = mx.random.normal((SIDE, SIDE)), mx.random.normal((SIDE, SIDE))
    mx.eval(left @ right)
    fastest_s = float("inf")
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        mx.eval(left @ right)
        fastest_s = min(fastest_s, time.perf_counter() - begun)
    return {
        "device": str(mx.default_device()),
        "blas": blas,
        "float32_gflops": round(2 * SIDE**3 / fastest_s / 1e9, 1),
    }


def memory_bytes() -> int | None:
    """The most memory that the GPU can well use: what Metal recommends, or what CUDA has in all.
    Null without a GPU. Imports mlx, so the BLAS must have been chosen.
    """
    import mlx.core as mx

    found = mx.device_info()
    num_bytes = found.get("max_recommended_working_set_size") or found.get("total_memory")
    return None if num_bytes is None else int(num_bytes)


def main() -> int:
    """Prints the description, or one line on stderr that says why there is none."""
    try:
        print(json.dumps(describe(cast("Setting", sys.argv[1]))))
    except ModelError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
