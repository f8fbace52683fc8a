"""A backup of a running server's journal takes the journal's place, and serves on."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from journal.events import ChainRestored
from journal.reader import JournalReader
from tests.integration.http_server import TIMEOUT_S, RunningServer, running
from tests.integration.kv_serving import (
    BLOCK_TOKENS,
    NUM_TOKENS,
    ask,
    expected,
    files_below,
    prompt,
    recorded,
    serving,
    wait_for_blocks,
)
from tools import audit, journal_info, replay
from tools import backup as command

MODEL = "tiny-hybrid"
STATE_EVERY = 2
NUM_BLOCKS = NUM_TOKENS // BLOCK_TOKENS
NUM_SENT = 20
BODY: dict[str, Any] = {
    "model": "default",
    "prompt": prompt(7),
    "max_tokens": 400,
    "ignore_eos": True,
    "temperature": 0,
    "logprobs": 3,
    "stream": True,
}


def output(path: Path, request_id: str) -> tuple[list[int], object]:
    """A request's output tokens and their log-probabilities."""
    with JournalReader.open(path) as reader:
        tokens, logprobs = reader.output_tokens(request_id)
    return tokens.tolist(), logprobs


@contextmanager
def generating(server: RunningServer, body: dict[str, Any]) -> Iterator[str]:
    """A request that has sent some tokens. Its client stays, and reads it to its end."""
    with server.http.stream("POST", "/v1/completions", json=body) as answer:
        lines = answer.iter_lines()
        assert any(line.startswith("id: ") and int(line[4:]) >= NUM_SENT for line in lines)
        yield answer.headers["x-request-id"]
        for _ in lines:
            pass


def wait_until_gone(folder: Path, files: set[Path]) -> None:
    """Returns once these files are gone: unknown ones are removed while the server works."""
    deadline = time.monotonic() + TIMEOUT_S
    while files & set(files_below(folder)):
        assert time.monotonic() < deadline, "files that no event knows stay"


@pytest.mark.engine
def test_backup_in_the_journals_place_finds_what_was_saved_and_sweeps_what_is_newer(
    state_folder: Path, tmp_path: Path
) -> None:
    file = tmp_path / "backup.db"
    with serving(state_folder, MODEL, state_every_blocks=STATE_EVERY) as server:
        ask(server, prompt(1))
        wait_for_blocks(server, NUM_BLOCKS)
        with generating(server, BODY) as request_id:
            assert server.http.post(f"/v1/requests/{request_id}/pause").status_code == 200
            assert command.run(state_folder, file, force=False) == 0
            server.http.post(f"/v1/requests/{request_id}/resume").raise_for_status()
        wait_for_blocks(server, 2 * NUM_BLOCKS)
        older = set(files_below(state_folder))
        later = ask(server, prompt(3))
        wait_for_blocks(server, 3 * NUM_BLOCKS)
        newer = set(files_below(state_folder)) - older
    undisturbed = output(state_folder, request_id)
    assert NUM_SENT <= len(output(file, request_id)[0]) < len(undisturbed[0])
    assert newer
    file.rename(state_folder / "journal.db")
    with serving(state_folder, MODEL, state_every_blocks=STATE_EVERY) as server:
        wait_until_gone(state_folder, newer)
        assert server.http.get(f"/v1/requests/{later.request_id}").status_code == 404
        server.http.post(f"/v1/requests/{request_id}/resume")
        assert server.wait_for_end(request_id)["state"] == "finished"
        again = ask(server, prompt(1))
    assert output(state_folder, request_id) == undisturbed
    assert again.content == expected(MODEL, 1)
    assert again.num_cached_tokens >= (NUM_BLOCKS - STATE_EVERY) * BLOCK_TOKENS
    resumed = [e for e in recorded(state_folder, ChainRestored) if e.request_id == request_id]
    assert resumed[0].num_tokens >= (NUM_BLOCKS - STATE_EVERY) * BLOCK_TOKENS


def test_running_request_goes_on_from_the_backup(state_folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "backup.db"
    slow = {"step_ms": 10, "turn_tokens": 0}
    body = {**BODY, "prompt": "once", "logprobs": None, "max_tokens": 150}
    with running(state_folder, fake=slow) as server, generating(server, body) as request_id:
        assert command.run(state_folder, file, force=False) == 0
    in_backup, _ = output(file, request_id)
    assert NUM_SENT <= len(in_backup) < len(output(state_folder, request_id)[0])
    for status in (
        journal_info.verify(file),
        journal_info.info(file, as_json=True),
        audit.misses(file, audit.Wanted(form="csv")),
        replay.run(file, replay.Wanted()),
    ):
        assert status == 0
    file.rename(state_folder / "journal.db")
    with running(state_folder, fake={"turn_tokens": 0}) as server:
        assert server.wait_for_end(request_id)["state"] == "finished"
    tokens, _ = output(state_folder, request_id)
    assert len(tokens) == body["max_tokens"]
    assert tokens[: len(in_backup)] == in_backup
