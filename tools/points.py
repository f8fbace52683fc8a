"""Whether the states that a journal keeps in its middle are what its events come to."""

from collections.abc import Iterator

import msgspec

from journal.database import Run
from journal.points import newest_point, points_of
from journal.queries import read_records
from scheduler.evolve import fold
from scheduler.recovery import code_digest, decode_state, encode_state
from scheduler.state import STATE_VERSION, SchedulerState


def verify_newest(run: Run) -> Iterator[str]:
    """The state of the newest point against a fold from the one before it, or from the beginning: a
    sample, since a fold of ten million events takes minutes. In a journal that is sound otherwise.
    """
    newest = max(points_of(run), default=0)
    point = newest_point(run, newest, STATE_VERSION, code_digest())
    if point is None:
        return
    earlier = newest_point(run, point.seq - 1, STATE_VERSION, code_digest())
    try:
        state = SchedulerState() if earlier is None else decode_state(earlier.state)
    except msgspec.MsgspecError:
        assert earlier is not None
        yield f"snapshots: seq {earlier.seq} cannot be read"
        return
    fold(state, read_records(run, state.seq, point.seq))
    if encode_state(state) != point.state:
        yield f"snapshots: seq {point.seq} is not what all events come to"
