"""Why a request does not go on, and what it waits for: for people, computed from the state between
two steps, by the functions that `decide` asks. Pure.
"""

from typing import Literal

import msgspec

from journal.events import Limits
from scheduler.admission import find_prefix
from scheduler.draft import Draft
from scheduler.leaving import NO_CLIENT
from scheduler.memory import size_text
from scheduler.request import Phase, Request
from scheduler.resuming import (
    is_crowded,
    reserve_bytes,
    room_bytes,
    start_of,
    waits_for_others,
    waits_for_relief,
)
from scheduler.state import SchedulerState


class Wait(msgspec.Struct, frozen=True, kw_only=True):
    """Why a request does not go on. `text` says it in a line; other fields are null unless `reason`
    is about them.

    - model: it is of another model; capacity: this server's ceiling cannot hold it.
    - loading, stopping: the engine is not there yet, or takes nothing new.
    - operator: it was held by hand, and waits for its release.
    - client: it has none, and waits for one that takes it up.
    - blocks: `request_id` is computing blocks that it needs too.
    - queue: `num_before` others go first. Held requests go before those that were never in the
      engine.
    - rows: all rows are taken. tokens: those admitted take the token budget. solo: it runs alone.
    - pressure: memory is over a mark, or something is being done about it.
    - memory: its row needs `needs_bytes`, and `free_bytes` are free below the low mark.
    - others: nothing runs, and other programs hold the memory that it needs.
    - admission: nothing stands against it, and the next step takes it.
    - saving: it is pausing, and `num_blocks` blocks, or what is behind them, are still to be saved.
    - restoring: its row is being filled up to `num_tokens` tokens.
    """

    reason: Literal[
        "model",
        "capacity",
        "loading",
        "stopping",
        "operator",
        "client",
        "blocks",
        "queue",
        "rows",
        "tokens",
        "solo",
        "pressure",
        "memory",
        "others",
        "admission",
        "saving",
        "restoring",
    ]
    text: str
    num_before: int | None = None
    request_id: str | None = None
    needs_bytes: int | None = None
    free_bytes: int | None = None
    num_blocks: int | None = None
    num_tokens: int | None = None


NOBODY = Wait(reason="client", text="its client is lost, and nobody has come back for it")
ASIDE = {
    "other_model": Wait(reason="model", text="it belongs to another model"),
    "exceeds_capacity": Wait(reason="capacity", text="this server's ceiling cannot hold it"),
    NO_CLIENT: NOBODY,
}
LOADING = Wait(reason="loading", text="the model is loading")
STOPPING = Wait(reason="stopping", text="the server is stopping")
HELD = Wait(reason="operator", text="held by hand until it is released")
PRESSURE = Wait(reason="pressure", text="memory is short, and some is being given back")
ADMISSION = Wait(reason="admission", text="it is next")


def line_of(state: SchedulerState) -> dict[int, int]:
    """How many go before each request that waits for a row: the held ones that may go on, in their
    order, then the queue.
    """
    held = [n for n in state.paused if may_go_on(state.requests[n])]
    return {number: place for place, number in enumerate([*held, *state.waiting])}


def may_go_on(request: Request) -> bool:
    """Whether a held request waits for room, and for nothing else."""
    return not request.stays_held


def has_work(state: SchedulerState) -> bool:
    """Whether anybody is worked on, or waits for a row. What an operator holds wants nothing."""
    if state.admitted or state.waiting:
        return True
    return any(may_go_on(state.requests[number]) for number in state.paused)


def wait_of(state: SchedulerState, request: Request, line: dict[int, int]) -> Wait | None:
    """Why this open request does not go on; null while the engine works on it."""
    match request.phase:
        case Phase.PAUSING:
            return saving(state, request)
        case Phase.RESUMING:
            return restoring(request)
        case Phase.PAUSED | Phase.WAITING:
            return waiting(state, request, line)
        case _:
            return None


def saving(state: SchedulerState, request: Request) -> Wait:
    """A pause that is not over: what is still to come to disk."""
    index = state.index
    writing = sum(name in index.writing for name in request.hashes)
    num_blocks = len(request.unsaved) + writing
    text = f"saving {num_blocks} blocks" if num_blocks else "saving what is behind its last block"
    return Wait(reason="saving", text=text, num_blocks=num_blocks)


def restoring(request: Request) -> Wait:
    """A row that is being filled."""
    num_tokens = max(0, request.resuming_tokens)
    text = f"restoring {num_tokens} of {request.num_known_tokens} tokens"
    return Wait(reason="restoring", text=text, num_tokens=num_tokens)


def waiting(state: SchedulerState, request: Request, line: dict[int, int]) -> Wait:
    """Why a request without a row gets none: what lasts longest first."""
    if request.held_reason is not None:
        return ASIDE[request.held_reason]
    if request.needs_client:
        return NOBODY
    if request.hold:
        return HELD
    if state.stopping:
        return STOPPING
    if not state.engine_ready:
        return LOADING
    if (computed_by := computing(state, request)) is not None:
        text = "another is computing what it needs too"
        return Wait(reason="blocks", text=text, request_id=computed_by)
    if (num_before := line.get(request.number, 0)) > 0:
        return Wait(reason="queue", text=f"{num_before} before it", num_before=num_before)
    return next_in_line(state, request)


def computing(state: SchedulerState, request: Request) -> str | None:
    """The id of the request that computes the block for which this one was told to wait."""
    name = request.deferred_hash
    if not name or state.now_ns >= request.deferred_until_ns:
        return None
    writing = state.index.writing.get(name) or state.index.writing_states.get(name)
    number = state.index.coming.get(name, 0) if writing is None else writing.number
    other = state.requests.get(number)
    return None if other is None else other.request_id


def next_in_line(state: SchedulerState, request: Request) -> Wait:
    """What keeps the first in line from its row."""
    limits, draft = state.limits, Draft()
    assert limits is not None, "the engine is ready"
    if is_crowded(state, draft, request, request.num_prompt_tokens + request.max_tokens):
        return crowded(state, request, limits)
    if waits_for_relief(state, draft):
        return PRESSURE
    needs_bytes, free_bytes = need_bytes(state, request), room_bytes(state, draft)
    if free_bytes is None or needs_bytes <= free_bytes:
        return ADMISSION
    reason = "others" if waits_for_others(state) == request.number else "memory"
    room = f"{size_text(max(0, free_bytes))} are free"
    text = f"needs {size_text(needs_bytes)} of memory, {room}"
    return Wait(reason=reason, text=text, needs_bytes=needs_bytes, free_bytes=free_bytes)


def crowded(state: SchedulerState, request: Request, limits: Limits) -> Wait:
    """Which of the bounds on what runs at once keeps it out."""
    most = 1 if state.one_row_only else limits.max_rows
    if request.solo or any(state.requests[number].solo for number in state.admitted):
        return Wait(reason="solo", text="it runs alone, or the one that runs does")
    if len(state.admitted) >= most:
        return Wait(reason="rows", text=f"all rows are taken ({most})")
    return Wait(reason="tokens", text=f"{limits.token_budget} tokens are admitted at most")


def need_bytes(state: SchedulerState, request: Request) -> int:
    """What is reserved when it gets a row: all known tokens at least, if some are on disk."""
    if request.phase is Phase.PAUSED:
        num_tokens = start_of(state, request).num_tokens
    else:
        num_tokens = find_prefix(state, request).num_tokens
    return reserve_bytes(state, request, request.max_tokens, num_tokens)
