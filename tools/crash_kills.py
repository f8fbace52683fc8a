"""`fermata crash --kills N`: a loaded server that is killed at random moments in time.

The server is `fermata serve` itself, in a process of its own. Its clients stream, take up again
what was cut, and ask for more as long as it goes on; what they were sent is compared with the
journal at the end.
"""

import asyncio
import json
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from scheduler.engine.fake_tokenizer import FakeTokenizer
from tools.crash_checks import Evidence, files_below, last_run, problems_of, tally_of
from tools.crash_clients import Ask, Client, Crowd, Deeds
from tools.crash_delivery import Tally
from tools.crash_variants import text_of
from tools.server_process import LISTENING, command, environment

CLIENTS = 8
TOKENS_A_KILL = 500
"""Delivered at least, over all: a machine that is slow goes on longer after the last kill."""

START_LIMIT_S = 60
STOP_LIMIT_S = 60
SETTINGS = {
    "FERMATA_FAKE__STEP_MS": "1",
    "FERMATA_FAKE__TURN_TOKENS": "0",
    "FERMATA_FAKE__KV_STEP_TOKENS": "32",
    "FERMATA_MEMORY__CEILING": "2500000",
    "FERMATA_MEMORY__SAMPLE_MS": "20",
    "FERMATA_MEMORY__GROWTH_TOKENS": "1",
    "FERMATA_KV__BLOCK_TOKENS": "32",
    "FERMATA_KV__RESERVE_BYTES": "0",
    "FERMATA_KV__MEMORY_BYTES": "0",
    "FERMATA_KV__WRITING_BYTES": "200000",
    "FERMATA_REQUESTS__MAX_DEATHS": "100",
    "FERMATA_SCHEDULER__CHUNK_TOKENS": "128",
}
"""Memory for about half of the clients' requests, so that some are held."""


@dataclass(frozen=True, slots=True)
class Moment:
    """When a life is killed: so long after it listens, or before that after its beginning."""

    listens: bool
    delay_s: float


def moment_of(rng: Random) -> Moment:
    """Mostly in the middle of work; some while it starts or recovers: then two follow at once."""
    kind = rng.random()
    if kind < 0.1:
        return Moment(listens=False, delay_s=rng.uniform(0.0, 0.8))
    if kind < 0.25:
        return Moment(listens=True, delay_s=rng.uniform(0.0, 0.4))
    return Moment(listens=True, delay_s=rng.uniform(0.4, 1.6))


@dataclass
class Serving:
    """One life of the server. `address` is there once it listens."""

    process: asyncio.subprocess.Process
    address: str | None = None

    @classmethod
    async def start(cls, state: Path, log: Path) -> "Serving":
        """A new process."""
        with log.open("ab") as stderr:
            process = await asyncio.create_subprocess_exec(
                *command("serve", "--model", "fake", "--port", "0", "--state", str(state)),
                env=environment(SETTINGS),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=stderr,
                start_new_session=True,
            )
        return cls(process)

    async def listens(self) -> None:
        """Waits until it does. Raises TimeoutError, and EOFError when it ends before."""
        assert self.process.stdout is not None
        line = await asyncio.wait_for(self.process.stdout.readline(), START_LIMIT_S)
        if not line:
            raise EOFError("the server ended before it listened")
        self.address = line.decode().strip().removeprefix(LISTENING)

    async def end(self, number: signal.Signals) -> int:
        """A signal, and its status. Raises TimeoutError."""
        if self.process.returncode is None:
            self.process.send_signal(number)
        return await asyncio.wait_for(self.process.wait(), STOP_LIMIT_S)


