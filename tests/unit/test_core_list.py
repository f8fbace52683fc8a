"""The three places that name the modules of the pure core name the same ones."""

import re
import tomllib
from pathlib import Path

from tools.checks.source import CORE

ROOT = Path(__file__).resolve().parents[2]
TOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]


def test_ruff_bans_impure_modules_in_the_core_alone() -> None:
    ignores = TOOLS["ruff"]["lint"]["per-file-ignores"]
    (pattern,) = [pattern for pattern, codes in ignores.items() if "TID251" in codes]
    names = re.fullmatch(r"!scheduler/\{(.*)\}\.py", pattern)
    assert names is not None
    assert [f"scheduler/{name}.py" for name in names[1].split(",")] == list(CORE)


def test_the_import_contract_covers_the_core() -> None:
    (contract,) = [
        contract
        for contract in TOOLS["importlinter"]["contracts"]
        if "scheduler.policy" in contract.get("source_modules", ())
    ]
    present = [path for path in CORE if (ROOT / path).exists()]
    modules = [path.removesuffix(".py").replace("/", ".") for path in present]
    assert contract["source_modules"] == modules
