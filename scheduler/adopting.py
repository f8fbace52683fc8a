"""Requests that are sent again: which of those without a client, or with the same key, they are.

An agent whose stream is cut sends the same request again, most often without a word that it is the
same one. It is known by the digest of all that it asks, and takes the place of the client that was
lost, once; one that has its client is never touched, since equal twins are legitimate. With an
Idempotency-Key there is nothing to guess.

Helpers of `decide`, and as pure.
"""

from collections.abc import Iterator
from itertools import islice
from typing import Literal

from journal import events
from journal.events import Likeness
from scheduler.draft import Draft, limits_of
from scheduler.leaving import NO_CLIENT
from scheduler.request import Request
from scheduler.state import Remembered, SchedulerState

CancelReason = Literal[
    "client_gone", "cancel_requested", "deadline", "nobody_attached", "on_restart"
]

Candidate = Request | Remembered

MAX_LOST = 1024
"""Requests that wait for lost clients at once; for one more, that which has waited longest ends."""

MAX_LOOKED_AT = 64
"""Requests whose time may be over that one step looks at."""


def nobody_came(state: SchedulerState) -> Iterator[tuple[int, CancelReason]]:
    """The requests without a client whose time is over, and what that is called."""
    num_too_many = len(state.lost) - MAX_LOST
    for num_before, (number, until_ns) in enumerate(islice(state.lost.items(), MAX_LOOKED_AT)):
        if until_ns > state.now_ns and num_before >= num_too_many:
            break
        yield number, "client_gone"
    limits = limits_of(state).orphans
    is_cancel = limits is not None and limits.on_restart == "cancel"
    for number, until_ns in islice(state.found.items(), MAX_LOOKED_AT):
        if until_ns > state.now_ns:
            break
        was_found = is_cancel and state.requests[number].needs_client  # not one let go by hand
        yield number, "on_restart" if was_found else "nobody_attached"


def orphans_by_content(state: SchedulerState, draft: Draft) -> dict[str, list[Candidate]]:
    """Those that an arrival of this step may adopt, by what they ask, the oldest first."""
    limits = limits_of(state).orphans
    orphans: dict[str, list[Candidate]] = {}
    if limits is None or not limits.adopt or state.stopping:
        return orphans
    candidates = [*open_orphans(state, draft), *finished_orphans(state)]
    for candidate in sorted(candidates, key=lambda other: other.number):
        orphans.setdefault(candidate.content_digest, []).append(candidate)
    return orphans


def open_orphans(state: SchedulerState, draft: Draft) -> Iterator[Request]:
    """Open requests without a client that this server can run, and whose time is not over. One
    that has a key is its owner's alone.
    """
    for untils in (state.lost, state.found):
        for number, until_ns in untils.items():
            request = state.requests[number]
            may_be = not request.key_digest and request.held_reason in (None, NO_CLIENT)
            if may_be and until_ns > state.now_ns and not is_over(state, draft, number):
                yield request


def is_over(state: SchedulerState, draft: Draft, number: int) -> bool:
    """Whether this step ends the request in a way that leaves no answer. One that finishes has its
    answer, and one whose row has failed goes on.
    """
    return number in draft.ended and number not in state.endings and number not in draft.retried


def finished_orphans(state: SchedulerState) -> Iterator[Remembered]:
    """Requests that have finished while they had no client."""
    for other in state.remembered.values():
        if not other.key_digest and other.until_ns > state.now_ns:
            yield other


def joins(
    state: SchedulerState,
    draft: Draft,
    request: Request,
    orphans: dict[str, list[Candidate]],
) -> bool:
    """Whether this arrival is one that was sent before; if so, notes which."""
    if request.key_digest:
        return joins_by_key(state, draft, request)
    if not request.content_digest or request.needs_client:
        return False  # nothing to know it by, or its client has left already
    for candidate in orphans.get(request.content_digest, ()):
        if candidate.number in draft.adopted:
            continue
        if candidate.number in state.arrivals and candidate.number not in draft.queued:
            continue  # it was refused
        same_client = candidate.session_digest == request.session_digest
        if same_client and candidate.model_fingerprint == request.model_fingerprint:
            join(state, draft, request, candidate, "content")
            return True
    return False


def joins_by_key(state: SchedulerState, draft: Draft, request: Request) -> bool:
    """Whether the key is held. The same key with another question is refused."""
    holder = holder_of(state, draft, request.key_digest)
    if holder is None or state.stopping:
        return False
    if holder.content_digest == request.content_digest:
        join(state, draft, request, holder, "key")
        return True
    draft.decisions.append(
        events.RequestRejected(
            request_id=request.request_id,
            reason="key_reused",
            numbers=None,
            num_waiting=len(state.waiting) + len(state.held) + len(draft.queued),
        )
    )
    return True


def holder_of(state: SchedulerState, draft: Draft, key_digest: str) -> Candidate | None:
    """The request that holds a key: open, taken in this step, or finished and still kept."""
    if key_digest in draft.keys:
        return state.requests[draft.keys[key_digest]]
    request_id = state.keys.get(key_digest, "")
    number = state.numbers.get(request_id)
    if number is not None:
        return None if is_over(state, draft, number) else state.requests[number]
    other = state.remembered.get(request_id)
    return other if other is not None and other.until_ns > state.now_ns else None


def join(
    state: SchedulerState, draft: Draft, request: Request, other: Candidate, by: Likeness
) -> None:
    """The arrival is the other one, which has a client from here on, and goes on."""
    orphaned_by = None if other.number in draft.adopted else other.orphaned_by
    is_aside = isinstance(other, Request) and other.held_reason == NO_CLIENT
    if is_aside and other.number not in draft.adopted:
        draft.back.append(other.number)
    draft.adopted.add(other.number)
    draft.decisions += (
        events.RequestJoined(
            request_id=request.request_id,
            number=request.number,
            joined_id=other.request_id,
            by=by,
        ),
        events.RequestAdopted(
            request_id=other.request_id,
            number=other.number,
            adopter_id=request.request_id,
            adopter_number=request.number,
            by=by,
            orphaned_by=orphaned_by,
            orphaned_ns=0 if orphaned_by is None else state.now_ns - other.orphaned_ns,
            num_output_tokens=other.num_output_tokens,
        ),
    )
