"""A state folder whose journal is replayed when its test is over."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.replaying import assert_replays


@pytest.fixture
def state_folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder. The journal that the test leaves in it must replay without divergence."""
    folder = tmp_path / "state"
    yield folder
    assert_replays(folder)
