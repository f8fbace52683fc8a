"""`fermata bench hits`: what saved KV gives to a prompt that comes again, and what saving costs.

Real servers on a tiny model are asked over HTTP, one at a time. For hits the times to the first
token of a prompt, of its repetition, and of its repetition after a restart are compared. For the
cost of saving, servers that save, that do not, and that save to a disk which does not keep up
take turns with prompts of their own; the prefill's time is the journal's. On a machine that does
other things too, the processor time, which all threads of the server share, tells more.
"""

import itertools
import json
import random
import signal
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx2
import psutil

from journal.reader import JournalReader
from tools.bench_common import Measurement, measure, show
from tools.server_process import ServerFailed, ServerProcess

SEED = 1
MODEL = "tiny-plain"
VOCABULARY = 256
"""Tokens that every tokenizer has."""

LIMIT_S = 120

REPEATED_PERMILLE = 50
RESTARTED_PERMILLE = 100
SAVING_PERMILLE = 30
"""At most, of the time without saved KV."""

SAVING: dict[str, dict[str, str]] = {
    "off": {"FERMATA_KV__ENABLED": "false"},
    "on": {},
    "held_back": {"FERMATA_KV__NUM_WRITERS": "1", "FERMATA_KV__WRITING_BYTES": "300000"},
}
"""Held back: the writers may hold two blocks, so that most blocks find no room."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured."""

    num_tokens: int = 4000
    rounds: int = 5


QUICK = Size(num_tokens=400, rounds=1)


@dataclass(frozen=True, slots=True)
class Timed:
    """One request: seconds until the client has the first token, the journal's prefill, and the
    processor time of the whole server meanwhile.
    """

    first_token_s: float
    prefill_s: float
    processor_s: float
    num_cached_tokens: int


def run(size: Size, *, as_json: bool) -> int:
    """Measures, shows, and returns the exit status: 1 when a target is missed."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # its servers end with it
    chance = random.Random(SEED)
    prompts = ([chance.randrange(VOCABULARY) for _ in range(size.num_tokens)] for _ in iter(int, 1))
    with tempfile.TemporaryDirectory(prefix="fermata-bench-") as folder:
        try:
            measurements = [
                *hits(size, Path(folder), prompts),
                *saving(size, Path(folder), prompts),
            ]
        except (httpx2.HTTPError, ServerFailed) as error:
            print(f"the bench failed: {error}")
            return 1
    show("hits", measurements, seed=SEED, as_json=as_json, details={"num_tokens": size.num_tokens})
    return int(any(measurement.met is False for measurement in measurements))


class Server:
    """A server that is asked one prompt at a time."""

    def __init__(self, process: ServerProcess, state: Path) -> None:
        self.process = process
        self.state = state
        self.client = httpx2.Client(base_url=process.address(), timeout=LIMIT_S)

    def wait_until_ready(self) -> None:
        """Returns when the model is loaded, and has computed something once."""
        while self.client.get("/ready").status_code != 200:
            time.sleep(0.05)
        self.ask([1, 2, 3])

    def ask(self, prompt: list[int]) -> Timed:
        """Asks for one token."""
        body = {
            "model": "default",
            "prompt": prompt,
            "max_tokens": 1,
            "stream": True,
            "logprobs": 1,
        }
        begun, processor_s = time.monotonic(), self.processor_s()
        first, answer_id = 0.0, ""
        with self.client.stream("POST", "/v1/completions", json=body) as stream:
            stream.raise_for_status()
            for line in stream.iter_lines():
                if not first and is_token(line):
                    first = time.monotonic() - begun
                    answer_id = json.loads(line.removeprefix("data: "))["id"]
        with JournalReader.open(self.state) as reader:
            row = reader.request("req_" + answer_id.partition("-")[2])
        assert row is not None, "what was answered is in the journal"
        cached = row.num_prompt_tokens - 1 - row.num_fed_tokens
        spent_s = self.processor_s() - processor_s
        return Timed(first, row.prefill_duration_ns / 1e9, spent_s, cached)

    def processor_s(self) -> float:
        """The processor time of all threads of the server so far."""
        times = psutil.Process(self.process.pid).cpu_times()
        return times.user + times.system

    def wait_until_saved(self) -> None:
        """Returns when the writers have nothing left."""
        while self.client.get("/v1/cache").json()["writing_bytes"]:
            time.sleep(0.05)


def is_token(line: str) -> bool:
    """Whether this line of a stream brings a token."""
    if not line.startswith("data: {"):
        return False
    choices = json.loads(line.removeprefix("data: ")).get("choices")
    return bool(choices and choices[0].get("logprobs"))


@contextmanager
def serving(state: Path, settings: dict[str, str]) -> Iterator[Server]:
    """A server of its own, ready to be asked."""
    stock = {"FERMATA_ENGINE__BLAS": "stock", "FERMATA_KV__RESERVE_BYTES": "0"}
    process = ServerProcess(MODEL, state, stock | settings)
    try:
        server = Server(process, state)
        server.wait_until_ready()
        yield server
        server.client.close()
        process.stop()
    finally:
        process.close()


def hits(size: Size, folder: Path, prompts: Iterator[list[int]]) -> list[Measurement]:
    """The first time, again, and after a restart: in each round with a prompt of its own."""
    first: list[Timed] = []
    again: list[Timed] = []
    restarted: list[Timed] = []
    for prompt in itertools.islice(prompts, size.rounds):
        with serving(folder / "hits", {}) as server:
            first.append(server.ask(prompt))
            server.wait_until_saved()
            again.append(server.ask(prompt))
        with serving(folder / "hits", {}) as server:
            restarted.append(server.ask(prompt))
    return [
        share("repeated_first_token", again, first, REPEATED_PERMILLE),
        share("restarted_first_token", restarted, first, RESTARTED_PERMILLE),
        measure("first_token", "ms", [each.first_token_s * 1000 for each in first]),
        measure("repeated_prefill", "ms", [each.prefill_s * 1000 for each in again]),
        measure("restarted_prefill", "ms", [each.prefill_s * 1000 for each in restarted]),
        measure("repeated_hit", "tokens", [each.num_cached_tokens for each in again]),
    ]


def share(name: str, one: list[Timed], other: list[Timed], at_most: int) -> Measurement:
    """The time to the first token in thousandths of another one's, round by round."""
    pairs = zip(one, other, strict=True)
    shares = [1000 * a.first_token_s / b.first_token_s for a, b in pairs]
    return measure(name, "permille", shares, at_most=at_most)


