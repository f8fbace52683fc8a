"""What the benchmarks share: a measurement, the machine it was taken on, and how both are shown.

With `--json` a benchmark puts one JSON object on the last line of stdout. Its keys are fixed:

- `name`: of the headline measurement, `bench.measurement`
- `unit`: of `value` and `samples`
- `value`: the median of `samples`
- `samples`: one value per round, in the order in which the rounds were taken
- `machine`: `system`, `processor`, `cores`, `memory_bytes`, `python`
- `versions`: of the distributions that the numbers depend on, and of SQLite
- `seed`: what the benchmark's own choices are drawn from
- `measurements`: all of them, the headline first, each with `name`, `unit`, `value`, `samples`,
  `target` (as text, null when there is none) and `met` (null without a target)
- `details`: numbers that explain the others, by name
"""

import importlib.metadata
import os
import platform
import sqlite3
import statistics
from collections.abc import Mapping, Sequence

import msgspec
import psutil

DISTRIBUTIONS = ("mlx-fermata", "mlx", "mlx-lm", "msgspec", "sqlalchemy")

Number = int | float
Details = Mapping[str, Number | str | bool | None]


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """One number with the rounds that it is the median of, and its target if it has one."""

    name: str
    unit: str
    value: Number
    samples: tuple[Number, ...]
    target: str | None = None
    met: bool | None = None

    def line(self) -> str:
        """The measurement for people."""
        target = "" if self.target is None else f"   target {self.target}"
        missed = "" if self.met in (None, True) else "   MISSED"
        return f"{self.name:44} {self.value:>12.4g} {self.unit}{target}{missed}"


def measure(
    name: str,
    unit: str,
    samples: Sequence[Number],
    *,
    at_most: Number | None = None,
    at_least: Number | None = None,
) -> Measurement:
    """The median of the rounds, held against its target. Raises ValueError without any round."""
    if not samples:
        raise ValueError(f"{name} was not measured")
    value = statistics.median(samples)
    common = {"name": name, "unit": unit, "value": value, "samples": tuple(samples)}
    if at_most is not None:
        return Measurement(**common, target=f"at most {at_most:g} {unit}", met=value <= at_most)
    if at_least is not None:
        return Measurement(**common, target=f"at least {at_least:g} {unit}", met=value >= at_least)
    return Measurement(**common)


def machine() -> dict[str, str | int]:
    """What the numbers were taken on. No host name: a report is made to be shown around."""
    return {
        "system": f"{platform.system()} {platform.release()}",
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count() or 1,
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """The versions that the numbers depend on."""
    found = {name: importlib.metadata.version(name) for name in DISTRIBUTIONS}
    return found | {"sqlite": sqlite3.sqlite_version}


def report(
    bench: str, measurements: Sequence[Measurement], *, seed: int, details: Details | None = None
) -> dict[str, object]:
    """The object of `--json`: see the module's text. The first measurement is the headline."""
    headline = measurements[0]
    return {
        "name": f"{bench}.{headline.name}",
        "unit": headline.unit,
        "value": headline.value,
        "samples": headline.samples,
        "machine": machine(),
        "versions": versions(),
        "seed": seed,
        "measurements": measurements,
        "details": dict(details or {}),
    }


def show(
    bench: str,
    measurements: Sequence[Measurement],
    *,
    seed: int,
    as_json: bool,
    details: Details | None = None,
) -> None:
    """Prints the measurements for people, and after them the object if `--json` asked for it."""
    for measurement in measurements:
        print(measurement.line())
    for name, value in (details or {}).items():
        print(f"{name:44} {value}")
    if as_json:
        body = report(bench, measurements, seed=seed, details=details)
        print(msgspec.json.encode(body).decode(), flush=True)
