"""One story: a server is asked, ended at a point, started again, and at its end looked over."""

import asyncio
import shutil
import signal
import time
from contextlib import suppress
from pathlib import Path
from random import Random

from scheduler.engine.fake_tokenizer import FakeTokenizer
from scheduler.engine.model import Tokenizer
from tools.crash_checks import Evidence, files_below, last_run, problems_of
from tools.crash_child import End, LifePlan
from tools.crash_clients import Crowd, Deeds
from tools.crash_launch import Launcher, Life
from tools.crash_plan import Tale, Told
from tools.crash_variants import VARIANTS, Script

STORY_LIMIT_S = 120

STOPPING = (
    "commit.before.server_stopping",
    "commit.after.server_stopping",
    "stop.drained",
    "stop.files.before",
    "stop.files.after",
    "journal.close.before",
    "journal.close.after",
)
"""Points of a stop."""


def script_of(tale: Tale) -> Script:
    """What its seed makes of its variant."""
    return VARIANTS[tale.variant](Random(f"{tale.variant} {tale.seed}"))


class Story:
    """See the module's text. `beginning` is a state folder that it starts with a copy of."""

    def __init__(
        self,
        folder: Path,
        launcher: Launcher,
        tale: Tale,
        script: Script,
        *,
        beginning: Path | None = None,
        model: str = "fake",
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.folder = folder
        self.state = folder / "state"
        self.launcher = launcher
        self.tale = tale
        self.beginning = beginning
        self.script = script
        self.model = model
        self.rng = Random(f"damage {tale.variant} {tale.seed}")
        self.passes: list[dict[str, int]] = []
        self.ends: list[End] = []
        self.problems: list[str] = []
        self.crowd = Crowd(self.script.asks, Deeds(self.damage))
        self.evidence = Evidence(
            self.state, self.crowd.clients, tokenizer or FakeTokenizer(), allowed=script.allowed
        )

    async def play(self) -> Told:
        """All lives, and the checks."""
        began = time.monotonic()
        await self.live()
        return Told(
            tale=self.tale,
            ends=tuple(self.ends),
            passes=tuple(self.passes),
            problems=tuple(self.problems),
            duration_s=time.monotonic() - began,
        )

    async def live(self) -> None:
        """The lives, and then the checks."""
        self.folder.mkdir(parents=True, exist_ok=True)
        if self.beginning is not None:
            shutil.copytree(self.beginning, self.state)
        clients = asyncio.ensure_future(self.crowd.run())
        try:
            async with asyncio.timeout(STORY_LIMIT_S):
                armed = dict(enumerate(self.tale.lives))
                number = 0
                while not await self.life(number, armed.get(number, ()), clients):
                    number += 1
        except TimeoutError:
            self.problems.append(f"not over after {STORY_LIMIT_S} s")
            return
        finally:
            clients.cancel()
            await asyncio.wait((clients,))
        self.problems += problems_of(self.evidence)

    async def life(self, number: int, ends: tuple[End, ...], clients: asyncio.Future[None]) -> bool:
        """One life. True after a clean stop with nothing left to do: the story is over."""
        script = self.script
        is_first = number == 0
        plan = LifePlan(
            state=str(self.state),
            settings={"model": self.model, **script.settings},
            ends=ends,
            faults=script.faults,
            failures=script.failures,
            ballast=script.ballast,
        )
        log = self.folder / "log"
        life = await self.launcher.start(plan, log, new_process=self.tale.new_process)
        stops_early = self.stops_early(ends) or (script.stops and is_first)
        try:
            await self.follow(life, clients, stops_early=stops_early)
        finally:
            life.kill()
        if life.end is not None:
            self.ends.append(life.end)
            return False
        return clients.done() and not stops_early

    def stops_early(self, ends: tuple[End, ...]) -> bool:
        """Whether a life that is to be ended while it stops is stopped in the middle of its work:
        else it would have none left.
        """
        return self.tale.seed % 2 == 0 and any(end.point in STOPPING for end in ends)

    async def follow(self, life: Life, clients: asyncio.Future[None], *, stops_early: bool) -> None:
        """The life as its clients see it, to its end."""
        over = asyncio.ensure_future(life.over.wait())
        listening = asyncio.ensure_future(life.listening.wait())
        await asyncio.wait((over, listening), return_when=asyncio.FIRST_COMPLETED)
        if life.listening.is_set():
            await self.crowd.address.move(life)
            working = self.some_work() if stops_early else self.all_work(life, clients)
            work = asyncio.ensure_future(working)
            await asyncio.wait((over, work), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()  # an error in it is one of ours
            work.cancel()
            life.kill(signal.SIGTERM)
        listening.cancel()
        status = await life.ended()
        over.cancel()
        await self.crowd.address.move(None)
        self.passes.append(dict(life.passes))
        if life.end is not None:
            run_id = last_run(self.state)
            self.evidence.at_deaths[run_id] = files_below(self.state / "kv")
            if self.script.loses:
                self.damage("vanish")
        elif status != 0:
            self.problems.append(f"a life ended with status {status}: see its log")

    async def some_work(self) -> None:
        """Returns in the middle of it."""
        await self.crowd.reached(self.crowd.num_tokens + self.rng.randrange(5, 60))

    async def all_work(self, life: Life, clients: asyncio.Future[None]) -> None:
        """Returns when nobody wants anything more of a server that has put its files in order."""
        await asyncio.wait((clients,))
        await life.swept.wait()
        await self.crowd.until_idle()
        await asyncio.sleep(self.script.idle_s)

    def damage(self, verb: str) -> None:
        """Does something to saved files: to many, since a row reads only some of them."""
        files = sorted((self.state / "kv").rglob("*.safetensors"))
        if verb == "corrupt tail":
            files = [path for path in files if path.parent.name == "tails"]
        for path in self.rng.sample(files, (2 * len(files) + 2) // 3):
            # The server may be faster, and have removed it.
            with suppress(FileNotFoundError):
                if verb in ("remove", "vanish"):
                    path.unlink()
                else:
                    turn_a_bit(path)


def turn_a_bit(path: Path) -> None:
    """The file is as long as before, and not the same. Raises FileNotFoundError."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
