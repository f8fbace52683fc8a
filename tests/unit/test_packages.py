"""The packages of the distribution are importable from one root."""

import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["journal", "scheduler", "api", "tools", "migrations"])
def test_package_comes_from_this_tree(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__file__ is not None
    assert Path(module.__file__).parent == ROOT / name
