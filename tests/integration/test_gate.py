"""The gate on a small project of its own: what each ready-made tool finds comes out as a line."""

import subprocess
from pathlib import Path

import pytest

from tools import check

PROJECT = """[tool.importlinter]
root_packages = ["upper_part", "lower_part"]

[[tool.importlinter.contracts]]
name = "One way"
type = "layers"
layers = ["upper_part", "lower_part"]
"""
LOWER = """import os
import upper_part

x: int =  'a'
"""


@pytest.fixture
def _project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in {"upper_part": "", "lower_part": LOWER}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(text)
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


@pytest.mark.usefixtures("_project")
def test_each_tool_finds_its_defect() -> None:
    place = "lower_part/__init__.py"
    (layout,) = check.check_format()
    assert (layout.path, layout.line) == (place, 4)
    assert f"{place}:1: F401: `os` imported but unused" in map(str, check.check_lint())
    (types,) = check.check_types()
    assert (types.path, types.line) == (place, 4)
    (imports,) = check.check_imports()
    assert (imports.path, imports.line) == (place, 2)
    (pins,) = check.check_pins()
    assert pins.path == "pyproject.toml"


@pytest.mark.usefixtures("_project")
def test_a_tool_that_cannot_run_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("pyproject.toml").write_text("[tool.ruff]\nno_such_key = 1\n")
    monkeypatch.setattr(check, "CHECKS", (check.check_format, check.check_imports))
    assert check.main() == 1
    output = capsys.readouterr().out
    assert "check_format:1: " in output
    assert "no_such_key" in output
    assert "check_imports:1: lint-imports: " in output


def test_the_rules_run_over_the_tree_that_git_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run(("git", "init", "-q"), check=True)
    Path("a.py").write_text("def park(): ...\n")
    findings = list(map(str, check.check_rules()))
    assert "a.py:1: the word 'park' in the name park" in findings
    assert "README.md:1: is missing" in findings
