"""SIGKILL at a moment that the journal shows, a new process, and nothing that was sent changes."""

import asyncio
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from journal.reader import JournalReader
from scheduler.engine.fake import FakeSource
from scheduler.run import Exit
from scheduler.service import Service
from scheduler.wiring import build
from tests.crash.requests import (
    DECODING,
    FINISHED,
    PREFILLING,
    REQUESTS,
    WAITING,
    kill_settings,
)
from tests.loop_driver import settings_of
from tests.replaying import assert_replays

pytestmark = pytest.mark.crash

Sent = dict[str, list[int]]


def phase_of(reader: JournalReader, request_id: str) -> str:
    row = reader.request(request_id)
    return "" if row is None else row.phase


def num_chunks(reader: JournalReader, request_id: str) -> int:
    return sum(
        type(record.event).__name__ == "PrefillChunkCommitted"
        for record in reader.events_of(request_id)
    )


MOMENTS: dict[str, Callable[[JournalReader, Sent], bool]] = {
    "waiting": lambda reader, _: phase_of(reader, WAITING) == "waiting",
    "prefilling": lambda reader, _: (
        phase_of(reader, PREFILLING) == "prefilling" and num_chunks(reader, PREFILLING) > 1
    ),
    "decoding": lambda reader, sent: (
        phase_of(reader, DECODING) == "decoding" and len(sent[DECODING]) > 5
    ),
    "finished": lambda reader, sent: (
        phase_of(reader, FINISHED) == "finished" and len(sent[FINISHED]) == 2
    ),
}


def killed(folder: Path, moment: Callable[[JournalReader, Sent], bool]) -> Sent:
    """What a server sent until it was killed at this moment."""
    arguments = (sys.executable, "-m", "tests.crash.kill_child", str(folder))
    sent: Sent = defaultdict(list)
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        lines = iter(child.stdout)
        take(lines, sent)  # the first token: by now there is a journal
        with JournalReader.open(folder) as reader:
            while not moment(reader, sent):
                take(lines, sent)
        child.send_signal(signal.SIGKILL)
        for line in lines:
            keep(line, sent)
        assert child.wait() == -signal.SIGKILL
    return sent


def take(lines: Iterator[str], sent: Sent) -> None:
    keep(next(lines), sent)


def keep(line: str, sent: Sent) -> None:
    """A token that reached its client. A line that the kill cut in two did not."""
    if line.endswith("\n"):
        request_id, position, token = line.split()
        assert int(position) == len(sent[request_id])
        sent[request_id].append(int(token))


async def outputs(service: Service) -> Sent:
    """All outputs, read to their ends by the ids that clients still have."""
    service.start()
    found: Sent = {}
    for request_id, _, max_tokens in REQUESTS:
        stream = await service.find(request_id)
        assert stream is not None
        while stream.end is None:
            await stream.wait(len(stream.tokens), None)
        assert (stream.end.kind, stream.end.reason) == ("finished", "length")
        assert len(stream.tokens) == max_tokens
        found[request_id] = stream.tokens
    assert (await service.view()).requests == []
    service.stop("the test is over")
    assert await service.ended() == Exit(0)
    return found


@pytest.mark.parametrize("moment", MOMENTS)
def test_requests_survive_a_kill(tmp_path: Path, moment: str) -> None:
    folder = tmp_path / "state"
    sent = killed(folder, MOMENTS[moment])
    settings = settings_of(state=folder, fake__turn_tokens=0)
    assert kill_settings(folder).fake.context_tokens == settings.fake.context_tokens
    found = asyncio.run(outputs(build(settings, FakeSource(settings.fake))))
    for request_id, tokens in sent.items():
        assert found[request_id][: len(tokens)] == tokens, "a token that was sent has changed"
    assert_replays(folder)
