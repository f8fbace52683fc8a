"""Each commit of `power` is flushed before its effect, as the order of a server's system calls has
it. Needs strace, and the right to trace.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.integration.http_server import TIMEOUT_S
from tools.server_file import read_server_file

ROOT = Path(__file__).resolve().parents[2]
CALLS = "pwrite64,write,writev,sendto,sendmsg,fsync,fdatasync,rename,renameat,unlink,unlinkat"
STRACE = ("strace", "-f", "--seccomp-bpf", "-y", "-qq", "-s", "9000", "-e", f"trace={CALLS}", "-o")


@pytest.fixture(scope="module", autouse=True)
def tracer() -> None:
    """Skips where nothing can be traced."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    command = (*STRACE, "/dev/null", "true")
    tried = subprocess.run(command, capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"nothing may be traced here: {tried.stderr.strip()}")


@dataclass(frozen=True)
class Call:
    """One system call: its name, what was given to it, and the lines where it begins and ends."""

    name: str
    text: str
    begin: int
    end: int


LINE = re.compile(r"^(\d+) +(?:(\w+)\((.*)|<\.\.\. (\w+) resumed>(.*))$")


def calls_in(trace: Path) -> Iterator[Call]:
    """The calls of a trace, in the order in which they begin. One that another thread's call lies
    inside has two lines.
    """
    found: list[Call] = []
    unfinished: dict[str, Call] = {}
    for number, line in enumerate(trace.read_text(errors="replace").splitlines()):
        match = LINE.match(line)
        if match is None:
            continue
        thread, name, text, resumed, _ = match.groups()
        if resumed is not None:
            begun = unfinished.pop(thread)
            found.append(Call(begun.name, begun.text, begun.begin, number))
        elif text.endswith("<unfinished ...>"):
            unfinished[thread] = Call(name, text, number, number)
        else:
            found.append(Call(name, text, number, number))
    return iter(sorted(found, key=lambda call: call.begin))


@contextmanager
def traced(folder: Path, *arguments: str) -> Iterator[httpx.Client]:
    """A server under the tracer, and its client. The trace is whole afterwards."""
    command = (*STRACE, str(folder / "trace"), sys.executable, "-m", "tests.power.traced_server")
    with subprocess.Popen(
        (*command, str(folder / "state"), *arguments), cwd=ROOT, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        try:
            address = child.stdout.readline().removeprefix("listening on ").strip()
            with httpx.Client(base_url=address, timeout=TIMEOUT_S) as client:
                yield client
        finally:
            # The tracer ends with the server, and with its status.
            os.kill(read_server_file(folder / "state").pid, signal.SIGTERM)
        assert child.wait(TIMEOUT_S) == 0


def ask(client: httpx.Client, max_tokens: int) -> str:
    """A stream, read to its end. Returns the request's id."""
    body = {"model": "fake", "prompt": "x" * 40, "max_tokens": max_tokens, "stream": True}
    answer = client.post("/v1/completions", json=body)
    answer.raise_for_status()
    assert answer.text.endswith("data: [DONE]\n\n")
    return answer.headers["x-request-id"]


def hold(client: httpx.Client) -> str:
    """Holds the one open request once it puts something out, and lets it go on. Returns its id."""
    while True:
        found = client.get("/v1/requests?state=decoding").json()["data"]
        if found and found[0]["num_output_tokens"]:
            break
    request_id: str = found[0]["id"]
    assert client.post(f"/v1/requests/{request_id}/pause").json()["state"] == "paused"
    client.post(f"/v1/requests/{request_id}/resume").raise_for_status()
    return request_id


def work(folder: Path, *arguments: str) -> tuple[Sequence[Call], str, str]:
    """What a server calls whose client reads one answer, and then another that is held meanwhile;
    and the ids of these.
    """
    folder.mkdir()
    with traced(folder, *arguments) as client, ThreadPoolExecutor(1) as pool:
        whole = ask(client, 5)
        asked = pool.submit(ask, client, 600)
        held = hold(client)
        assert asked.result(TIMEOUT_S) == held
    return list(calls_in(folder / "trace")), whole, held


def first(calls: Sequence[Call], after: int, name: str, *needles: str) -> Call:
    """The first call of this name that begins after a line and has all of this in it."""
    return next(
        call
        for call in calls
        if call.begin > after and call.name == name and all(n in call.text for n in needles)
    )


def flush_of(calls: Sequence[Call], kind: str, request_id: str) -> Call:
    """The flush of the log that follows the writing of an event."""
    written = first(calls, -1, "pwrite64", "journal.db-wal>", f"{kind}{request_id}")
    return first(calls, written.end, "fdatasync", "journal.db-wal>")


def complaints(calls: Sequence[Call], whole: str, held: str) -> list[str]:
    """What is sent or removed before the commit that says so is durable."""
    effects = (
        ("request_finished", whole, first(calls, -1, "sendto", "[DONE]")),
        ("chain_pinned", held, first(calls, -1, "sendto", held, r"\"state\":\"paused\"")),
        ("chain_unpinned", held, first(calls, -1, "unlink", "/tails/")),
    )
    return [
        kind
        for kind, request_id, effect in effects
        if flush_of(calls, kind, request_id).end > effect.begin
    ]


def test_commits_of_power_are_flushed_before_their_effects(tmp_path: Path) -> None:
    calls, whole, held = work(tmp_path / "strong")
    assert complaints(calls, whole, held) == []
    tail = (f"/tails/{held}-", ".tmp")
    flushed = first(calls, -1, "fsync", *tail)
    renamed = first(calls, -1, "rename", *tail)
    named = first(calls, renamed.end, "fsync", "/tails>")
    said = first(calls, -1, "pwrite64", "journal.db-wal>", f"chain_saved{held}")
    assert flushed.end < renamed.begin <= renamed.end < named.begin <= named.end < said.begin


def test_commits_that_are_flushed_later_are_found(tmp_path: Path) -> None:
    calls, whole, held = work(tmp_path / "weak", "--weak")
    assert complaints(calls, whole, held) == ["request_finished", "chain_pinned", "chain_unpinned"]
