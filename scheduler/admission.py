"""Who gets in: which arrivals are taken, and which of those that wait get a row.

Helpers of `decide`, and as pure.
"""

from itertools import chain
from typing import Literal

from journal import events
from journal.events import Decision, KvLimits
from scheduler.adopting import joins, orphans_by_content
from scheduler.draft import Draft, limits_of, model_of
from scheduler.memory import capacity_numbers, row_bytes
from scheduler.prefix import Match, match, state_bytes, state_every_tokens
from scheduler.request import Phase, Request, order_of
from scheduler.resuming import (
    fits,
    head_of_paused,
    is_crowded,
    num_rows,
    reserve_bytes,
    stays_held,
)
from scheduler.saving import kv_of, suffix_boundary
from scheduler.state import SchedulerState
from scheduler.usage import memory_of, rows_bytes

MAX_PASSED = 16
"""Requests behind one that has no room that are looked at in one step at most."""

MAX_OVERTAKEN_NS = 30_000_000_000
"""How long a request may be overtaken: none starves."""

MAX_ADMISSIONS = 32
"""Requests admitted in one step at most, those that are told to wait for a block among them; the
others are looked at again in the next one.
"""

NO_MATCH = Match(num_blocks=0, num_tokens=0, num_memory_tokens=0, parted_at="", because="off")
RETRY = Match(num_blocks=0, num_tokens=0, num_memory_tokens=0, parted_at="", because="retry")


# Arrivals


def judge_arrivals(state: SchedulerState, draft: Draft) -> None:
    """Each arrival is taken or refused in its step, or is one that was sent before."""
    orphans = orphans_by_content(state, draft)
    for number in state.arrivals:
        request = state.requests[number]
        if number in draft.ended or joins(state, draft, request, orphans):
            continue
        decision = judge(state, draft, request)
        if isinstance(decision, events.RequestQueued):
            draft.queued[number] = decision.max_tokens
            if request.key_digest:
                draft.keys[request.key_digest] = number
        draft.decisions.append(decision)


def judge(state: SchedulerState, draft: Draft, request: Request) -> Decision:
    """What can never fit is refused before what could only not be taken now: the client must not
    retry it.
    """
    num_waiting = len(state.waiting) + len(state.held) + len(draft.queued)
    max_tokens = output_limit(state, request)
    if request.num_prompt_tokens + 1 > state.max_context_tokens:
        return refuse(state, request, "context_length_exceeded", num_waiting)
    if request.num_prompt_tokens + max_tokens > state.max_context_tokens:
        return refuse(state, request, "max_tokens_exceeds_capacity", num_waiting)
    if state.stopping:
        return turn_away(request, "server_stopping", num_waiting)
    if num_waiting >= limits_of(state).max_waiting:
        return turn_away(request, "queue_full", num_waiting)
    return events.RequestQueued(
        request_id=request.request_id, max_tokens=max_tokens, num_waiting=num_waiting
    )


def output_limit(state: SchedulerState, request: Request) -> int:
    """The output that was asked for; when none was, the default, cut to what fits behind the
    prompt.
    """
    if request.asked_max_tokens is not None:
        return request.asked_max_tokens
    room = state.max_context_tokens - request.num_prompt_tokens
    return max(1, min(limits_of(state).default_max_tokens, room))


def refuse(
    state: SchedulerState,
    request: Request,
    reason: Literal["context_length_exceeded", "max_tokens_exceeds_capacity"],
    num_waiting: int,
) -> Decision:
    """The refusal of a request that never fits, with the numbers that say why."""
    prompt_tokens, max_tokens = request.num_prompt_tokens, output_limit(state, request)
    return events.RequestRejected(
        request_id=request.request_id,
        reason=reason,
        numbers=capacity_numbers(model_of(state), limits_of(state), prompt_tokens, max_tokens),
        num_waiting=num_waiting,
    )


def turn_away(
    request: Request, reason: Literal["queue_full", "server_stopping"], num_waiting: int
) -> Decision:
    """The refusal of a request that could be taken at another time."""
    return events.RequestRejected(
        request_id=request.request_id, reason=reason, numbers=None, num_waiting=num_waiting
    )


