"""`fermata doctor` as a process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import sys
from tools.cli import main
sys.argv[0] = "fermata"
try:
    main()
finally:
    heavy = {"mlx", "mlx_lm", "transformers", "fastapi"} & set(sys.modules)
    print("heavy:", sorted(heavy), file=sys.stderr)
"""


def doctor(state: Path) -> subprocess.CompletedProcess[str]:
    """The command on this state folder; what it imported is on stderr."""
    return subprocess.run(
        (sys.executable, "-c", SCRIPT, "doctor", "--json", "--state", str(state)),
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.engine
@pytest.mark.timeout(120)
def test_it_sees_the_device_without_importing_mlx(tmp_path: Path) -> None:
    result = doctor(tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    body = json.loads(result.stdout.splitlines()[-1])
    found = {finding["name"]: finding for finding in body["findings"]}
    assert body["ok"] is True
    assert found["device"]["values"]["device"].startswith("Device(")
    assert found["blas"]["values"]["used"] in ("stock", "openblas", "metal", "cuda")
    assert result.stderr == "heavy: []\n"


@pytest.mark.timeout(120)
def test_what_stops_a_server_is_exit_status_1(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    result = doctor(file)
    assert result.returncode == 1
    assert f"wrong  state folder  {file} cannot be written" in result.stdout
    assert json.loads(result.stdout.splitlines()[-1])["ok"] is False
