"""`fermata ps` against a real server process."""

import json
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools.ps import run
from tools.server_process import ServerProcess

BODY = {
    "model": "default",
    "messages": [{"role": "user", "content": "hello"}],
    "max_tokens": 7,
    "stream": True,
}


@pytest.fixture
def address(tmp_path: Path) -> Iterator[str]:
    """A server whose decode steps take a minute: what it was asked for stays under way."""
    server = ServerProcess("fake", tmp_path, {"FERMATA_FAKE__STEP_MS": "60000"})
    try:
        yield server.address()
    finally:
        server.close()


def test_a_request_that_is_under_way_is_shown(
    address: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    request = urllib.request.Request(
        f"{address}/v1/chat/completions",
        json.dumps(BODY).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as answer:
        answer.readline()
        request_id = answer.headers["X-Request-Id"]
        assert run(tmp_path, None, None, as_json=False) == 0
        header, row = capsys.readouterr().out.splitlines()[:2]
        assert run(tmp_path, None, None, as_json=True) == 0
        body = json.loads(capsys.readouterr().out)
    assert header.startswith("request")
    short, state, _, output = row.split()[:4]
    assert len(short) == 10
    assert request_id.startswith(short)
    assert (state, output) == ("decoding", "0/7")
    assert [entry["id"] for entry in body["data"]] == [request_id]
