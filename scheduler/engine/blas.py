"""Which matrix library mlx computes with. Must be settled before mlx is imported.

On Linux the CPU build of mlx links a reference BLAS, some thirty times slower in float32 than
OpenBLAS. A library that is loaded into the process first, with global symbols, takes its place. For
small models nothing is gained, and the reference BLAS has a virtue that tests need: it computes a
row of a batch exactly as the row alone.
"""

import ctypes
import importlib.metadata
import sys
from pathlib import Path
from typing import Literal

from scheduler.engine.model import ModelError

Setting = Literal["auto", "stock", "openblas"]

OPENBLAS = "libopenblas.so.0"

SMALL_MODEL_PARAMETERS = 50_000_000
"""Up to here `auto` stays with the BLAS that mlx brings."""

_chosen: list[str] = []


def has_gpu() -> bool:
    """Whether mlx will compute on a GPU, found out without importing it."""
    return gpu() is not None


def gpu() -> str | None:
    """`metal`, `cuda`, or nothing."""
    if sys.platform == "darwin":
        return "metal"
    distributions = importlib.metadata.distributions()
    has_backend = any(found.name.startswith("mlx-cuda") for found in distributions)
    return "cuda" if has_backend and Path("/proc/driver/nvidia/version").exists() else None


def choose(setting: Setting, num_parameters: int) -> str:
    """Loads what the setting asks for and returns what is in use from here on: `metal`, `cuda`,
    `stock` or `openblas`.

    Called before mlx is imported; later calls change nothing and return the same. Raises
    ModelError when OpenBLAS is demanded and not installed; `auto` takes what is there.
    """
    if not _chosen:
        _chosen.append(gpu() or _choose_for_cpu(setting, num_parameters))
    return _chosen[0]


def _is_loaded() -> bool:
    """Whether OpenBLAS is in the process already, as with LD_PRELOAD. NumPy's own copy, which has
    other symbols, goes by another name.
    """
    maps = Path("/proc/self/maps")
    return maps.exists() and f"/{OPENBLAS.split('.', maxsplit=1)[0]}" in maps.read_text()


def _choose_for_cpu(setting: Setting, num_parameters: int) -> str:
    if _is_loaded():
        return "openblas"
    if setting == "stock" or (setting == "auto" and num_parameters <= SMALL_MODEL_PARAMETERS):
        return "stock"
    if "mlx.core" in sys.modules:
        if setting == "openblas":
            raise ModelError("engine.blas is openblas, but mlx was imported before it was chosen")
        return "stock"
    try:
        ctypes.CDLL(OPENBLAS, mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        if setting == "auto":
            return "stock"
        raise ModelError(
            f"engine.blas is openblas, and {OPENBLAS} is not installed:"
            " install libopenblas0-pthread, or set engine.blas to auto"
        ) from error
    return "openblas"
