"""Saved KV in random worlds: whatever engine, writers, disk and clients do."""

from collections.abc import Sequence
from typing import Any

import msgspec
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from journal import events
from scheduler.evolve import evolve, fold
from scheduler.state import SchedulerState
from tests.property.hold_stories import tell
from tests.property.kv_world import ACTIONS, KvSetup, play
from tests.property.test_core_world import carrying

Story = tuple[KvSetup, Sequence[tuple[Any, ...]]]
bounded = settings(
    max_examples=60,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)


@bounded
@given(ACTIONS)
def test_everything_comes_to_rest_and_files_are_those_that_are_known(story: Story) -> None:
    world = play(story)
    world.settle()
    state, index = world.state, world.state.index
    assert list(state.requests) == sorted(state.held)
    assert all(count == 1 for count in world.ends.values())
    assert (state.reserved_bytes, state.leaving, state.unsaved) == (0, {}, {})
    assert (index.writing, index.writing_states, index.early_states) == ({}, {}, {})
    assert (index.writing_bytes, index.coming) == (0, {})
    assert not any(block.leases for block in index.blocks.values())
    if world.setup.limits.kv is None:
        return
    assert (index.bad, index.unwanted) == ({}, {})
    assert set(world.disk.sizes) == world.known_files() - world.disk.lost
    assert index.disk_bytes <= world.max_bytes
    kv = world.setup.limits.kv
    assert index.hot_bytes <= max(kv.memory_bytes, 0)


@bounded
@given(ACTIONS, st.integers(0, 10_000))
def test_fold_of_all_is_snapshot_and_fold_of_the_rest(story: Story, where: int) -> None:
    records = play(story).driver.records
    cut = where % (len(records) + 1)
    whole, state = SchedulerState(), SchedulerState()
    fold(whole, records)
    fold(state, records[:cut])
    snapshot = msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=SchedulerState)
    carried = SchedulerState()
    evolve(carried, carrying(state))
    for begun in (snapshot, carried):
        assert begun == state
        fold(begun, records[cut:])
        assert begun == whole
        assert list(begun.index.hot) == list(whole.index.hot), "what goes first stays the same"


@bounded
@given(ACTIONS)
def test_journal_is_decided_again_without_a_difference(story: Story) -> None:
    assert play(story).driver.divergences() == []


def test_worlds_show_every_kind_of_event() -> None:
    seen: set[type[events.Event]] = set()
    for number in range(40):
        world = tell(number)
        seen.update(type(record.event) for record in world.driver.records)
    about_blocks = {kind for kind in events.FACTS + events.DECISIONS if "Block" in kind.__name__}
    others = {events.RequestDeferred, events.ChainRestored, events.TierShrunk, events.ClockTicked}
    assert about_blocks | others <= seen
