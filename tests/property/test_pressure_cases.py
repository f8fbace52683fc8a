"""Failures that users of such servers have reported, each as a story in virtual time."""

from dataclasses import replace
from functools import partial
from typing import TypeVar

from journal import events
from scheduler.engine.base import EngineResult, MemoryReading, RowFreed
from scheduler.simulation.world import Asked, World
from scheduler.usage import unallocated_bytes
from tests.property.pressure_world import (
    BLOCK,
    CHUNK,
    LIMIT_NS,
    TOKEN_BYTES,
    TRANSIENT_BYTES,
    WEIGHTS_BYTES,
    S,
    assert_ended_well,
    hardware_of,
    play,
    room_for,
    settings_under,
)

CEILING_BYTES = room_for(1_500, num_rows=2)
ACTIONS = ("ReclaimStarted", "PauseStarted", "KvDropped", "RequestAborted", "EmergencyDeclared")


def actions_of(world: World) -> dict[str, int]:
    """What was done against pressure."""
    return {kind: world.records[kind] for kind in ACTIONS if world.records[kind]}


E = TypeVar("E", bound=events.AnyEvent)


def events_of(world: World, kind: type[E]) -> list[E]:
    """All of this kind, in order."""
    return [r.event for r in world.journal.read() if isinstance(r.event, kind)]


def two_rows(**overrides: object) -> World:
    """Two requests that fit well, and decode for some twenty seconds."""
    world = World(settings_under(CEILING_BYTES, **overrides), hardware_of(), seed=1)
    for _ in range(2):
        world.ask(Asked(num_prompt_tokens=300, max_tokens=300))
    return world


def test_eight_ends_in_one_step_take_no_more_memory() -> None:
    settings = settings_under(room_for(8 * 220, num_rows=8))
    world = World(settings, hardware_of(), seed=1)
    play(world, [Asked(num_prompt_tokens=200 - n, max_tokens=20 + n) for n in range(8)])
    before_bytes = WEIGHTS_BYTES + 8 * (220 + BLOCK) * TOKEN_BYTES + CHUNK * TRANSIENT_BYTES
    assert world.engine.usage_peak_bytes <= before_bytes + settings.kv.writing_bytes
    assert actions_of(world) == {}
    assert_ended_well(world)