# Admission


def admit(state: SchedulerState, draft: Draft) -> None:
    """Admits in the order of arrival, those first that had a row before. Where memory is short, a
    request that has not waited long may be overtaken by some that fit beside all that it waits for.
    """
    head = head_of_paused(state, draft)
    is_blocked = False
    num_passed = 0
    waiting = sorted(state.waiting + draft.back) if draft.back else state.waiting
    for number in chain(waiting, draft.queued):
        request = state.requests[number]
        if number in draft.ended or stays_held(draft, request):
            continue
        max_tokens = draft.queued.get(number, request.max_tokens)
        if is_crowded(state, draft, request, request.num_prompt_tokens + max_tokens):
            return
        if still_waits(state, draft, request):
            continue
        found = find_prefix(state, request)
        held = head if head is not None and order_of(head) < order_of(request) else None
        passes = is_blocked or held is not None
        if not has_room(state, draft, request, max_tokens, found, passes=passes, held=held):
            is_blocked = True
            num_passed += 1
            if num_passed == MAX_PASSED or not may_be_overtaken(state, held or request):
                return
        elif waits_for_blocks(state, draft, request, found):
            draft.num_deferred += 1
        else:
            let_in(state, draft, request, max_tokens, found)
        if request.solo or draft.num_deferred + draft.num_let_in == MAX_ADMISSIONS:
            return


def has_room(
    state: SchedulerState,
    draft: Draft,
    request: Request,
    max_tokens: int,
    found: Match,
    *,
    passes: bool,
    held: Request | None,
) -> bool:
    """Whether the request fits now. If it passes one that waits for memory it must fit with all
    that it may ever need, beside rows that are there: so it takes nothing that would have been
    given back; and nobody passes a held one for long.
    """
    if not passes:
        return fits(state, draft, reserve_bytes(state, request, max_tokens, found.num_tokens))
    if held is not None and not may_be_overtaken(state, held):
        return False
    has_rows = bool(state.admitted or draft.num_added or state.leaving)
    bound = request.num_prompt_tokens + max_tokens
    return has_rows and fits(state, draft, row_bytes(model_of(state), bound))


def may_be_overtaken(state: SchedulerState, request: Request) -> bool:
    """Whether others may still pass this request, held or in the queue, which has no room: where
    there are marks, and until it has waited for some time.
    """
    if memory_of(state) is None:
        return False
    since_ns = request.paused_ns if request.phase is Phase.PAUSED else request.received_ns
    return state.now_ns - since_ns < MAX_OVERTAKEN_NS


def let_in(
    state: SchedulerState, draft: Draft, request: Request, max_tokens: int, found: Match
) -> None:
    """The request gets a row, and others may count on the blocks that it will compute."""
    number = request.number
    need_bytes = reserve_bytes(state, request, max_tokens, found.num_tokens)
    draft.decisions.append(
        admission(
            state,
            request,
            found,
            need_bytes,
            rows_bytes(state) + draft.added_bytes,
            num_admitted=num_rows(state, draft),
        )
    )
    draft.admitted.append(request)
    draft.matched[number] = found.num_tokens
    for name in request.hashes[found.num_blocks :]:
        draft.coming.setdefault(name, number)
    draft.num_let_in += 1
    draft.num_added += 1
    draft.added_bytes += need_bytes
    draft.added_tokens += request.num_prompt_tokens + max_tokens


# What a prompt starts from


def find_prefix(state: SchedulerState, request: Request) -> Match:
    """The longest saved prefix of the request's known tokens."""
    kv = kv_of(state)
    if kv is None:
        return NO_MATCH
    if request.retries:
        return RETRY  # its row failed, maybe by what it had restored
    stateful = state_bytes(model_of(state)) > 0
    return match(state.index, request.hashes, request.num_known_tokens, kv.block_tokens, stateful)