@dataclass
class Kills:
    """The whole of it. `folder` is new."""

    folder: Path
    wanted: int
    seed: int
    num_kills: int = 0
    early: int = 0
    has_enough: bool = False
    problems: list[str] = field(default_factory=list[str])

    def __post_init__(self) -> None:
        self.state = self.folder / "state"
        self.rng = Random(f"kills {self.seed}")
        self.crowd = Crowd((), Deeds(str))
        self.evidence = Evidence(self.state, self.crowd.clients, FakeTokenizer())

    def next_client(self, number: int) -> Client:
        """Another request. Prompts share what they begin with, so that blocks are used again."""
        shared = text_of(Random(number), 100)
        body = {
            "model": "default",
            "prompt": shared + text_of(self.rng, self.rng.randrange(20, 200)),
            "max_tokens": self.rng.randrange(150, 500),
            "ignore_eos": True,
            "stream": True,
        }
        ask = Ask("/v1/completions", body, by_header=self.rng.random() < 0.5)
        client = Client(f"client {number}", ask, self.crowd.address, self.crowd)
        self.crowd.clients.append(client)
        return client

    async def asking(self, number: int) -> None:
        """One client after the other, until there were enough kills."""
        while not self.has_enough:
            await self.next_client(number).run()

    async def run(self) -> None:
        """All lives, and a clean stop."""
        asking = [asyncio.ensure_future(self.asking(number)) for number in range(CLIENTS)]
        try:
            while self.num_kills < self.wanted:
                await self.killed(moment_of(self.rng))
            await self.last(asking)
        finally:
            for each in asking:
                each.cancel()
            await asyncio.wait(asking)

    async def killed(self, moment: Moment) -> None:
        """One life."""
        serving = await Serving.start(self.state, self.folder / "log")
        try:
            if moment.listens:
                await serving.listens()
                await self.crowd.address.move(serving)
            else:
                self.early += 1
            await asyncio.sleep(moment.delay_s)
        finally:
            await self.crowd.address.move(None)
            status = await serving.end(signal.SIGKILL)
        if status != -signal.SIGKILL:
            self.problems.append(f"the server ended by itself with status {status}: see its log")
        self.num_kills += 1
        self.evidence.at_deaths[last_run(self.state)] = files_below(self.state / "kv")

    async def last(self, asking: Sequence[asyncio.Future[None]]) -> None:
        """The life in which enough is delivered, and all come to their ends."""
        serving = await Serving.start(self.state, self.folder / "log")
        try:
            await serving.listens()
            await self.crowd.address.move(serving)
            await self.crowd.reached(self.wanted * TOKENS_A_KILL)
            self.has_enough = True
            await asyncio.wait(asking, timeout=STOP_LIMIT_S)
            await asyncio.wait_for(self.crowd.until_idle(), STOP_LIMIT_S)
            status = await serving.end(signal.SIGTERM)
            if status:
                self.problems.append(f"the server ended with status {status}: see its log")
        finally:
            await serving.end(signal.SIGKILL)


@dataclass(frozen=True)
class Counted:
    """What came of it."""

    num_kills: int
    num_early: int
    num_requests: int
    num_pauses: int
    tally: Tally
    problems: list[str]
    duration_s: float

    @property
    def status(self) -> int:
        return int(bool(self.problems) or self.tally.num_bad > 0)


def counted(kills: Kills, began: float) -> Counted:
    """The comparison, after all lives."""
    problems = kills.problems + problems_of(kills.evidence)
    tally, num_pauses = tally_of(kills.evidence)
    return Counted(
        num_kills=kills.num_kills,
        num_early=kills.early,
        num_requests=len(kills.crowd.clients),
        num_pauses=num_pauses,
        tally=tally,
        problems=problems,
        duration_s=time.monotonic() - began,
    )


def run(wanted: int, seed: int, keep: Path | None, *, as_json: bool) -> int:
    """Kills a server so often, and shows what was delivered; returns the exit status."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="fermata-kills-", dir=keep))
    found = played(folder, wanted, seed)
    show(found, folder)
    if as_json:
        print(json.dumps(as_object(found)))
    if not found.status:
        shutil.rmtree(folder)
    return found.status


def played(folder: Path, wanted: int, seed: int) -> Counted:
    """The kills, in a folder that is there."""
    began = time.monotonic()
    kills = Kills(folder, wanted, seed)
    try:
        asyncio.run(kills.run())
    except (TimeoutError, EOFError) as error:
        kills.problems.append(f"{type(error).__name__}: {error}")
    return counted(kills, began)


def show(found: Counted, folder: Path) -> None:
    """A few lines for people."""
    tally = found.tally
    print(
        f"{found.num_kills} kills ({found.num_early} before it listened), {found.num_requests}"
        f" requests, {found.num_pauses} pauses, {found.duration_s:.0f} s"
    )
    print(
        f"{tally.num_tokens} tokens delivered: {tally.num_lost} lost, {tally.num_changed} changed,"
        f" {tally.num_doubled} doubled"
    )
    for problem in found.problems[:20]:
        print(f"violation: {problem[:300]}")
    if found.status:
        print(f"fermata: something is lost; the state folder is kept in {folder}", file=sys.stderr)


def as_object(found: Counted) -> dict[str, object]:
    """The same for programs."""
    tally = found.tally
    return {
        "kills": found.num_kills,
        "kills_before_listening": found.num_early,
        "requests": found.num_requests,
        "pauses": found.num_pauses,
        "tokens": tally.num_tokens,
        "lost": tally.num_lost,
        "changed": tally.num_changed,
        "doubled": tally.num_doubled,
        "problems": found.problems,
        "duration_s": round(found.duration_s, 1),
    }
