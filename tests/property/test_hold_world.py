"""Whatever happens while memory is short, every request ends, and nothing stays behind."""

from collections import Counter
from typing import Any

from hypothesis import given

from journal import events
from tests.property.hold_stories import tell
from tests.property.hold_world import ACTIONS, HoldWorld, play
from tests.property.kv_world import KvSetup
from tests.property.test_kv_world import bounded

Story = tuple[KvSetup, list[tuple[Any, ...]]]


def check_rest(world: HoldWorld) -> None:
    """Whatever is still open cannot run on this server; nothing else is left of anything."""
    world.settle()
    state, index = world.state, world.state.index
    kept = [number for number in state.paused if state.requests[number].held_reason]
    assert list(state.requests) == sorted(state.held + kept), (state.paused, state.waiting)
    assert all(count == 1 for count in world.ends.values())
    assert (state.reserved_bytes, state.leaving, state.unsaved) == (0, {}, {})
    assert (state.pausing, state.holds) == ([], [])
    assert (index.writing, index.writing_states, index.writing_tails) == ({}, {}, {})
    assert index.writing_bytes == 0
    if not kept:
        assert not any(block.leases or block.pins for block in index.blocks.values())
        assert not index.tails
    if world.setup.limits.kv is not None:
        assert set(world.disk.sizes) == world.known_files() - world.disk.lost


@bounded
@given(ACTIONS)
def test_everything_ends_and_nothing_is_held(story: Story) -> None:
    check_rest(play(story))


@bounded
@given(ACTIONS)
def test_journal_is_decided_again_without_a_difference(story: Story) -> None:
    assert play(story).driver.divergences() == []


def test_long_stories_end_too_and_show_every_way_to_hold_a_request() -> None:
    seen: Counter[str] = Counter()
    for seed in range(60):
        world = tell(seed)
        check_rest(world)
        for record in world.driver.records:
            kind = events.kind_of(type(record.event).__name__)
            seen[f"{kind} {getattr(record.event, 'reason', '')}".strip()] += 1
    wanted = {f"pause_started {reason}" for reason in ("high", "no_room", "operator")}
    wanted |= {"chain_pinned", "request_resumed", "tier_shrunk pressure", "reclaim_started"}
    wanted |= {"chain_unpinned resumed", "kv_dropped not_saved", "emergency_declared"}
    assert wanted <= set(seen)