def still_waits(state: SchedulerState, draft: Draft, request: Request) -> bool:
    """Whether the block that the request was told to wait for is still to come. It is asked in
    every step of everybody who waits, so it looks at one block only.
    """
    name = request.deferred_hash
    if not name or state.now_ns >= request.deferred_until_ns or state.index.stopped is not None:
        return False
    return name in state.index.writing_states or computing(state, draft, name) > 0


def computing(state: SchedulerState, draft: Draft, name: str) -> int:
    """The number of the request from which this block will be on disk; 0 for none."""
    writing = state.index.writing.get(name)
    if writing is not None:
        return writing.number
    number = state.index.coming.get(name) or draft.coming.get(name, 0)
    return 0 if number in draft.ended else number


def waits_for_blocks(state: SchedulerState, draft: Draft, request: Request, found: Match) -> bool:
    """Whether the request stays in the queue because another one is just computing what it needs
    next.

    It waits for `kv.await_ns` at most in all, and those behind it pass.
    """
    kv = kv_of(state)
    if kv is None or found is RETRY or state.index.stopped is not None:
        return False
    until_ns = request.deferred_until_ns or state.now_ns + kv.await_ns
    name, number = awaited(state, draft, request, found, kv)
    if not name or state.now_ns >= until_ns:
        return False
    draft.decisions.append(
        events.RequestDeferred(
            request_id=request.request_id,
            number=request.number,
            hash=name,
            computed_by=number,
            until_ns=until_ns,
        )
    )
    return True


def awaited(
    state: SchedulerState, draft: Draft, request: Request, found: Match, kv: KvLimits
) -> tuple[str, int]:
    """The last block that both this request needs and another one is computing, and that one's
    number; or a state that is just being written. Empty when waiting is of no use.
    """
    hashes = request.hashes
    start = end = found.parted_at_tokens // kv.block_tokens
    number = computing(state, draft, hashes[start]) if start < len(hashes) else 0
    while number and end < len(hashes) and computing(state, draft, hashes[end]) == number:
        end += 1
    if end > start and is_worth_it(state, kv, number, found, end * kv.block_tokens):
        return hashes[end - 1], number
    for name in reversed(hashes[found.num_blocks : start]):
        writing = state.index.writing_states.get(name)
        if writing is not None:
            return name, writing.number
    return "", 0


def is_worth_it(
    state: SchedulerState, kv: KvLimits, number: int, found: Match, end_tokens: int
) -> bool:
    """Whether more is found once this request has computed the blocks up to here. Where layers
    cannot be cut there must be a boundary among them.
    """
    model = model_of(state)
    if state_bytes(model) == 0:
        return True
    every = state_every_tokens(model, kv)
    other = state.requests.get(number)
    boundaries = [end_tokens // every * every]
    if other is not None:
        boundaries.append(suffix_boundary(kv, other))
    return any(found.num_tokens < boundary <= end_tokens for boundary in boundaries)


def admission(
    state: SchedulerState,
    request: Request,
    found: Match,
    need_bytes: int,
    in_use_bytes: int,
    *,
    num_admitted: int,
) -> Decision:
    """The admission with the numbers that led to it: what is found is restored, the rest will be
    fed.
    """
    waited_ns = state.now_ns - request.deferred_ns if request.deferred_ns else 0
    return events.RequestAdmitted(
        request_id=request.request_id,
        number=request.number,
        num_known_tokens=request.num_known_tokens,
        num_cached_tokens=found.num_tokens,
        reserved_bytes=need_bytes,
        in_use_bytes=in_use_bytes,
        ceiling_bytes=state.memory.ceiling_bytes,
        num_admitted=num_admitted,
        solo=request.solo,
        num_blocks=found.num_blocks,
        num_memory_tokens=found.num_memory_tokens,
        num_disk_tokens=found.num_tokens - found.num_memory_tokens,
        parted_because=found.because,
        waited_ns=waited_ns,
        parted_at_tokens=found.parted_at_tokens,
        last_hash=request.hashes[found.num_blocks - 1] if found.num_blocks else "",
    )
