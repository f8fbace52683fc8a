"""`fermata bench mixed`: short and long prompts beside an answer that runs.

While one answer of 200 tokens runs, four prompts of 120 to 1,035 tokens come at once. Fermata, with
`scheduler.gap_ms` at 500, takes turns with a peer on the same model: mlx-lm's `BatchGenerator`, or
servers that `--peer` names. Each has a process of its own, and idles while another plays.

Then, on the tiny model and with the settings that everybody has, a prompt of 4,000 tokens is
prefilled beside an answer that runs: the gaps between its tokens are held against `gap_ms`.
"""

import os
import random
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import httpx2

from scheduler.engine import builtin
from scheduler.settings import SchedulerSettings
from tools.bench_common import Measurement, Number, measure, show
from tools.bench_mixed_load import PROMPT_TOKENS, Played, PromptMaker, gaps
from tools.bench_mixed_sides import (
    ANSWER_LIMIT_S,
    Answer,
    BatchSide,
    CommandSide,
    HttpSide,
    Side,
    SideFailed,
)
from tools.server_process import ServerFailed, ServerProcess

SEED = 1
GAP_MS = 500
FIRST_TOKEN_S = 2
DONE_SHARE = 1.3
"""Of the best peer's time until all four are done, at most."""

GAP_MODEL = "tiny-plain"
BESIDE_TOKENS = 2000
"""Output of the answer that runs: more than comes while a prompt is prefilled."""

VOCABULARY = 256
"""Tokens that every tokenizer has."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured. `gap_rounds` are prompts of `gap_tokens` beside an answer."""

    rounds: int = 3
    gap_rounds: int = 3
    gap_tokens: int = 4000


QUICK = Size(rounds=1, gap_rounds=1, gap_tokens=1000)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What the command was asked for. `peers` are commands of servers; none: `BatchGenerator`."""

    model: str = "smollm2-float32"
    blas: str = "auto"
    peers: tuple[str, ...] = ()
    size: Size = Size()


def run(wanted: Wanted, *, as_json: bool) -> int:
    """Measures and shows. Returns 0, 1 when a target is missed, 2 when nothing was measured."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what it has started ends with it
    try:
        with tempfile.TemporaryDirectory(prefix="fermata-bench-") as folder:
            measurements, details = measure_mixed(wanted, Path(folder))
            measurements += measure_gaps(wanted.size, Path(folder))
    except (httpx2.HTTPError, ServerFailed, SideFailed) as error:
        print(f"the bench failed: {error}", file=sys.stderr)
        return 2
    show("mixed", measurements, seed=SEED, as_json=as_json, details=details)
    return int(any(measurement.met is False for measurement in measurements))


# The mixed workload


def measure_mixed(wanted: Wanted, work: Path) -> tuple[list[Measurement], dict[str, Number | str]]:
    """Rounds in turn, and what they come to."""
    model = builtin.ensure(wanted.model) if wanted.model in builtin.NAMES else Path(wanted.model)
    maker = PromptMaker(model, SEED)
    with ExitStack() as stack:
        ours = stack.enter_context(closing(FermataSide(wanted.model, wanted.blas, work / "mixed")))
        sides: list[Side] = [ours]
        for number, command in enumerate(wanted.peers):
            peer = CommandSide(command, model, work / f"peer-{number}.log")
            sides.append(stack.enter_context(closing(peer)))
        if not wanted.peers:
            sides.append(stack.enter_context(closing(BatchSide(model, wanted.blas))))
        played: list[list[Played]] = [[] for _ in sides]
        for turn in range(wanted.size.rounds + 1):  # the first warms up, and does not count
            workload = maker.draw() if turn else maker.draw_short()
            for side, rounds in zip(sides, played, strict=True):
                print(f"plays: round {turn}, {side.name}", flush=True)
                found = side.play(workload)
                if turn:
                    rounds.append(found)
    return compare(played[0], [s.name for s in sides[1:]], played[1:])


def compare(
    ours: list[Played], names: Sequence[str], peers: Sequence[list[Played]]
) -> tuple[list[Measurement], dict[str, Number | str]]:
    """Our rounds against the targets and against the best peer, which is the one whose median time
    is the least.
    """
    best = min(peers, key=lambda rounds: statistics.median(each.done_s for each in rounds))
    shares = [one.done_s / other.done_s for one, other in zip(ours, best, strict=True)]
    found = [
        measure("all_done_of_best_peer", "", shares, at_most=DONE_SHARE),
        measure("longest_gap", "ms", [1e3 * o.longest_gap_s for o in ours], at_most=GAP_MS),
        measure("shortest_first", "", [int(o.is_shortest_first) for o in ours], at_least=1),
    ]
    found += firsts("fermata", ours, at_most=FIRST_TOKEN_S)
    found.append(measure("all_done.fermata", "s", [one.done_s for one in ours]))
    details: dict[str, Number | str] = {"load average": round(os.getloadavg()[0], 1)}
    details |= tokens("fermata", ours)
    for name, rounds in zip(names, peers, strict=True):
        found.append(measure(f"all_done.{name}", "s", [one.done_s for one in rounds]))
        found.append(
            measure(f"longest_gap.{name}", "ms", [1e3 * one.longest_gap_s for one in rounds])
        )
        found += firsts(name, rounds)
        details |= tokens(name, rounds)
    return found, details


