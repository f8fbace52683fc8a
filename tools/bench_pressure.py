"""`fermata bench pressure`: long prompts that share too little memory, in virtual time.

The production scheduler runs whole servers on simulated hardware: a workstation with a 27B hybrid
model under a ceiling of 48 GB (`scheduler/simulation/models.py` says the sizes and speeds, and
where they come from). Nothing is measured but virtual time, so the numbers are the same on every
machine.

Three prompts of 130,000, 115,000 and 100,000 tokens come at once. With 4-bit weights and bfloat16
KV all three would fit below the ceiling, though not below the low mark, so none need be held; with
8-bit weights any two fit, and never three. One must be held when something else takes memory for a
while, and when rows whose output nobody knows are let in by what they have so far. A request alone
that is nearly as large as the memory is never held.

Each total is held against the best that any scheduler could do (`tools/bench_pressure_best.py`).
"""

from dataclasses import dataclass, field
from functools import partial
from statistics import mean

from journal.events import ResumeStarted
from scheduler.replay import Replay
from scheduler.settings import load_settings
from scheduler.simulation.models import EIGHT_BIT_BYTES, FOUR_BIT_BYTES, workstation
from scheduler.simulation.world import Asked, World
from tools.bench_common import Measurement, Number, measure, show
from tools.bench_pressure_best import Problem, Prompt, floor_ns, least_ns

SEED = 1
CEILING_BYTES = 48_000_000_000
NS_PER_S = 1_000_000_000
LIMIT_NS = 24 * 3_600 * NS_PER_S
MAX_ORDERED = 4
"""Requests of which all orders are tried."""

TOTAL_PERMILLE = 1150
"""Of the best, at most."""

