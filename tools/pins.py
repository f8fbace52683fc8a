"""Writes the exact versions of the whole closure into pyproject.toml.

They come from the uv.lock that `uv lock` makes. That file holds addresses of package registries, so
it is not committed; names and versions are enough to get the same environment again. Run `uv lock`,
then `python -m tools.pins`. With `--check` nothing is written, and the exit status is 1 when the
section is missing or differs from uv.lock.
"""

import argparse
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN = "# pins: begin (written by `python -m tools.pins`)"
END = "# pins: end"


class PinsError(Exception):
    """The pins cannot be read or written; the message says what to do."""


def pins_of(lock: Mapping[str, Any]) -> list[str]:
    """One requirement a package and version of the lock file, sorted, without the project itself.

    Where the resolution forks, a package is there several times, each with the markers of its fork.
    """
    packages = [p for p in lock.get("package", []) if "registry" in p["source"]]
    pins: list[str] = []
    for package in packages:
        pin = f"{package['name']}=={package['version']}"
        markers = package.get("resolution-markers", [])
        if markers:
            pin += "; " + " or ".join(f"({marker})" for marker in markers)
        pins.append(pin)
    return sorted(pins)


def section_of(pins: Sequence[str]) -> str:
    """The text between the two markers, as TOML."""
    lines = "".join(f'    "{pin}",\n' for pin in pins)
    return f"{BEGIN}\nconstraint-dependencies = [\n{lines}]\n{END}"


def with_section(text: str, section: str) -> str:
    """The project file with its pins replaced. Raises PinsError where the markers are missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise PinsError(f"pyproject.toml: put the lines {BEGIN!r} and {END!r} into [tool.uv]")
    return before + section + after


def read_lock(path: Path) -> Mapping[str, Any]:
    """uv.lock as a mapping. Raises PinsError when it is missing."""
    if not path.is_file():
        raise PinsError(f"{path.name} is missing: run `uv lock` first")
    return tomllib.loads(path.read_text())


def fresh_text(root: Path) -> tuple[str, str]:
    """The project file as it is, and as uv.lock says that it should be."""
    text = (root / "pyproject.toml").read_text()
    return text, with_section(text, section_of(pins_of(read_lock(root / "uv.lock"))))


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the pins, or compares them; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.pins", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 when stale")
    parser.add_argument("--root", type=Path, default=Path())
    options = parser.parse_args(arguments)
    try:
        text, fresh = fresh_text(options.root)
    except PinsError as error:
        print(f"pins: {error}", file=sys.stderr)
        return 2
    if options.check:
        if text != fresh:
            print("pins: stale; run `uv lock`, then `python -m tools.pins`", file=sys.stderr)
        return int(text != fresh)
    (options.root / "pyproject.toml").write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
