"""What every test shares. The warning filter and the time limit are in pyproject.toml."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from hypothesis import settings

SMALL_DISK_BYTES = 2**20

# The time limit of a test is pytest's; a limit for each example would fail on a busy machine.
settings.register_profile("fermata", deadline=None, print_blob=True)
settings.load_profile("fermata")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--rewrite` writes the golden scenario files anew, for their difference to be reviewed."""
    parser.addoption("--rewrite", action="store_true", help="rewrite golden scenario files")


@pytest.fixture
def small_disk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """An empty file system of 1 MiB."""
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("only root on Linux may mount a file system")
    folder = tmp_path_factory.mktemp("disk")
    mount = ("mount", "-t", "tmpfs", "-o", f"size={SMALL_DISK_BYTES}", "tmpfs", str(folder))
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(("umount", "-l", str(folder)), check=True)


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """What a command sets for its own process does not outlive the test that calls it."""
    before = structlog.get_config()
    yield
    structlog.configure(**before)
