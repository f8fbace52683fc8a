"""What must hold when a simulation is over."""

from pathlib import PurePath

from scheduler.keptfiles import known_files
from scheduler.kvcache.naming import SUFFIX
from scheduler.simulation.world import World


def check_end(world: World) -> None:
    """Each request that was taken has ended, nothing is left of any, projections are those of a
    rebuild, and every step is decided the same again. Raises AssertionError.
    """
    check_nothing_left(world)
    check_index(world)
    check_journal(world)


def check_nothing_left(world: World) -> None:
    """No row, no byte, no token in memory, nobody who is waited for."""
    state, loop = world.state, world.process.loop
    assert not state.requests, "requests are open"
    assert not world.hub.open, f"streams are open: {list(world.hub.open)}"
    assert not world.engine.rows, "rows are in the engine"
    assert not list(loop.known), "tokens of ended requests are kept"
    assert not loop.known.row_ids, "ids of rows are kept"
    assert (state.reserved_bytes, state.reserved_tokens, state.leaving) == (0, 0, {}), "reserved"
    for name in ("paused", "pausing", "holds", "lost", "found", "orphans", "waiting", "held"):
        assert not getattr(state, name), f"{name}: {getattr(state, name)}"
    assert not loop.sensors.names.has_pending(), "blocks are to be named"


def check_index(world: World) -> None:
    """Nobody leases or pins a block, nothing is on its way, and each file is one that is known."""
    index = world.state.index
    assert not any(block.leases or block.pins for block in index.blocks.values()), "in use"
    assert not index.tails, f"tails are kept: {list(index.tails)}"
    for name in ("writing", "writing_states", "writing_tails", "coming", "bad"):
        assert not getattr(index, name), f"{name}: {getattr(index, name)}"
    assert index.writing_bytes == 0, "bytes are in the writers' hands"
    known = {PurePath(path).name.removesuffix(SUFFIX) for path in known_files(index)}
    unknown = world.disk.files.keys() - known
    assert not unknown, f"files that nobody knows: {sorted(unknown)}"


def check_journal(world: World) -> None:
    """The tables say what the events say, and the events are what is decided."""
    journal = world.journal
    assert journal.differences() == [], f"these rows are not their events': {journal.differences()}"
    assert not journal.pins, "chains are pinned"
    open_rows = [row.request_id for row in journal.requests.values() if row.outcome is None]
    assert not open_rows, f"requests have ended, and their rows have not: {open_rows}"
    divergences = world.divergences()
    assert divergences == [], f"decided differently: {divergences[:1]}"