def test_one_reading_over_a_mark_does_nothing() -> None:
    world = two_rows()
    for at_s, permille in ((3, 950), (10, 1_020)):
        world.plan(at_s * S, partial(misread_once, world, CEILING_BYTES * permille // 1000))
    world.run(LIMIT_NS)
    over = [e for e in events_of(world, events.MemorySampled) if e.active_bytes > CEILING_BYTES]
    assert len(over) == 1, "the reading was recorded"
    assert actions_of(world) == {}
    assert_ended_well(world)


def misread_once(world: World, active_bytes: int) -> None:
    """The next reading says so much, and the one after it is right again."""

    def read(reading: MemoryReading) -> MemoryReading:
        world.read = lambda right: right
        return replace(reading, active_bytes=active_bytes)

    world.read = read


def test_a_mark_that_is_crossed_each_second_is_acted_upon_once() -> None:
    world = two_rows()

    def read(reading: MemoryReading) -> MemoryReading:
        permille = 925 if world.timeline.now_ns // S % 2 else 900
        usage_bytes = CEILING_BYTES * permille // 1000
        active_bytes = usage_bytes - unallocated_bytes(world.state)
        return replace(reading, active_bytes=active_bytes, cached_bytes=0)

    world.plan(5 * S, partial(setattr, world, "read", read))
    world.plan(21 * S, partial(setattr, world, "read", world.read))
    levels: list[str] = []
    world.watch = lambda: note_change(levels, world.state.memory.level)
    world.run(LIMIT_NS)
    assert levels == ["", "high", ""], "the mark is left only below the hysteresis"
    assert world.records["PauseStarted"] <= 1
    assert "RequestAborted" not in actions_of(world)
    assert_ended_well(world)


def note_change(levels: list[str], level: str) -> None:
    if not levels or levels[-1] != level:
        levels.append(level)


def test_a_swing_beyond_the_hysteresis_holds_and_lets_go_without_end_but_finishes() -> None:
    world = two_rows()

    def swing(num_bytes: int) -> None:
        world.ballast_bytes = num_bytes

    for second in range(4, 400, 2):
        world.plan(second * S, partial(swing, CEILING_BYTES // 2))
        world.plan((second + 1) * S, partial(swing, 0))
    levels: list[str] = []
    world.watch = lambda: note_change(levels, world.state.memory.level)
    world.run(LIMIT_NS)
    swings = world.timeline.now_ns // (2 * S) + 1
    assert levels.count("high") + levels.count("emergency") <= 2 * swings
    assert world.records["PauseStarted"] <= swings
    assert_ended_well(world)


def test_a_negative_measurement_is_recorded_and_not_believed() -> None:
    world = two_rows()
    deliver = world.engine.deliver

    def lie(result: EngineResult) -> None:
        if isinstance(result, RowFreed):
            result = replace(result, freed_bytes=-51_000_000_000)
        deliver(result)

    def believes_nothing_of_it() -> None:
        assert 0 <= world.state.memory.active_bytes < CEILING_BYTES
        assert 0 <= world.state.memory.cached_bytes < CEILING_BYTES

    world.engine.deliver = lie
    world.watch = believes_nothing_of_it
    world.run(LIMIT_NS)
    freed = [e.freed_bytes for e in events_of(world, events.KvFreed)]
    assert freed == [-51_000_000_000] * 2
    assert world.state.step < 2_000, "the loop does not spin"
    assert_ended_well(world)


def test_requests_that_were_let_in_by_a_guess_finish_all_the_same() -> None:
    settings = settings_under(
        room_for(1_300, num_rows=3), memory__reserve="chunk", memory__growth_tokens=1
    )
    crowd = [Asked(num_prompt_tokens=200 + n, max_tokens=400) for n in range(5)]
    world = play(World(settings, hardware_of(), seed=1), crowd)
    assert world.records["RequestFinished"] == 5
    assert world.records["RequestAborted"] == 0
    assert 1 <= world.records["PauseStarted"] <= 30
    assert_ended_well(world)
    by_turns = World(settings_under(room_for(650)), hardware_of(), seed=1)
    play(by_turns, crowd)
    assert max(world.ended_ns.values()) <= max(by_turns.ended_ns.values())


def test_a_request_as_large_as_the_memory_runs_alone() -> None:
    num_tokens = 2_000
    row_bytes = num_tokens * TOKEN_BYTES
    ceiling_bytes = WEIGHTS_BYTES + CHUNK * TRANSIENT_BYTES + row_bytes
    for reserve in ("bound", "expected", "chunk"):
        settings = settings_under(ceiling_bytes, memory__reserve=reserve)
        world = World(settings, hardware_of(), seed=1)
        small = Asked(num_prompt_tokens=100, max_tokens=50, at_ns=5 * S)
        play(world, [Asked(num_prompt_tokens=num_tokens - 300, max_tokens=300), small])
        assert world.records["RequestFinished"] == 2
        paused = events_of(world, events.PauseStarted)
        assert [e for e in paused if e.number == 1] == [], f"held with reserve {reserve}"
        assert_ended_well(world)


def test_what_the_allocator_keeps_is_given_back_first_on_a_server_that_is_never_idle() -> None:
    world = two_rows(kv__memory_bytes=200_000)

    def use_and_give_back() -> None:
        """Buffers of some work come into the allocator's cache."""
        world.engine.memory.take(CEILING_BYTES // 2)
        world.engine.memory.take(-(CEILING_BYTES // 2))

    for second in range(5, 15, 3):
        world.plan(second * S, use_and_give_back)
    world.run(LIMIT_NS)
    assert world.records["ReclaimStarted"] >= 3
    assert world.records["PauseStarted"] == 0
    shrunk = events_of(world, events.TierShrunk)
    assert [e for e in shrunk if e.reason == "pressure"] == [], "blocks in memory stay"
    assert_ended_well(world)
