"""Ports on a test's own folder, closed at the end."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.kvcache.models import Case
from tests.kvcache.port import WAIT_S, Port


@pytest.fixture
def make_port(tmp_path: Path) -> Iterator[Callable[..., Port]]:
    """Ports on one folder, closed at the end."""
    ports: list[Port] = []

    def make(case: Case, **settings: Any) -> Port:
        ports.append(Port(tmp_path, case, **settings))
        return ports[-1]

    yield make
    for port in ports:
        port.kv.close(WAIT_S)