def firsts(name: str, rounds: list[Played], at_most: Number | None = None) -> list[Measurement]:
    """Until the first token of each of the four; the target is the shortest one's."""
    return [
        measure(
            f"first_token_{length}.{name}",
            "s",
            [one.first_s[index] for one in rounds],
            at_most=None if index else at_most,
        )
        for index, length in enumerate(PROMPT_TOKENS)
    ]


def tokens(name: str, rounds: list[Played]) -> dict[str, Number | str]:
    """How many tokens came: a side that ends an answer early has less to do."""
    counts = [[len(one.stream), *map(len, one.four)] for one in rounds]
    return {f"pieces of text in each answer, {name}": str(counts)}


class FermataSide(HttpSide):
    """This server, on a state folder of its own."""

    def __init__(self, model: str, blas: str, state: Path, gap_ms: int = GAP_MS) -> None:
        settings = {
            "FERMATA_SCHEDULER__GAP_MS": str(gap_ms),
            "FERMATA_ENGINE__BLAS": blas,
            "FERMATA_KV__RESERVE_BYTES": "0",
        }
        self.process = ServerProcess(model, state, settings)
        try:
            super().__init__("fermata", self.process.address(), "default")
            while self.client.get("/ready").status_code != 200:
                time.sleep(0.05)
        except (httpx2.HTTPError, ServerFailed):
            self.process.close()
            raise

    def close(self) -> None:
        super().close()
        try:
            self.process.stop()
        finally:
            self.process.close()


# The gap


def measure_gaps(size: Size, work: Path) -> list[Measurement]:
    """The gaps in an answer while a long prompt is prefilled beside it."""
    gap_ms = SchedulerSettings().gap_ms
    chance = random.Random(SEED)
    found: list[float] = []
    prefills: list[float] = []
    with closing(FermataSide(GAP_MODEL, "stock", work / "gaps", gap_ms)) as server:
        for turn in range(size.gap_rounds):
            print(f"prefills {size.gap_tokens} tokens beside an answer: {turn + 1}", flush=True)
            prompt = [chance.randrange(VOCABULARY) for _ in range(size.gap_tokens)]
            beside, first_s = play_beside(server, prompt, chance.randrange(VOCABULARY))
            found += beside
            prefills.append(first_s)
    milliseconds = sorted(1e3 * gap for gap in found)
    p99 = milliseconds[len(milliseconds) * 99 // 100]
    return [
        measure("prefill_gap_p99", "ms", [p99], at_most=gap_ms),
        measure("prefill_gap_p50", "ms", [statistics.median(milliseconds)]),
        measure("prefill_gap_most", "ms", [milliseconds[-1]]),
        measure("prefill_beside", "s", prefills),
    ]


def play_beside(server: HttpSide, prompt: list[int], first: int) -> tuple[list[float], float]:
    """Gaps of an answer while this prompt is prefilled, and how long that took."""
    running = start(Answer(wanted=5), server, [first, 1, 2, 3], BESIDE_TOKENS)
    running.begun.wait(ANSWER_LIMIT_S)
    sent = time.monotonic()
    long = start(Answer(), server, prompt, 1)
    long.ended.wait(ANSWER_LIMIT_S)
    running.leave.set()
    running.ended.wait(ANSWER_LIMIT_S)
    if running.error or long.error or not long.times:
        raise SideFailed(f"{server.name}: {running.error or long.error or 'no token came'}")
    until = long.times[0] - sent
    return gaps([at - sent for at in running.times], until), until


def start(answer: Answer, server: HttpSide, prompt: list[int], max_tokens: int) -> Answer:
    """Begins to read the answer to a prompt of token ids."""
    body: dict[str, object] = {
        "model": "default",
        "prompt": prompt,
        "max_tokens": max_tokens,
        "stream": True,
        "ignore_eos": True,
        "logprobs": 1,
    }
    arguments = (server.client, "/v1/completions", body)
    threading.Thread(target=answer.read, args=arguments, daemon=True).start()
    return answer
