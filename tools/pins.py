"""Writes the exact versions of the whole closure into pyproject.toml.

They come from the uv.lock that `uv lock` makes. That file holds addresses of package registries, so
it is not committed; names and versions are enough to get the same environment again. Run `uv lock`,
then `python -m tools.pins`. With `--check` nothing is written, and the exit status is 1 when the
section is missing or differs from uv.lock.
"""

import argparse
import sys
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

BEGIN = "# pins: begin (written by `python -m tools.pins`)"
END = "# pins: end"

Package = Mapping[str, Any]


class PinsError(Exception):
    """The pins cannot be read or written; the message says what to do."""


def pin_of(package: Package) -> str:
    """The requirement for one package of the lock file, with the markers of its fork.

    Where the resolution forks, a package is in the lock once a fork.
    """
    pin = f"{package['name']}=={package['version']}"
    markers = package.get("resolution-markers", [])
    return pin + ("; " + " or ".join(f"({marker})" for marker in markers) if markers else "")


def closure_of(packages: Sequence[Package], names: Iterable[str]) -> list[Package]:
    """The packages of these names and of all that they depend on. Raises PinsError if one lacks."""
    left = list(names)
    seen: set[str] = set()
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        found = [package for package in packages if package["name"] == name]
        if not found:
            raise PinsError(f"uv.lock lacks {name}: name it in the dependency group 'build'")
        left.extend(need["name"] for package in found for need in package.get("dependencies", ()))
    return [package for package in packages if package["name"] in seen]


def _table(key: str, packages: Sequence[Package]) -> str:
    lines = "".join(f'    "{pin}",\n' for pin in sorted(map(pin_of, packages)))
    return f"{key} = [\n{lines}]\n"


def section_of(lock: Mapping[str, Any], build_names: Iterable[str]) -> str:
    """The text from BEGIN to END: pins of the whole lock, and those of what builds the wheel."""
    packages = [package for package in lock["package"] if "registry" in package["source"]]
    return (
        f"{BEGIN}\n{_table('constraint-dependencies', packages)}"
        f"{_table('build-constraint-dependencies', closure_of(packages, build_names))}{END}"
    )


def with_section(text: str, section: str) -> str:
    """The project file with its pins replaced. Raises PinsError where BEGIN or END is missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise PinsError(f"pyproject.toml: put the lines {BEGIN!r} and {END!r} into [tool.uv]")
    return before + section + after


def fresh_text(root: Path) -> tuple[str, str]:
    """The project file as it is, and as uv.lock says that it should be. Raises PinsError."""
    text = (root / "pyproject.toml").read_text()
    lock = root / "uv.lock"
    if not lock.is_file():
        raise PinsError("uv.lock is missing: run `uv lock`")
    requires = tomllib.loads(text)["build-system"]["requires"]
    build_names = [requirement.partition("==")[0] for requirement in requires]
    return text, with_section(text, section_of(tomllib.loads(lock.read_text()), build_names))


def main(arguments: Sequence[str] | None = None, root: Path = Path()) -> int:
    """Writes the pins, or compares them; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.pins", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 when stale")
    options = parser.parse_args(arguments)
    try:
        text, fresh = fresh_text(root)
    except PinsError as error:
        print(f"pins: {error}", file=sys.stderr)
        return 2
    if options.check:
        if text != fresh:
            print("pins: stale; run `uv lock`, then `python -m tools.pins`", file=sys.stderr)
        return int(text != fresh)
    (root / "pyproject.toml").write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
