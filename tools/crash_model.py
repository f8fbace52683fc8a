"""`fermata crash --model tiny-hybrid`: the real engine and real files, ended in new processes.

The same requests are answered twice: by a server that nobody ends, and by one that is ended again
and again. Tokens, log-probabilities and the bytes of saved blocks must be the same.
"""

import asyncio
import json
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from journal.reader import JournalReader
from scheduler.engine.models import resolve
from scheduler.settings import Settings
from tools.crash_child import End
from tools.crash_clients import TEXT, Ask
from tools.crash_launch import Launcher, fork_launcher
from tools.crash_plan import Tale, Told
from tools.crash_story import Story
from tools.crash_variants import Groups, Script, by_hand, settings

MODELS = ("tiny-hybrid", "tiny-plain")
BLOCK_TOKENS = 16
NUM_TOKENS = (150, 90, 220)
KEY = bytes(range(32))
"""Both servers have the same key: then what is equal has the same name."""

ENDS = (
    ("commit.after.prefill_chunk_committed", 2),
    ("file.rename.before.block", 6),
    ("commit.after.tokens_decoded", 12),
    ("effect.after.save_blocks", 3),
    ("file.write.after.state", 1),
    ("commit.after.chain_restored", 1),
    ("commit.before.request_paused", 1),
    ("hub.flush.before", 40),
)
"""Where lives are ended, each with the most passes before that: what is done in a life must be
more than what its death undoes.
"""

Output = tuple[list[int], Any]


def prompt(number: int, num_tokens: int) -> list[int]:
    """Tokens of a text of its own, from the first one on."""
    return [(31 * i + i * i // 7 + 97 * number + 5) % 300 for i in range(num_tokens)]


def script(rng: Random) -> Script:
    """Three prompts, one of them held by hand in between."""
    groups: Groups = settings(
        engine={"blas": "stock"},
        kv={"block_tokens": BLOCK_TOKENS, "state_every_blocks": 2},
        scheduler={"chunk_tokens": 32, "chunk_tokens_beside_rows": 32},
    )
    asks = [
        Ask(
            TEXT,
            {
                "model": "default",
                "prompt": prompt(number, num_tokens),
                "max_tokens": 60,
                "ignore_eos": True,
                "temperature": 0,
                "logprobs": 3,
                "stream": True,
            },
            by_hand(rng) if number == 1 else (),
        )
        for number, num_tokens in enumerate(NUM_TOKENS)
    ]
    return Script(groups, tuple(asks))


def outputs(story: Story) -> list[Output]:
    """Tokens and log-probabilities of each request, as the journal has them."""
    with JournalReader.open(story.state) as reader:
        found: list[Output] = []
        for client in story.crowd.clients:
            tokens, logprobs = reader.output_tokens(client.attempts[-1].request_id)
            found.append((tokens.tolist(), logprobs))
        return found


def blocks(story: Story) -> dict[str, bytes]:
    """What is saved, by name."""
    files = (story.state / "kv").rglob("*.safetensors")
    return {str(path.relative_to(story.state)): path.read_bytes() for path in files}


def differences(one: Story, other: Story) -> list[str]:
    """What a server that was ended has otherwise than one that was not."""
    found: list[str] = []
    for number, (expected, output) in enumerate(zip(outputs(one), outputs(other), strict=True)):
        if expected[0] != output[0]:
            found.append(f"request {number}: other tokens")
        elif expected[1] != output[1]:
            found.append(f"request {number}: other log-probabilities")
    expected_blocks, other_blocks = blocks(one), blocks(other)
    found += [f"{path}: other bytes" for path in differing(expected_blocks, other_blocks)]
    # States are saved where a run happens to stand; blocks are the same in any run.
    names = {path for path in expected_blocks.keys() ^ other_blocks.keys() if ".state." not in path}
    found += [f"{path}: saved by one server only" for path in sorted(names)]
    return found


def differing(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    """The files that both have, and not with the same bytes."""
    return [path for path in sorted(one.keys() & other.keys()) if one[path] != other[path]]


@dataclass(frozen=True)
class Compared:
    """What came of it."""

    ends: tuple[End, ...]
    num_blocks: int
    problems: list[str]
    duration_s: float


async def compare(folder: Path, launcher: Launcher, model: str, seed: int) -> Compared:
    """Both servers, one after the other."""
    began = time.monotonic()
    rng = Random(f"model {seed}")
    lives = tuple(
        (End(point, rng.randint(max(1, most // 2), most)),)
        for point, most in rng.sample(ENDS, len(ENDS))
    )
    drawn = script(rng)
    tokenizer = resolve(Settings(model=model)).describe().tokenizer
    stories: list[Story] = []
    told: list[Told] = []
    for name, ended in (("never-ended", ()), ("ended", lives)):
        tale = Tale(model, seed, ended, new_process=True)
        story = Story(folder / name, launcher, tale, drawn, model=model, tokenizer=tokenizer)
        story.state.mkdir(mode=0o700, parents=True)
        (story.state / "key").write_bytes(KEY)
        told.append(await story.play())
        stories.append(story)
    problems = [problem for each in told for problem in each.problems]
    if not problems:
        problems = differences(*stories)
    return Compared(told[1].ends, len(blocks(stories[1])), problems, time.monotonic() - began)


def run(model: str, seed: int, keep: Path | None, *, as_json: bool) -> int:
    """The comparison, and what came of it; returns the exit status."""
    if keep is not None:
        keep.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(prefix="fermata-crash-", dir=keep))
    pid, orders = fork_launcher()
    del pid  # it ends with this process
    launcher = Launcher(orders)

    async def both() -> Compared:
        try:
            return await compare(folder, launcher, model, seed)
        finally:
            await launcher.close()

    found = asyncio.run(both())
    points = ", ".join(end.point for end in found.ends)
    print(f"{model}: ended {len(found.ends)} times ({points}), {found.duration_s:.0f} s")
    print(f"{found.num_blocks} saved files and {len(NUM_TOKENS)} answers are compared")
    for problem in found.problems:
        print(f"violation: {problem[:300]}")
    if as_json:
        ends = [end.point for end in found.ends]
        print(json.dumps({"ends": ends, "files": found.num_blocks, "problems": found.problems}))
    if not found.problems:
        shutil.rmtree(folder)
    return int(bool(found.problems))
