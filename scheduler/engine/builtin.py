"""Models by name: made at their first use, in the user's cache folder."""

import fcntl
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from scheduler.engine import smollm2, tiny
from scheduler.engine.blas import has_gpu
from scheduler.engine.model import ModelError

VERSION = 1
"""Of how the folders are made: part of their names, so that an older one is not taken for ours."""

MAKERS: dict[str, Callable[[Path], None]] = {
    "smollm2-float32": partial(smollm2.make, precision="float32"),
    "smollm2-4bit": partial(smollm2.make, precision="4bit"),
    "tiny-plain": partial(tiny.make, kind="plain"),
    "tiny-hybrid": partial(tiny.make, kind="hybrid"),
}

NAMES = ("smollm2", *MAKERS)
"""`smollm2` is the one of its two forms that suits the device."""


def cache_folder() -> Path:
    """Where models and digests are kept: $XDG_CACHE_HOME/fermata, or ~/.cache/fermata."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "fermata"


def ensure(name: str) -> Path:
    """The folder of a built-in model, made if it is not there yet.

    It appears whole or not at all: it is made under another name and renamed. Only one process
    makes models at a time, so what another left half done is removed here. Raises ModelError when
    the cache folder cannot be written or the model's source is missing.
    """
    if name == "smollm2":
        name = "smollm2-4bit" if has_gpu() else "smollm2-float32"
    models = cache_folder() / "models"
    folder = models / f"{name}-v{VERSION}"
    if folder.is_dir():
        return folder
    try:
        models.mkdir(parents=True, exist_ok=True)
        with (models / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.is_dir():
                _make(models, folder, MAKERS[name])
    except OSError as error:
        raise ModelError(
            f"model {name} cannot be made in {models} ({error.strerror}):"
            " make room or set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return folder


def _make(models: Path, folder: Path, maker: Callable[[Path], None]) -> None:
    for left in models.glob("making-*"):
        shutil.rmtree(left)
    making = models / f"making-{folder.name}"
    making.mkdir()
    maker(making)
    for path in (*making.iterdir(), making):
        _flush(path)
    making.rename(folder)
    _flush(models)


def _flush(path: Path) -> None:
    """Through to the disk: a rename must not survive a power cut that the files did not."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
