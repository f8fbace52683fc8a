"""Requests without a client: how they lose it, find one again, and what is remembered of those that
have finished. Called by `evolve` and its helpers alone.
"""

from bisect import insort

import msgspec

from journal import events
from journal.events import OrphanLimits
from scheduler.leaving import NO_CLIENT, end_wanted, put_in_line
from scheduler.request import Phase, Request
from scheduler.state import Remembered, SchedulerState

MAX_REMEMBERED = 4096
"""Finished requests whose answers may be asked for again; the oldest one is forgotten for one more.
"""


def orphan_limits(state: SchedulerState) -> OrphanLimits | None:
    """The settings of requests without a client, if they may be without one at all."""
    return None if state.limits is None else state.limits.orphans


def client_gone(state: SchedulerState, event: events.ClientGone) -> None:
    """The request becomes an orphan. One that has a key runs on: its client will ask for it."""
    request = state.find(event.request_id)
    if request is None or request.orphaned_by is not None:
        return
    limits = orphan_limits(state)
    if limits is None or (limits.grace_ns == 0 and not request.key_digest):
        end_wanted(state, event.request_id, "client_gone")
        return
    request.orphaned_by = "client_gone"
    request.orphaned_ns = state.now_ns
    if not request.key_digest:
        state.lost[request.number] = state.now_ns + limits.grace_ns
        wait_for_client(state, request)


def wait_for_client(state: SchedulerState, request: Request) -> None:
    """It does not go on. `decide` holds its row; without one there is nothing to save."""
    request.needs_client = True
    number = request.number
    if request.phase in (Phase.PREFILLING, Phase.DECODING, Phase.RESUMING):
        state.orphans.append(number)
    elif number in state.waiting:
        state.waiting.remove(number)
        request.held_reason = NO_CLIENT
        insort(state.held, number)


def client_attached(state: SchedulerState, event: events.ClientAttached) -> None:
    request = state.find(event.request_id)
    if request is not None:
        has_client(state, request)
    else:
        has_reader(state, event.request_id)


def request_adopted(state: SchedulerState, event: events.RequestAdopted) -> None:
    """The client that sent it again is its client."""
    request = state.find(event.request_id)
    if request is not None:
        has_client(state, request)
    else:
        has_reader(state, event.request_id)


def has_reader(state: SchedulerState, request_id: str) -> None:
    """What has finished is given to one client, and an equal request is a new one from then on; but
    by its key it is found again.
    """
    finished = state.remembered.get(request_id)
    if finished is None:
        return
    if finished.key_digest:
        read = msgspec.structs.replace(finished, orphaned_by=None, orphaned_ns=0)
        state.remembered[request_id] = read
    else:
        del state.remembered[request_id]


def has_client(state: SchedulerState, request: Request) -> None:
    """Somebody reads what it puts out: it goes on."""
    request.orphaned_by = None
    request.orphaned_ns = 0
    state.lost.pop(request.number, None)
    state.found.pop(request.number, None)
    go_on_without(state, request)


def go_on_without(state: SchedulerState, request: Request) -> None:
    """It waits for a client no longer."""
    number = request.number
    if not request.needs_client:
        return
    request.needs_client = False
    if number in state.orphans:
        state.orphans.remove(number)
    if request.held_reason == NO_CLIENT:
        request.held_reason = None
        state.held.remove(number)
        put_in_line(state, request)


def released(state: SchedulerState, request: Request) -> None:
    """An operator lets an orphan go on: as one that a start has found, and for as long."""
    limits = orphan_limits(state)
    if limits is None or not request.needs_client:
        return
    go_on_without(state, request)
    state.lost.pop(request.number, None)
    state.found.pop(request.number, None)
    if not request.key_digest:
        state.found[request.number] = state.now_ns + limits.restart_grace_ns


# Another run


def server_started(state: SchedulerState, request: Request) -> None:
    """No connection outlives its server. A request that had its client until now runs on, is held
    or ends, as the settings of this start say, whatever those of an earlier one said. One whose
    connection was lost before stays held, and begins its time anew: nobody could come back while
    there was no server.
    """
    limits = orphan_limits(state)
    if limits is None:
        has_client(state, request)  # nothing is known of clients where they are not looked after
        return
    now_ns, number = state.now_ns, request.number
    state.lost.pop(number, None)
    state.found.pop(number, None)
    if request.orphaned_by is None:
        request.orphaned_by = "restart"
        request.orphaned_ns = now_ns
    is_lost = request.orphaned_by == "client_gone" and not request.key_digest
    if is_lost and request.needs_client:
        state.lost[number] = now_ns + limits.grace_ns
    elif limits.on_restart == "cancel":
        request.needs_client = True
        state.found[number] = now_ns
    else:
        request.needs_client = limits.on_restart == "hold"
        if request.needs_client or not request.key_digest:
            state.found[number] = now_ns + limits.restart_grace_ns


def kept_for(state: SchedulerState, retention_ns: int) -> None:
    """A start may keep answers for less than the one before: what is over by that is forgotten."""
    for other in list(state.remembered.values()):
        until_ns = min(other.until_ns, other.ended_ns + retention_ns)
        if until_ns <= state.now_ns:
            remember_no_more(state, other)
        else:
            kept = msgspec.structs.replace(other, until_ns=until_ns)
            state.remembered[other.request_id] = kept


# Ends


def forget(state: SchedulerState, request: Request, *, finished: bool) -> None:
    """The request has ended. What has finished is kept in mind for a client that was not there."""
    number = request.number
    until_ns = max(state.lost.pop(number, 0), state.found.pop(number, 0))
    limits = orphan_limits(state)
    if limits is not None:
        kept_ns = state.now_ns + limits.retention_ns
        until_ns = kept_ns if request.key_digest else min(until_ns, kept_ns)
    if finished and until_ns > state.now_ns:
        remember(state, request, until_ns)
    elif state.keys.get(request.key_digest) == request.request_id:
        del state.keys[request.key_digest]


def remember(state: SchedulerState, request: Request, until_ns: int) -> None:
    """Keeps in mind that the request has finished, until a time. What is older makes place."""
    for other in list(state.remembered.values()):
        if other.until_ns <= state.now_ns or len(state.remembered) >= MAX_REMEMBERED:
            remember_no_more(state, other)
    state.remembered[request.request_id] = Remembered(
        request_id=request.request_id,
        number=request.number,
        model_fingerprint=request.model_fingerprint,
        content_digest=request.content_digest,
        session_digest=request.session_digest,
        key_digest=request.key_digest,
        orphaned_by=request.orphaned_by,
        orphaned_ns=request.orphaned_ns,
        num_output_tokens=request.num_output_tokens,
        ended_ns=state.now_ns,
        until_ns=until_ns,
    )


def remember_no_more(state: SchedulerState, other: Remembered) -> None:
    del state.remembered[other.request_id]
    if state.keys.get(other.key_digest) == other.request_id:
        del state.keys[other.key_digest]
