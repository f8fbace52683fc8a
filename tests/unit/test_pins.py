"""The pins come from the lock, whole and with the markers of its forks."""

from pathlib import Path

import pytest

from tools import pins

LOCK = """
[[package]]
name = "mlx-fermata"
version = "0.1.0"
source = { editable = "." }

[[package]]
name = "numpy"
version = "2.4.6"
source = { registry = "somewhere" }
resolution-markers = ["python_full_version < '3.12'", "sys_platform == 'linux'"]

[[package]]
name = "numpy"
version = "2.5.5"
source = { registry = "somewhere" }

[[package]]
name = "builder"
version = "1.0"
source = { registry = "somewhere" }
dependencies = [{ name = "leaf" }]

[[package]]
name = "leaf"
version = "2.0"
source = { registry = "somewhere" }
dependencies = [{ name = "builder" }]
"""
PROJECT = f"""[build-system]
requires = ["builder==1.0"]

[tool.uv]
{pins.BEGIN}
{pins.END}

[tool.other]
"""
SECTION = f"""{pins.BEGIN}
constraint-dependencies = [
    "builder==1.0",
    "leaf==2.0",
    "numpy==2.4.6; (python_full_version < '3.12') or (sys_platform == 'linux')",
    "numpy==2.5.5",
]
build-constraint-dependencies = [
    "builder==1.0",
    "leaf==2.0",
]
{pins.END}"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "pyproject.toml").write_text(PROJECT)
    (tmp_path / "uv.lock").write_text(LOCK)
    return tmp_path


def test_the_section_is_written_and_then_fresh(root: Path) -> None:
    assert pins.main(["--check"], root) == 1
    assert (root / "pyproject.toml").read_text() == PROJECT
    assert pins.main([], root) == 0
    expected = PROJECT.replace(f"{pins.BEGIN}\n{pins.END}", SECTION)
    assert (root / "pyproject.toml").read_text() == expected
    assert pins.main(["--check"], root) == 0


def test_another_version_in_the_lock_makes_the_pins_stale(root: Path) -> None:
    pins.main([], root)
    (root / "uv.lock").write_text(LOCK.replace("2.5.5", "2.5.6"))
    assert pins.main(["--check"], root) == 1


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("uv.lock", None, "uv.lock is missing: run `uv lock`"),
        ("uv.lock", LOCK.replace('"builder"', '"other"'), "uv.lock lacks builder"),
        ("pyproject.toml", PROJECT.replace(pins.END, ""), "put the lines"),
    ],
)
def test_what_cannot_be_pinned_is_said(
    root: Path, capsys: pytest.CaptureFixture[str], name: str, text: str | None, message: str
) -> None:
    (root / name).unlink()
    if text is not None:
        (root / name).write_text(text)
    assert pins.main([], root) == 2
    assert message in capsys.readouterr().err
