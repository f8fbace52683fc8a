"""The name guard: the packages of this application have generic names, so others may be in the way.

Fermata lives in an environment of its own. Where it shares one, another distribution that brings a
package of the same name can come first on the import path, and half of this program would be
somebody else's. The guard runs before anything else is imported.
"""

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable
from importlib.machinery import ModuleSpec
from pathlib import Path

PACKAGES = ("journal", "scheduler", "api", "migrations", "tools")
ROOT = Path(__file__).resolve().parents[1]

FindSpec = Callable[[str], ModuleSpec | None]


class NameTaken(Exception):
    """A package does not come from this installation; the message names what is in the way."""


def root_of(spec: ModuleSpec | None) -> Path | None:
    """The folder that a package lies in, or None where it is missing or has no `__init__.py`."""
    if spec is None or spec.origin is None or spec.submodule_search_locations is None:
        return None
    return Path(spec.origin).resolve().parents[1]


def owners_of(
    package: str, distributions: Iterable[importlib.metadata.Distribution] | None = None
) -> list[str]:
    """The distributions other than this one that bring a package of this name, sorted."""
    found: set[str] = set()
    for distribution in distributions or importlib.metadata.distributions():
        files = distribution.files or []
        if any(file.parts[0] == package for file in files):
            found.add(distribution.metadata["Name"])
    return sorted(found - {"mlx-fermata"})


def check_names(find_spec: FindSpec = importlib.util.find_spec, root: Path = ROOT) -> None:
    """Raises NameTaken unless every package resolves under one root. Imports none of them."""
    for package in PACKAGES:
        found = root_of(find_spec(package))
        if found == root:
            continue
        if found is None:
            raise NameTaken(f"the package '{package}' is missing from {root}: install again")
        owners = ", ".join(owners_of(package)) or "no installed distribution"
        raise NameTaken(
            f"the package '{package}' comes from {found} (from {owners}), not from {root}: "
            "give Fermata an environment of its own, for example with `uv tool install`"
        )
