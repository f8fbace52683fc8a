"""`fermata --help` stays light."""

import subprocess
import sys

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
SCRIPT = """
import sys
from tools.cli import main
sys.argv = ["fermata", "--help"]
try:
    main()
except SystemExit as stop:
    assert not stop.code
print("loaded:", *sorted({name.partition(".")[0] for name in sys.modules}))
"""


def test_help_imports_nothing_heavy() -> None:
    result = subprocess.run(
        (sys.executable, "-c", SCRIPT), capture_output=True, text=True, check=True
    )
    text, _, loaded = result.stdout.partition("loaded:")
    assert "Usage: fermata" in text
    assert "typer" in loaded.split()
    assert HEAVY.isdisjoint(loaded.split())
