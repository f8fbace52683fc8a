"""`fermata doctor`: whether a server can run here, and how fast the ground under it is.

With `--json` the last line of stdout is one object: `ok` (whether nothing stops a server) and
`findings`, each with `name`, `level` (ok, note, wrong), `text` and `values` (numbers and names, by
key, with their units in the keys).
"""

import importlib.metadata
import json
import os
import platform
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

from scheduler.settings import ConfigurationError, Settings, load_settings
from tools.nameguard import PACKAGES, ROOT, NameTaken, check_names

PYTHONS = ((3, 11), (3, 13))
SQLITE_STRICT = (3, 37, 0)
"""The first that has STRICT tables, which the journal is made of."""

SQLITE_CAREFREE = (3, 51, 3)
"""Earlier ones can corrupt a log when two connections write and checkpoint at once."""

WRITE_BYTES = 32 * 2**20
FLUSHES = 20
LEAST_FREE_BYTES = 100 * 10**6
DEVICE_LIMIT_S = 120

Value = str | int | float


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, and what came out: `wrong` stops a server, a `note` does not."""

    name: str
    level: Literal["ok", "note", "wrong"]
    text: str
    values: dict[str, Value] = field(default_factory=dict[str, Value])


def run(state: Path | None, config: Path | None, *, as_json: bool) -> int:
    """Looks at everything, prints it, and returns 1 if something stops a server, else 0."""
    findings: list[Finding] = []
    for finding in examine(state, config):
        findings.append(finding)
        print(f"{finding.level:5}  {finding.name:12}  {finding.text}", flush=True)
    ok = all(finding.level != "wrong" for finding in findings)
    print("a server can run here" if ok else "a server cannot run here: see what is wrong above")
    if as_json:
        print(json.dumps({"ok": ok, "findings": [asdict(finding) for finding in findings]}))
    return 0 if ok else 1


def examine(state: Path | None, config: Path | None) -> Iterator[Finding]:
    """All findings. What depends on the settings is left out where they cannot be read."""
    yield names(check_names)
    yield python(sys.version_info[:2])
    yield from distributions(importlib.metadata.version)
    yield sqlite(sqlite3.sqlite_version_info)
    try:
        settings = load_settings(config, {"state": state})
    except ConfigurationError as error:
        yield Finding("settings", "wrong", str(error))
        return
    yield Finding("settings", "ok", f"model {settings.model}, state folder {settings.state}")
    yield from disk(settings)
    yield from device(settings, ask_device)


def names(check: Callable[[], None]) -> Finding:
    """Whether our packages are ours."""
    try:
        check()
    except NameTaken as error:
        return Finding("names", "wrong", str(error))
    return Finding("names", "ok", f"{', '.join(PACKAGES)} come from {ROOT}")


def python(version: tuple[int, ...]) -> Finding:
    """Whether this Python is one that is tried."""
    text = f"{platform.python_version()} on {platform.platform()}"
    values: dict[str, Value] = {"version": platform.python_version()}
    if PYTHONS[0] <= version <= PYTHONS[1]:
        return Finding("python", "ok", text, values)
    return Finding("python", "wrong", f"{text}: use 3.11, 3.12 or 3.13", values)


def distributions(version_of: Callable[[str], str]) -> Iterator[Finding]:
    """Whether mlx and mlx-lm are there. Neither is imported."""
    for name in ("mlx", "mlx-lm"):
        try:
            version = version_of(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "wrong", "is not installed: run `uv sync`")
        else:
            yield Finding(name, "ok", version, {"version": version})


def sqlite(version: tuple[int, int, int]) -> Finding:
    """Whether SQLite has what the journal needs."""
    text = ".".join(str(part) for part in version)
    values: dict[str, Value] = {"version": text}
    if version < SQLITE_STRICT:
        return Finding("sqlite", "wrong", f"{text}: 3.37 or later is needed", values)
    if version < SQLITE_CAREFREE:
        why = "before 3.51.3 only one connection may write and checkpoint; Fermata keeps to that"
        return Finding("sqlite", "note", f"{text}: {why}", values)
    return Finding("sqlite", "ok", text, values)


def disk(settings: Settings) -> Iterator[Finding]:
    """Whether the state folder can be written, what space it has, and how fast it is."""
    folder = existing(settings.state)
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        what = f"{folder} cannot be written ({error.strerror}): name another with --state"
        yield Finding("state folder", "wrong", what)
        return
    made = "" if folder == settings.state else f" (it is made at the first start, in {folder})"
    yield Finding("state folder", "ok", f"{settings.state} can be written{made}")
    free_bytes = shutil.disk_usage(folder).free
    yield free_space(free_bytes, settings.journal.keep_bytes)
    if free_bytes > LEAST_FREE_BYTES:
        yield disk_rate(folder)


def existing(path: Path) -> Path:
    """The path, or the nearest above it that exists."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def free_space(free_bytes: int, keep_bytes: int) -> Finding:
    """Whether the journal has room to begin, and to become as large as it may."""
    text = f"{free_bytes / 1e9:.1f} GB"
    values: dict[str, Value] = {"free_bytes": free_bytes}
    if free_bytes <= LEAST_FREE_BYTES:
        return Finding("free space", "wrong", f"{text}: too little for a journal", values)
    if free_bytes < keep_bytes:
        why = f"less than the journal may take (journal.keep_bytes: {keep_bytes / 1e9:.1f} GB)"
        return Finding("free space", "note", f"{text}: {why}", values)
    return Finding("free space", "ok", text, values)


