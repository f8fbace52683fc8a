"""`fermata pause` and `fermata resume` against a real server."""

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.integration.http_server import RunningServer, running
from tools.hold import run

BODY: dict[str, Any] = {
    "model": "default",
    "prompt": "hello",
    "max_tokens": 50,
    "ignore_eos": True,
}


def wish(server: RunningServer, wanted: Any, given: str, *, as_json: bool = False) -> int:
    return run(wanted, given, server.folder, server.url, None, as_json=as_json)


def test_a_request_is_held_by_a_short_id_and_released_by_a_whole_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(tmp_path, fake={"step_ms": 10}) as server, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.http.post, "/v1/completions", json=BODY)
        request_id = server.wait_for_phase("decoding")
        assert wish(server, "pause", request_id[4:12]) == 0
        held = f"{request_id} is paused: held by hand until it is released\n"
        assert capsys.readouterr().out == held
        assert wish(server, "resume", request_id, as_json=True) == 0
        released = json.loads(capsys.readouterr().out)
        assert (released["id"], released["hold"]) == (request_id, False)
        assert answer.result().json()["usage"]["completion_tokens"] == 50
        assert wish(server, "pause", request_id) == 2
        assert "answered 409 Conflict: The request has ended" in capsys.readouterr().err
        assert wish(server, "pause", request_id[:10]) == 2
        assert "fermata pause: no open request is" in capsys.readouterr().err
        assert wish(server, "resume", "req_" + "0" * 26) == 2
        assert "fermata resume: " in capsys.readouterr().err


def test_without_a_server_one_line_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("pause", "a", tmp_path, None, None, as_json=False) == 2
    assert "fermata pause: no server runs on" in capsys.readouterr().err
