"""`fermata cache` and `fermata audit misses` as a user runs them."""

import csv
import json
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from io import StringIO
from pathlib import Path

import pytest

from journal.reader import JournalReader
from scheduler.kvcache.store import BlockStore
from tests.integration.http_server import RunningServer, running
from tests.integration.test_http_cache import KV, NUM_TOKENS, ask, wait_for_saves
from tools import audit, cache, cache_verify

NUM_BLOCKS = NUM_TOKENS // 16


@pytest.fixture
def server(state_folder: Path) -> Iterator[RunningServer]:
    """A server that has answered the same prompt twice."""
    with running(state_folder, kv=KV) as server:
        ask(server)
        wait_for_saves(server, NUM_BLOCKS)
        ask(server)
        yield server


@pytest.fixture
def stopped(server: RunningServer) -> Path:
    """What that server leaves behind."""
    server.close()
    return server.folder


def block_files(folder: Path) -> list[Path]:
    return sorted((folder / "kv").rglob("*.safetensors"))


def test_info_and_clear_talk_to_the_server(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    nowhere = Path("nowhere")
    assert cache.info(nowhere, server.url, None, as_json=False) == 0
    shown = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert shown["blocks"].startswith(f"{NUM_BLOCKS} of 16 tokens")
    assert shown["saving"] == "on"
    assert shown["tokens"].endswith(f"{NUM_TOKENS + 1} prefilled")
    assert cache.clear(nowhere, server.url, None, as_json=False) == 0
    assert capsys.readouterr().out.startswith(f"{NUM_BLOCKS} blocks have gone")
    assert cache.info(nowhere, server.url, None, as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["num_blocks"] == 0


@pytest.mark.parametrize("command", [cache.info, cache.clear])
def test_without_a_server_they_say_that_one_is_needed(
    stopped: Path, capsys: pytest.CaptureFixture[str], command: Callable[..., int]
) -> None:
    assert command(stopped, None, None, as_json=False) == 2
    assert "no server runs on" in capsys.readouterr().err
    assert len(block_files(stopped)) == NUM_BLOCKS


def test_clear_says_why_a_server_refuses(
    state_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(state_folder, kv={"enabled": False}) as server:
        assert cache.clear(state_folder, server.url, None, as_json=False) == 2
        assert "kv.enabled is false" in capsys.readouterr().err
        assert cache.info(state_folder, server.url, None, as_json=False) == 0
        assert "off" in capsys.readouterr().out


def test_verify_reads_everything_also_beside_the_server(
    server: RunningServer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cache_verify.run(server.folder, as_json=True) == 0
    report = json.loads(capsys.readouterr().out)
    sizes = [file.stat().st_size for file in block_files(server.folder)]
    assert (report["num_files"], report["num_bytes"]) == (NUM_BLOCKS, sum(sizes))
    assert (report["findings"], report["unknown"]) == ([], [])


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def shorten(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


DAMAGES: dict[str, Callable[[Path], None]] = {
    "corrupt: the data": flip,
    "corrupt": shorten,
    "missing": Path.unlink,
}


@pytest.mark.parametrize("finding", DAMAGES)
def test_verify_names_what_is_damaged(
    stopped: Path, capsys: pytest.CaptureFixture[str], finding: str
) -> None:
    victim = block_files(stopped)[3]
    DAMAGES[finding](victim)
    assert cache_verify.run(stopped, as_json=False) == 1
    line, last = capsys.readouterr().out.splitlines()
    assert line.startswith(f"{victim.relative_to(stopped / 'kv')}: {finding}")
    num_read = NUM_BLOCKS - 1 if finding == "missing" else NUM_BLOCKS
    assert last.startswith(f"{num_read} files read")
    assert last.endswith("0 unknown files, 1 findings")


def test_verify_compares_sizes_and_counts_what_nobody_knows(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with closing(sqlite3.connect(stopped / "journal.db")) as database:
        database.execute("UPDATE block SET block_bytes = 7 WHERE parent = ''")
        database.commit()
    (stopped / "kv" / "stray").write_bytes(b"")
    assert cache_verify.run(stopped, as_json=False) == 1
    line, last = capsys.readouterr().out.splitlines()
    assert line.endswith("bytes, the journal says 7")
    assert last.endswith("1 unknown files, 1 findings")


def test_verify_calls_nothing_unknown_that_the_server_saves_or_removes_meanwhile(
    server: RunningServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths_in = cache_verify.paths_in

    def meanwhile(folder: Path) -> list[str]:
        ask(server, "Quite another text. " * 8)
        wait_for_saves(server, NUM_BLOCKS + 10)
        paths = [*paths_in(folder), "gone"]
        assert len(paths) == NUM_BLOCKS + 11
        return paths

    monkeypatch.setattr(cache_verify, "paths_in", meanwhile)
    with JournalReader.open(server.folder) as reader:
        report = cache_verify.verify(reader, BlockStore(server.folder / "kv"))
    assert (report.num_files, report.unknown) == (NUM_BLOCKS, [])


def test_verify_reads_what_held_requests_have_behind_their_blocks(
    state_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    body = {"model": "default", "prompt": "held " * 30, "max_tokens": 400, "ignore_eos": True}
    with (
        running(state_folder, kv={**KV, "block_tokens": 1024}, fake={"step_ms": 5}) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        asked = pool.submit(server.http.post, "/v1/completions", json=body)
        request_id = server.wait_for_phase("decoding")
        assert server.http.post(f"/v1/requests/{request_id}/pause").status_code == 200
        (tail,) = (state_folder / "kv").rglob("tails/*")
        assert cache_verify.run(state_folder, as_json=True) == 0
        report = json.loads(capsys.readouterr().out)
        assert (report["num_files"], report["num_bytes"]) == (1, tail.stat().st_size)
        assert report["unknown"] == []
        flip(tail)
        assert cache_verify.run(state_folder, as_json=False) == 1
        assert capsys.readouterr().out.startswith(f"{tail.relative_to(state_folder / 'kv')}: ")
        server.http.delete(f"/v1/requests/{request_id}")
        assert asked.result().status_code == 410
    assert cache_verify.run(state_folder, as_json=False) == 0


def test_verify_takes_the_journal_in_place_of_its_folder(
    stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cache_verify.run(stopped / "journal.db", as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["num_files"] == NUM_BLOCKS


def test_verify_without_a_journal_exits_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cache_verify.run(tmp_path, as_json=False) == 2
    assert "no such journal" in capsys.readouterr().err


def test_misses_in_each_format(stopped: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert audit.misses(stopped, audit.Wanted(form="json")) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["parted_at_tokens"], first["parted_because"]) == (0, "unknown")
    assert (second["parted_at_tokens"], second["parted_because"]) == (NUM_TOKENS, "whole")
    restored = second["num_memory_tokens"] + second["num_disk_tokens"]
    assert (restored, second["num_prefilled_tokens"]) == (NUM_TOKENS - 1, 1)
    assert audit.misses(stopped, audit.Wanted(form="csv")) == 0
    rows = list(csv.DictReader(StringIO(capsys.readouterr().out)))
    assert [int(row["parted_at_tokens"]) for row in rows] == [0, NUM_TOKENS]
    assert audit.misses(stopped, audit.Wanted(form="table")) == 0
    header, *lines = capsys.readouterr().out.splitlines()
    assert header.split()[:3] == ["received", "request", "prompt"]
    assert [line.split()[1] for line in lines] == [row["request_id"] for row in rows]


def test_a_table_of_misses_is_bounded(
    stopped: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "TABLE_ROWS", 1)
    assert audit.misses(stopped, audit.Wanted(form="table")) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("... these are the first 1")
    assert audit.misses(stopped / "nothing", audit.Wanted(form="table")) == 2