def disk_rate(folder: Path) -> Finding:
    """How fast the disk takes bytes, and how long a small flush takes: every end waits for one."""
    block = os.urandom(2**20)
    with tempfile.TemporaryFile(dir=folder) as file:
        begun = time.perf_counter()
        for _ in range(WRITE_BYTES // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
        rate = WRITE_BYTES / (time.perf_counter() - begun)
        flushes_s = [flush_s(file.fileno()) for _ in range(FLUSHES)]
    flush_ms = 1000 * statistics.median(flushes_s)
    return Finding(
        "disk",
        "ok",
        f"writes {rate / 1e6:,.0f} MB/s, a flush takes {flush_ms:.2f} ms",
        {"write_bytes_per_s": round(rate), "flush_ms": round(flush_ms, 3)},
    )


def flush_s(descriptor: int) -> float:
    """Seconds until a small write is on the disk."""
    begun = time.perf_counter()
    os.write(descriptor, b"x" * 4096)
    os.fsync(descriptor)
    return time.perf_counter() - begun


def device(settings: Settings, ask: Callable[[str], str]) -> Iterator[Finding]:
    """What the models are computed on."""
    try:
        values: dict[str, Value] = json.loads(ask(settings.engine.blas))
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        reason = str(getattr(error, "stderr", None) or error).strip()
        yield Finding("device", "wrong", (reason.splitlines() or ["it says nothing"])[-1])
        return
    yield Finding(
        "device",
        "ok",
        f"{values['device']}, float32 at {values['float32_gflops']:,} GFLOP/s",
        values,
    )
    yield blas(str(values["blas"]), settings.engine.blas)


def blas(used: str, setting: str) -> Finding:
    """The matrix library, and whether a faster one is within reach."""
    values: dict[str, Value] = {"used": used}
    if used == "stock" and setting == "auto":
        hint = "with OpenBLAS (libopenblas0-pthread) float32 models run many times faster"
        return Finding("blas", "note", f"the one that mlx brings; {hint}", values)
    return Finding("blas", "ok", f"{used} (engine.blas: {setting})", values)


def ask_device(setting: str) -> str:
    """What a process of its own says of the device: see scheduler/engine/device.py."""
    return subprocess.run(
        (sys.executable, "-P", "-m", "scheduler.engine.device", setting),
        capture_output=True,
        text=True,
        check=True,
        timeout=DEVICE_LIMIT_S,
    ).stdout