def saving(size: Size, folder: Path, prompts: Iterator[list[int]]) -> list[Measurement]:
    """The prefill of three servers, which take turns: none computes while another does."""
    found: dict[str, list[Timed]] = {name: [] for name in SAVING}
    with (
        serving(folder / "off", SAVING["off"]) as off,
        serving(folder / "on", SAVING["on"]) as on,
        serving(folder / "held_back", SAVING["held_back"]) as held_back,
    ):
        servers = {"off": off, "on": on, "held_back": held_back}
        for number, prompt in enumerate(itertools.islice(prompts, size.rounds)):
            order = list(servers)
            for name in order[number % 3 :] + order[: number % 3]:
                found[name].append(servers[name].ask(prompt))
                if name != "off":
                    servers[name].wait_until_saved()
    on, held = ([each.prefill_s for each in found[name]] for name in ("on", "held_back"))
    off = [each.prefill_s for each in found["off"]]
    spent = {name: [each.processor_s for each in found[name]] for name in found}
    return [
        measure("saving_cost", "permille", costs(on, off), at_most=SAVING_PERMILLE),
        measure("saving_cost_held_back", "permille", costs(held, off), at_most=SAVING_PERMILLE),
        measure("saving_processor_cost", "permille", costs(spent["on"], spent["off"])),
        *(measure(f"prefill_{name}", "ms", ms(one)) for name, one in (("off", off), ("on", on))),
        measure("prefill_held_back", "ms", ms(held)),
    ]


def costs(one: list[float], other: list[float]) -> list[float]:
    """What one takes longer than the other, in thousandths, round by round."""
    return [1000 * (a / b - 1) for a, b in zip(one, other, strict=True)]


def ms(seconds: list[float]) -> list[float]:
    """Seconds as milliseconds."""
    return [each * 1000 for each in seconds]
