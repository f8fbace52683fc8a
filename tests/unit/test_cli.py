"""`fermata --help` stays light."""

import subprocess
import sys

from tests.loaded import SCRIPT

HEAVY = {
    "alembic",
    "fastapi",
    "httpx2",
    "mlx",
    "mlx_lm",
    "numpy",
    "openai",
    "sqlalchemy",
    "uvicorn",
}


def test_help_imports_nothing_heavy() -> None:
    result = subprocess.run(
        (sys.executable, "-c", SCRIPT, "--help"), capture_output=True, text=True, check=True
    )
    text, _, loaded = result.stdout.partition("loaded:")
    assert "Usage: fermata" in text
    assert "typer" in loaded.split()
    assert HEAVY.isdisjoint(loaded.split())
