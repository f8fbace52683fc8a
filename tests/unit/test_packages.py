"""What is shipped, what is guarded and what is imported are the same packages, from one root."""

import importlib
import tomllib
from pathlib import Path

import pytest

from tools.nameguard import PACKAGES

ROOT = Path(__file__).resolve().parents[2]


def test_every_shipped_package_is_guarded() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == list(PACKAGES)
    assert sorted(PACKAGES) == sorted(
        path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"
    )


@pytest.mark.parametrize("name", PACKAGES)
def test_package_comes_from_this_tree(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__file__ is not None
    assert Path(module.__file__).parent == ROOT / name
