"""`fermata bench whatif`: what `fermata whatif` says, against servers that do it.

In each round three servers with the model that computes nothing serve the same requests: two bursts
of long prompts, under three ceilings. What the first one has recorded is run again as it was, and
the requests that came in its second half are compared with what was recorded of them; then it is
run again with the ceilings of the two others, and compared with what those have recorded. The
bursts are such that nobody is held by a hair: another speed alone holds no others.

The three serve side by side in one process, so that a machine that does other things meanwhile is
as slow for each of them. How busy it was is told, and where a target is missed a few more rounds
are taken.
"""

import asyncio
import logging
import os
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import structlog

from journal.reader import JournalReader
from scheduler.engine.fake import FakeSource
from scheduler.parameters import RequestParameters, SamplingParameters
from scheduler.service import Service
from scheduler.settings import Settings, load_settings
from scheduler.streams import Arrival
from scheduler.whatif.configuration import settings_of
from scheduler.whatif.rerun import rerun_of
from scheduler.whatif.totals import Totals, totals_of
from scheduler.wiring import build
from tools.bench_common import Details, Measurement, measure, show
from tools.whatif import Source, read_source

SEED = 1
LOAD_LIMIT_S = 60

CEILING = 1_150_000_000
OTHERS = {"lower": 580_000_000, "higher": 1_500_000_000}
"""Under the first one a request of each burst is held; under the lower one too, for longer, and
others wait before they begin; under the higher one none is.
"""

BURSTS, EACH = 2, 3
BURST_MS, GAP_MS = 14_000, 600
PROMPT_TOKENS, MORE_PROMPT_TOKENS = 3_000, 200
OUTPUT_TOKENS, MORE_OUTPUT_TOKENS = 200, 30

HALF_PERCENT, OTHER_PERCENT = 10, 20
"""How far the second half may be off, and another ceiling."""


@dataclass(frozen=True, slots=True)
class Size:
    """How much is measured: rounds, how many more when a target is missed, and how many times as
    fast as a server of some size all of it is.
    """

    rounds: int = 3
    more_rounds: int = 3
    speed: int = 1


QUICK = Size(rounds=1, more_rounds=0)


@dataclass(frozen=True, slots=True)
class Sent:
    """A request of the load."""

    at_ms: int
    num_prompt_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Pair:
    """What a server has recorded, and what the what-if says."""

    there: Totals
    imagined: Totals

    def off_percent(self, name: str) -> float:
        """By how much a number is off; where there should be nothing, all is too much."""
        there, imagined = getattr(self.there, name), getattr(self.imagined, name)
        if there == imagined:
            return 0.0
        return abs(imagined - there) * 100 / there if there else 100.0

    def differs_by(self, name: str) -> int:
        """By how much a count is off."""
        return abs(getattr(self.imagined, name) - getattr(self.there, name))


@dataclass(frozen=True, slots=True)
class Round:
    """What one round came to: the second half, and each other ceiling."""

    half: Pair
    others: dict[str, Pair]
    load: float


def run(size: Size, folder: Path | None, *, as_json: bool) -> int:
    """Measures, shows, and returns the exit status: 1 when a target is missed. Files go to `folder`
    and are removed again.
    """
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    rounds: list[Round] = []
    measurements: list[Measurement] = []
    while len(rounds) < size.rounds + size.more_rounds:
        with tempfile.TemporaryDirectory(prefix="fermata-bench-", dir=folder) as name:
            rounds.append(take_round(Path(name), size))
        measurements = list(compare(rounds))
        if len(rounds) >= size.rounds and all(each.met is not False for each in measurements):
            break
    show("whatif", measurements, seed=SEED, as_json=as_json, details=details_of(rounds))
    return int(any(measurement.met is False for measurement in measurements))


def load_of(speed: int) -> list[Sent]:
    """The requests, in the order in which they are sent."""
    return [
        Sent(
            (burst * BURST_MS + index * GAP_MS) // speed,
            PROMPT_TOKENS + index * MORE_PROMPT_TOKENS,
            OUTPUT_TOKENS + index * MORE_OUTPUT_TOKENS,
        )
        for burst in range(BURSTS)
        for index in range(EACH)
    ]


