"""The one gate: format, lint and types. Prints what it found and exits 1 when that is anything."""

import subprocess
import sys

COMMANDS = (
    ("ruff", "format", "--check"),
    ("ruff", "check"),
    ("pyright", "--pythonpath", sys.executable),
)


def main() -> int:
    """Runs every check, all of them also after a failure; returns the exit status."""
    failed = [command for command in COMMANDS if subprocess.run(command, check=False).returncode]
    print(f"check: {len(failed)} of {len(COMMANDS)} failed")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