REQUESTS = (
    Asked(num_prompt_tokens=130_000, max_tokens=2_000),
    Asked(num_prompt_tokens=115_000, max_tokens=800),
    Asked(num_prompt_tokens=100_000, max_tokens=1_400),
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Requests on a machine, and whether one of them must be held. `others` are bytes that
    something else takes of the same memory, from one second to another.
    """

    name: str
    requests: tuple[Asked, ...] = REQUESTS
    weights_bytes: int = FOUR_BIT_BYTES
    is_held: bool = False
    others: tuple[tuple[int, int, int], ...] = ()
    settings: dict[str, object] = field(default_factory=dict[str, object])


CROWD = tuple(Asked(num_prompt_tokens=40_000, max_tokens=20_000) for _ in range(8))
"""As many as there are rows, whose prompts fit together and whose outputs do not."""

FULL = (Asked(num_prompt_tokens=484_000, max_tokens=6_000),)
"""Nearly all that fits below the ceiling beside the weights."""

OTHERS = ((300, 420, 14_000_000_000), (850, 910, 14_000_000_000))
"""While prompts are fed, and while rows decode."""

SCENARIOS = (
    Scenario("as given"),
    Scenario("8-bit weights", weights_bytes=EIGHT_BIT_BYTES),
    Scenario("memory lost twice", is_held=True, others=OTHERS),
    Scenario("eight that grow", requests=CROWD, is_held=True, settings={"memory.reserve": "chunk"}),
    Scenario("alone", requests=FULL),
)


def run(*, as_json: bool) -> int:
    """Measures, prints, and returns 0 when every target is met, else 1."""
    found: list[Measurement] = []
    details: dict[str, Number | str] = sizes()
    for scenario in SCENARIOS:
        print(f"plays: {scenario.name}", flush=True)
        world = play(scenario)
        found += measure_scenario(scenario, world)
        details |= numbers_of(scenario, world)
    show("pressure", found, seed=SEED, as_json=as_json, details=details)
    return int(any(measurement.met is False for measurement in found))


def play(scenario: Scenario) -> World:
    """The scenario, until nothing is left to do."""
    settings = load_settings(
        overrides={
            "model": "fake",
            "memory.ceiling": CEILING_BYTES,
            "fake.turn_tokens": 0,
            **scenario.settings,
        }
    )
    world = World(settings, workstation(scenario.weights_bytes), seed=SEED, checks=False)
    for asked in scenario.requests:
        world.ask(asked)
    for begin_s, end_s, num_bytes in scenario.others:
        world.plan(begin_s * NS_PER_S, partial(world.take_memory, num_bytes))
        world.plan(end_s * NS_PER_S, partial(world.take_memory, -num_bytes))
    world.run(LIMIT_NS)
    return world


def measure_scenario(scenario: Scenario, world: World) -> list[Measurement]:
    """What is held against targets."""
    name, num_requests = scenario.name, len(scenario.requests)
    total_ns = max(world.ended_ns.values())
    best_ns, _ = best(problem_of(scenario, world))
    finished = world.records["RequestFinished"]
    found = [
        measure(f"total / best, {name}", "", [total_ns / best_ns], at_most=TOTAL_PERMILLE / 1000),
        measure(f"finished of {num_requests}, {name}", "", [finished], at_least=num_requests),
        measure(f"aborted, {name}", "", [world.records["RequestAborted"]], at_most=0),
        measure(f"most in use, {name}", "GB", [world.engine.usage_peak_bytes / 1e9], at_most=48),
        measure(f"steps decided differently, {name}", "", [num_divergent(world)], at_most=0),
    ]
    if scenario.is_held:
        found.append(measure(f"pauses, {name}", "", [world.records["RequestPaused"]], at_least=1))
    return found


def best(problem: Problem) -> tuple[int, str]:
    """The least makespan, and of which schedule; where there are too many orders, the floor."""
    if len(problem.prompts) > MAX_ORDERED:
        return floor_ns(problem), "the floor"
    return least_ns(problem)


def num_divergent(world: World) -> int:
    """Steps of the journal that are decided differently when they are decided again."""
    return sum(1 for _ in Replay(world.journal.read()).divergences())


def problem_of(scenario: Scenario, world: World) -> Problem:
    """What the best is sought of."""
    return Problem(
        prompts=tuple(Prompt(a.num_prompt_tokens, a.max_tokens) for a in scenario.requests),
        facts=world.hardware.facts,
        cost=world.hardware.engine,
        ceiling_bytes=CEILING_BYTES,
        chunk_tokens=world.settings.scheduler.chunk_tokens,
    )


def numbers_of(scenario: Scenario, world: World) -> dict[str, Number | str]:
    """What explains the measurements."""
    problem, name = problem_of(scenario, world), scenario.name
    best_ns, how = best(problem)
    lengths = [p.num_prompt_tokens + p.num_output_tokens for p in problem.prompts]
    rows_bytes = sum(problem.bytes_of(positions) for positions in lengths)
    return {
        f"weights and all rows at their ends, {name}": (
            f"{(problem.facts.weights_bytes + rows_bytes) / 1e9:.1f} GB"
        ),
        f"total, {name}": f"{max(world.ended_ns.values()) / 1e9:.1f} s",
        f"mean end, {name}": f"{mean(world.ended_ns.values()) / 1e9:.1f} s",
        f"best, {name}": f"{best_ns / 1e9:.1f} s ({how})",
        f"no schedule is below, {name}": f"{floor_ns(problem) / 1e9:.1f} s",
        f"pauses, resumes, {name}": (
            f"{world.records['RequestPaused']}, {world.records['RequestResumed']}"
        ),
        f"held, longest, {name}": f"{longest_hold_ns(world) / 1e9:.1f} s",
        f"reclaims, KV dropped, {name}": (
            f"{world.records['ReclaimStarted']}, {world.records['KvDropped']}"
        ),
        f"decode steps, events, {name}": f"{world.engine.num_steps}, {world.journal.last.seq}",
    }


def longest_hold_ns(world: World) -> int:
    """How long a request was held at most."""
    resumed = (r.event for r in world.journal.read() if isinstance(r.event, ResumeStarted))
    return max((event.held_ns for event in resumed), default=0)


def sizes() -> dict[str, Number | str]:
    """The numbers of the model and the machine."""
    hardware = workstation()
    facts, engine, disk = hardware.facts, hardware.engine, hardware.disk
    return {
        "ceiling_bytes": CEILING_BYTES,
        "weights_bytes": f"{FOUR_BIT_BYTES} (4 bits), {EIGHT_BIT_BYTES} (8 bits)",
        "kv_bytes_per_token": facts.kv_bytes_per_token,
        "state_bytes": facts.state_bytes,
        "transient_bytes_per_token": facts.transient_bytes_per_token,
        "prefill": (
            f"{engine.launch_ns} ns a chunk + {engine.token_ns} ns a token"
            f" + {engine.attend_ps} ps a position"
        ),
        "decode step": (
            f"{engine.weights_ns} ns + {engine.row_ns} ns a row + {engine.read_ps} ps a position"
        ),
        "disk": f"{disk.write_bytes_per_s} B/s, flush {disk.flush_ns} ns",
        "requests": ", ".join(f"{a.num_prompt_tokens}+{a.max_tokens}" for a in REQUESTS),
    }