def settings_for(state: Path, ceiling: int, speed: int) -> Settings:
    """A server of 100 MB of weights and 100 kB for a token, with some 100 steps a second."""
    overrides = {
        "model": "fake",
        "state": state,
        "memory.ceiling": ceiling,
        "memory.sample_ms": max(10, 20 // speed),
        "memory.reserve": "chunk",
        "kv.memory_bytes": 0,
        "kv.reserve_bytes": 0,
        "scheduler.chunk_tokens": 1024,
        "fake.weights_bytes": 100_000_000,
        "fake.kv_bytes_per_token": 100_000,
        "fake.kv_step_tokens": 64,
        "fake.transient_bytes_per_token": 10_000,
        "fake.step_ms": 10 // speed,
        "fake.prefill_tokens_per_s": 10_000 * speed,
        "fake.turn_tokens": 0,
    }
    return load_settings(overrides=overrides)


def take_round(work: Path, size: Size) -> Round:
    """One server for each ceiling, and the what-ifs of the first."""
    ceilings = {"first": CEILING, **OTHERS}
    servers = [settings_for(work / name, each, size.speed) for name, each in ceilings.items()]
    asyncio.run(serve_all(servers, load_of(size.speed)))
    load = os.getloadavg()[0]
    source = read_source(work / "first")
    others = {
        name: Pair(recorded(work / name), imagined(source, {"memory.ceiling": ceiling}))
        for name, ceiling in OTHERS.items()
    }
    requests = source.incident.requests
    late = frozenset(request.request_id for request in requests[len(requests) // 2 :])
    half = Pair(recorded(work / "first", late), imagined(source, {}, late))
    return Round(half, others, load)


async def serve_all(servers: Sequence[Settings], load: Sequence[Sent]) -> None:
    """Each serves the load, side by side."""
    async with asyncio.TaskGroup() as lives:
        for settings in servers:
            lives.create_task(serve(settings, load))


async def serve(settings: Settings, load: Sequence[Sent]) -> None:
    """One life of a server, until all requests of the load have ended."""
    service = build(settings, FakeSource(settings.fake))
    service.start()
    try:
        await service.served_model(LOAD_LIMIT_S)
        random = Random(SEED)
        async with asyncio.TaskGroup() as clients:
            for number, sent in enumerate(load, 1):
                prompt = array("I", random.choices(range(32, 127), k=sent.num_prompt_tokens))
                clients.create_task(client(service, number, sent, prompt))
    finally:
        service.stop("the load is over")
        await service.ended()


async def client(service: Service, number: int, sent: Sent, prompt: "array[int]") -> None:
    """Sends one request when it is time, and reads its answer to the end."""
    await asyncio.sleep(sent.at_ms / 1000)
    parameters = RequestParameters(
        route="completions",
        model="fake",
        created=1,
        stream=True,
        sampling=SamplingParameters(seed=number, ignore_end_of_turn=True),
    )
    name = f"req_{number:026}"
    stream = service.submit(
        Arrival(name, None, "completions", True, prompt, sent.num_output_tokens, parameters)
    )
    while stream.end is None:
        await stream.wait(len(stream.tokens), None)


def recorded(state: Path, wanted: frozenset[str] | None = None) -> Totals:
    """What a server has recorded of all requests, or of some."""
    with JournalReader.open(state) as reader:
        return totals_of(reader.read(), wanted)


def imagined(
    source: Source, changes: dict[str, object], wanted: frozenset[str] | None = None
) -> Totals:
    """What a what-if says of them."""
    settings = settings_of(source.incident, changes)
    rerun = rerun_of(source.incident, settings, source.hardware, wanted)
    rerun.run()
    return rerun.totals()


def compare(rounds: Sequence[Round]) -> Iterator[Measurement]:
    """How far each number is off, against its target."""
    pairs = {"second half": [each.half for each in rounds]}
    for name in OTHERS:
        pairs[f"{name} ceiling"] = [each.others[name] for each in rounds]
    for what, each in pairs.items():
        most = HALF_PERCENT if what == "second half" else OTHER_PERCENT
        for name in ("total_ms", "held_ms"):
            off = [pair.off_percent(name) for pair in each]
            yield measure(f"{what}, {name.removesuffix('_ms')} off", "%", off, at_most=most)
        for name in ("finished", "pauses"):
            counts = [pair.differs_by(name) for pair in each]
            yield measure(f"{what}, {name} off", "requests", counts, at_most=0)


def details_of(rounds: Sequence[Round]) -> Details:
    """What was there to be found, and what blurs it."""
    last = rounds[-1]
    details: dict[str, int | float | str | bool | None] = {"rounds": len(rounds)}
    for name, pair in {"second half": last.half, **last.others}.items():
        details[f"{name}: pauses, held ms, total ms"] = (
            f"{pair.there.pauses}, {pair.there.held_ms}, {pair.there.total_ms} recorded;"
            f" {pair.imagined.pauses}, {pair.imagined.held_ms}, {pair.imagined.total_ms} simulated"
        )
    load = max(each.load for each in rounds)
    details["load average, at most"] = round(load, 1)
    busy = load > (os.cpu_count() or 1)
    details["the machine was busy with other things, which blurs these"] = busy
    return details
