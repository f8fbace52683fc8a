"""The parts of `fermata crash`: points around files, the hook that ends, bytes over the wire."""

import asyncio
import errno
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from journal import crashpoints
from scheduler.kvcache.files import OsFiles, write_whole
from scheduler.kvcache.naming import BlockFile, StateFile, TailFile
from scheduler.kvcache.pointed_files import PointedFiles, default_files
from scheduler.kvcache.store import BlockStore
from tools.crash_child import CrashHook, End, Fault, LifePlan
from tools.crash_clients import Ask, Attempt, Crowd, Deeds
from tools.crash_model import differing
from tools.crash_wire import Cut, exchange, parse

HASH = "ab" * 32
DOMAIN = "cd" * 32


@pytest.fixture
def reached() -> Iterator[list[str]]:
    """The names of the points that are reached, in order."""
    names: list[str] = []
    crashpoints.install(names.append)
    yield names
    crashpoints.remove()


def test_files_have_points_only_while_a_hook_is_installed() -> None:
    assert type(default_files()) is OsFiles
    crashpoints.install([].append)
    try:
        assert type(default_files()) is PointedFiles
    finally:
        crashpoints.remove()


def test_a_file_is_written_between_points(tmp_path: Path, reached: list[str]) -> None:
    (tmp_path / "ab").mkdir()
    write_whole(PointedFiles(), tmp_path / "ab" / "x", [memoryview(b"one"), memoryview(b"two")])
    assert (tmp_path / "ab" / "x").read_bytes() == b"onetwo"
    operations = ("create", "write", "write", "flush", "rename")
    expected = [f"file.{o}.{when}.block" for o in operations for when in ("before", "after")]
    expected += [f"file.flush_folder.{when}.blocks" for when in ("before", "after")]
    assert reached == expected


@pytest.mark.parametrize(
    ("file", "what"),
    [
        (BlockFile(DOMAIN, HASH), "block"),
        (StateFile(DOMAIN, HASH), "state"),
        (TailFile(DOMAIN, "req_1", 7), "tail"),
    ],
)
def test_points_say_whose_file_it_is(
    tmp_path: Path, reached: list[str], file: Any, what: str
) -> None:
    store = BlockStore(tmp_path, PointedFiles())
    store.save(file, {})
    store.verify(file)
    store.remove(file)
    for operation in ("create", "write", "flush", "rename", "open", "read", "unlink"):
        assert f"file.{operation}.after.{what}" in reached
    named = {name for name in reached if name.count(".") == 3 and "folder" not in name}
    assert all(name.endswith(f".{what}") for name in named)
    assert set(reached) <= crashpoints.POINTS.keys()


def test_what_a_sweep_removes_is_nobodys(tmp_path: Path, reached: list[str]) -> None:
    (tmp_path / "x.1-1.tmp").touch()
    PointedFiles().unlink(tmp_path / "x.1-1.tmp")
    assert reached == ["file.unlink.before.unknown", "file.unlink.after.unknown"]


def test_the_hook_ends_the_process_at_the_pass_that_was_planned() -> None:
    ended: list[End] = []
    plan = LifePlan("", {}, ends=(End("step.done", 3), End("recovery.done", 1)))
    hook = CrashHook(plan, ended.append, list[str])
    for _ in range(4):
        hook("step.done")
    assert ended == [End("step.done", 3)]
    assert hook.passes == {"step.done": 4}
    with pytest.raises(AssertionError, match="not listed"):
        hook("no such point")


def test_the_hook_makes_the_faults_that_were_planned() -> None:
    plan = LifePlan("", {}, faults=(Fault("file.write.before.block", errno.ENOSPC, 2, 3),))
    hook = CrashHook(plan, str, list[str])
    name = "file.write.before.block"
    hook(name)
    for _ in range(2):
        with pytest.raises(OSError, match="planned") as caught:
            hook(name)
        assert caught.value.errno == errno.ENOSPC
    hook(name)


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """The address of a server that gives this answer to everybody, and hangs up."""

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"


def asked(answer: bytes) -> list[tuple[int | None, bytes]]:
    """The events of an answer. Raises Cut."""

    async def ask() -> list[tuple[int | None, bytes]]:
        async with answering(answer) as address, exchange(address, "GET", "/") as found:
            return [event async for event in found.events()]

    return asyncio.run(ask())


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def test_events_come_whole_also_out_of_pieces() -> None:
    pieces = (b"id: 1\ndata: a\n", b"\n: heartbeat\n\nid: 2\nda", b"ta: b\n\n", b"")
    assert asked(HEAD + b"".join(map(chunk, pieces))) == [(1, b"a"), (2, b"b")]
    assert parse(b": heartbeat") is None
    assert parse(b"data: x") == (None, b"x")


@pytest.mark.parametrize(
    "answer",
    [b"", HEAD[:20], HEAD, HEAD + chunk(b"id: 1\ndata: a\n\n"), HEAD + chunk(b"id: 1\nda")[:-4]],
)
def test_an_answer_that_is_not_whole_is_cut(answer: bytes) -> None:
    with pytest.raises(Cut):
        asked(answer)


def test_a_refused_connection_is_cut() -> None:
    async def ask() -> None:
        async with answering(b"") as address:
            pass
        async with exchange(address, "GET", "/"):
            pass

    with pytest.raises(Cut):
        asyncio.run(ask())


def test_a_position_that_comes_again_is_a_problem() -> None:
    (client,) = Crowd([Ask("/v1/completions", {"stream": True})], Deeds(str)).clients
    attempt = Attempt("req_1")
    event = b'{"choices": [{"text": "a", "finish_reason": null}]}'
    client.take(attempt, 1, event)
    client.take(attempt, 2, event)
    assert client.problems == []
    client.take(attempt, 2, event)
    assert client.problems == ["req_1: 2 came again"]


def test_saved_files_that_differ_are_found() -> None:
    one = {"a": b"1", "b": b"2", "c": b"3"}
    assert differing(one, {"a": b"1", "b": b"0", "d": b"3"}) == ["b"]
