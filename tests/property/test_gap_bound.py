"""The bound on the gap between two tokens of a running row, in virtual time."""

from dataclasses import replace
from itertools import pairwise

import pytest

from journal import events
from scheduler.settings import Settings, load_settings
from scheduler.simulation.cost import EngineCost
from scheduler.simulation.models import workstation
from scheduler.simulation.world import Asked, Hardware, World
from tests.property.pressure_world import BLOCK, LIMIT_NS, S, facts_of, hardware_of

MS = 1_000_000
STATE_BYTES = 40_000

STEEP = EngineCost(
    token_ns=1_000_000,
    attend_ps=1_000_000,
    weights_ns=20_000_000,
    read_ps=5_000_000,
    row_ns=2_000_000,
    copy_ns=5_000_000,
)
"""Attention costs as much as all the rest behind 1,000 tokens, and filling a row takes its time."""


def settings_of(gap_ms: int = 250, **overrides: object) -> Settings:
    """Settings that everybody has but for small blocks, and saved KV in memory."""
    small: dict[str, object] = {
        "model": "fake",
        "memory.ceiling": "none",
        "scheduler.gap_ms": gap_ms,
        "fake.turn_tokens": 0,
        "kv.block_tokens": BLOCK,
        "kv.reserve_bytes": 0,
        "kv.memory_bytes": 10**9,
    }
    return load_settings(overrides={**small, **overrides})


def play(
    asked: list[Asked], settings: Settings, hardware: Hardware, seed: int = 1, race: int = 0
) -> World:
    """The first request runs long; the others come beside it."""
    world = World(settings, hardware, seed=seed, race=race)
    for one in asked:
        world.ask(one)
    world.run(LIMIT_NS)
    assert world.records["RequestFinished"] == len(asked)
    return world


def gaps_of(world: World, number: int = 1) -> list[int]:
    """Between two tokens of this request, as they are committed."""
    times = [
        record.at_ns
        for record in world.journal.read()
        if isinstance(record.event, events.TokensDecoded) and number in record.event.numbers
    ]
    return [later - earlier for earlier, later in pairwise(times)]


def lengths_of(world: World, number: int) -> list[int]:
    """Of the chunks of this request, but for its last one."""
    chunks = [r.event for r in world.journal.read()]
    lengths = [
        c.length for c in chunks if isinstance(c, events.PrefillChunkPlanned) and c.number == number
    ]
    return lengths[:-1]


RUNNING = Asked(num_prompt_tokens=1, max_tokens=600)


@pytest.mark.parametrize("gap_ms", [100, 250, 1_000])
@pytest.mark.parametrize("race", [0, 50])
def test_one_long_prompt_whose_rate_falls_with_its_context(gap_ms: int, race: int) -> None:
    hardware = replace(hardware_of(), engine=STEEP)
    asked = [RUNNING, Asked(num_prompt_tokens=4_000, max_tokens=4, at_ns=S)]
    world = play(asked, settings_of(gap_ms), hardware, race=race)
    assert max(gaps_of(world)) <= gap_ms * MS
    assert max(gaps_of(world)) > gap_ms * MS * 6 // 10, "and the bound is used"


def test_prompts_at_different_depths() -> None:
    hardware = replace(hardware_of(), engine=STEEP)
    asked = [
        RUNNING,
        *(
            Asked(num_prompt_tokens=num_tokens, max_tokens=20, at_ns=at_ns)
            for num_tokens, at_ns in (
                (3_000, S),
                (120, 4 * S),
                (700, 5 * S),
                (60, 6 * S),
                (1_500, 8 * S),
            )
        ),
    ]
    world = play(asked, settings_of(), hardware)
    assert max(gaps_of(world)) <= 250 * MS


def test_chunks_that_end_where_a_state_is_kept() -> None:
    hardware = replace(hardware_of(STATE_BYTES), engine=STEEP)
    settings = settings_of(**{"kv.state_every_blocks": 10})
    asked = [RUNNING, Asked(num_prompt_tokens=3_000, max_tokens=4, at_ns=S)]
    world = play(asked, settings, hardware)
    assert max(gaps_of(world)) <= 250 * MS
    lengths = lengths_of(world, 2)
    assert min(lengths[3:]) * 3 > max(lengths), "none is a short rest"


def test_prompt_that_begins_behind_a_long_saved_prefix() -> None:
    hardware = replace(hardware_of(), engine=STEEP)
    asked = [
        Asked(num_prompt_tokens=3_000, max_tokens=1),
        replace(RUNNING, num_prompt_tokens=100, at_ns=20 * S),
        Asked(num_prompt_tokens=4_000, max_tokens=4, at_ns=21 * S, shares=3_000),
    ]
    world = play(asked, settings_of(), hardware)
    restored = [r.event for r in world.journal.read()]
    tokens = [e.num_tokens for e in restored if isinstance(e, events.ChainRestored)]
    assert tokens == [2_992], "a block of which holds the last tokens of the prefix no more"
    assert max(gaps_of(world, number=2)) <= 250 * MS


def test_step_that_is_longer_than_the_bound_is_doubled_at_most() -> None:
    cost = replace(STEEP, weights_ns=300 * MS, attend_ps=0, token_ns=10 * MS, read_ps=0)
    asked = [RUNNING, Asked(num_prompt_tokens=1_000, max_tokens=4, at_ns=S)]
    world = play(asked, settings_of(), replace(hardware_of(), engine=cost))
    step_ns = cost.step_ns([0])
    token_ns = step_ns // 8
    assert max(gaps_of(world)) <= 2 * step_ns + token_ns
    assert max(lengths_of(world, 2)) >= 30, "what the reading of the weights leaves room for"


def test_long_prompt_on_a_workstation() -> None:
    asked = [RUNNING, Asked(num_prompt_tokens=20_000, max_tokens=4, at_ns=S)]
    hardware = workstation()
    settings = settings_of(**{"kv.block_tokens": 256})
    world = play(asked, settings, hardware)
    assert max(gaps_of(world)) <= 250 * MS
    assert facts_of().name != hardware.facts.name
