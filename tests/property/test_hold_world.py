"""Whatever happens while memory is short, every request ends, and nothing stays behind."""

from typing import Any

from hypothesis import given

from journal import events
from tests.property.hold_world import ACTIONS, play
from tests.property.kv_world import KvSetup
from tests.property.test_kv_world import bounded

Story = tuple[KvSetup, list[tuple[Any, ...]]]


@bounded
@given(ACTIONS)
def test_everything_ends_and_nothing_is_held(story: Story) -> None:
    world = play(story)
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
