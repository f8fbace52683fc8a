"""How a request is held and goes on. Called by `evolve` alone."""

from bisect import insort
from typing import assert_never

from journal import events
from scheduler import leases, orphans, readings
from scheduler.leaving import NO_CLIENT, forget_marks, forget_pause, forget_row, leave_engine
from scheduler.prefix import add_tail, change, remove_tail, state_bytes, tail_name
from scheduler.request import Phase, Request, enter, order_of
from scheduler.state import SchedulerState

HoldEvent = (
    events.MemorySampled
    | events.MemoryReclaimed
    | events.HoldRequested
    | events.ReleaseRequested
    | events.ChainSaved
    | events.ChainSaveFailed
    | events.ChainRestoreFailed
    | events.ReclaimStarted
    | events.EmergencyDeclared
    | events.PauseStarted
    | events.TailSavePlanned
    | events.ChainPinned
    | events.KvDropped
    | events.RequestPaused
    | events.ResumeStarted
    | events.RequestResumed
    | events.ChainUnpinned
)


def dispatch(state: SchedulerState, event: HoldEvent) -> None:  # noqa: C901, PLR0912
    """The part of `evolve`'s dispatch that is about memory and held requests."""
    match event:
        case events.MemorySampled():
            readings.memory_sampled(state, event)
        case events.MemoryReclaimed():
            readings.memory_reclaimed(state, event)
        case events.HoldRequested():
            hold_requested(state, event)
        case events.ReleaseRequested():
            release_requested(state, event)
        case events.ChainSaved():
            chain_saved(state, event)
        case events.ChainSaveFailed():
            chain_save_failed(state, event)
        case events.ChainRestoreFailed():
            chain_restore_failed(state, event)
        case events.ReclaimStarted():
            readings.reclaim_started(state, event)
        case events.EmergencyDeclared():
            state.memory.declared = True
        case events.PauseStarted():
            pause_started(state, event)
        case events.TailSavePlanned():
            tail_save_planned(state, event)
        case events.ChainPinned():
            chain_pinned(state, event)
        case events.KvDropped():
            kv_dropped(state, event)
        case events.RequestPaused():
            request_paused(state, event)
        case events.ResumeStarted():
            resume_started(state, event)
        case events.RequestResumed():
            request_resumed(state, event)
        case events.ChainUnpinned():
            chain_unpinned(state, event)
        case _:
            assert_never(event)


# Wishes


def hold_requested(state: SchedulerState, event: events.HoldRequested) -> None:
    request = state.find(event.request_id)
    if request is None:
        return
    request.hold = True
    unfit = request.number in state.held and request.held_reason != NO_CLIENT
    done = request.phase in (Phase.PAUSING, Phase.PAUSED) or unfit
    if not done and request.number not in state.holds:
        state.holds.append(request.number)


def release_requested(state: SchedulerState, event: events.ReleaseRequested) -> None:
    request = state.find(event.request_id)
    if request is None:
        return
    request.hold = False
    if request.number in state.holds:
        state.holds.remove(request.number)
    orphans.released(state, request)


# Pausing


def pause_started(state: SchedulerState, event: events.PauseStarted) -> None:
    request = state.get(event.request_id)
    enter(request, "pause_started")
    forget_pause(request)
    request.saved_tokens = -1  # what a pause before this one had saved may be lost
    request.pause_reason = event.reason
    for wishes in (state.holds, state.orphans):
        if request.number in wishes:
            wishes.remove(request.number)
    state.pausing.append(request.number)
    if event.reason in ("high", "emergency", "no_room"):
        readings.act(state, "pause", event.frees_bytes, request.number)


def tail_save_planned(state: SchedulerState, event: events.TailSavePlanned) -> None:
    request = state.get(event.request_id)
    enter(request, "tail_save_planned")
    request.tail_planned = True
    request.tail_start = event.tail_start
    request.chain_blocks = event.tail_start // max(1, leases.block_tokens_of(state))
    num_bytes = tail_bytes_at_most(state, request)
    state.index.writing_tails[request.number] = num_bytes
    state.index.writing_bytes += num_bytes


def tail_bytes_at_most(state: SchedulerState, request: Request) -> int:
    """What the tail takes: the positions behind the last whole block, and the state. The step that
    is under way may add one.
    """
    assert state.model is not None
    num_tokens = request.num_cached_tokens + 1 - request.tail_start
    return state.model.kv_bytes_per_token * num_tokens + state_bytes(state.model)


def stop_writing_tail(state: SchedulerState, number: int) -> None:
    """Nothing of this tail is in the writers' hands any more."""
    state.index.writing_bytes -= state.index.writing_tails.pop(number, 0)


def chain_saved(state: SchedulerState, event: events.ChainSaved) -> None:
    """The tail is there. Nobody waits for it any more when its request has ended or failed."""
    stop_writing_tail(state, event.number)
    index = state.index
    request = state.find(event.request_id)
    name = tail_name(event.request_id, event.num_tokens)
    if request is None or request.phase is not Phase.PAUSING or not request.tail_planned:
        if event.tail_bytes:
            index.bad[name] = index.domain
        return
    request.saved_tokens = event.num_tokens
    request.tail_bytes = event.tail_bytes
    request.pin_domain = index.domain
    if event.tail_bytes:
        add_tail(index, name, event.tail_bytes)


def chain_save_failed(state: SchedulerState, event: events.ChainSaveFailed) -> None:
    stop_writing_tail(state, event.number)
    request = state.find(event.request_id)
    if request is not None and request.phase is Phase.PAUSING and request.tail_planned:
        request.save_failure = event.reason


def chain_pinned(state: SchedulerState, event: events.ChainPinned) -> None:
    request = state.get(event.request_id)
    assert request.phase is Phase.PAUSING, f"{event.request_id} is pinned when it is paused"
    assert request.saved_tokens == event.num_tokens, "what is pinned was saved"
    for name in request.hashes[: event.num_blocks]:
        change(state.index, name, pins=1)
        request.pins[name] = None
        state.index.unwanted.pop(name, None)


def kv_dropped(state: SchedulerState, event: events.KvDropped) -> None:
    request = state.get(event.request_id)
    request.saved_tokens = -1
    request.dropped_alone |= event.reason == "alone"


def request_paused(state: SchedulerState, event: events.RequestPaused) -> None:
    request = state.get(event.request_id)
    number = request.number
    was_resuming = request.phase is Phase.RESUMING
    has_row = number in state.admitted
    enter(request, "request_paused")
    if has_row:
        leave_engine(state, request)
    for numbers in (state.waiting, state.held):
        if number in numbers:
            numbers.remove(number)
    forget_marks(state, number)
    if not was_resuming:
        request.resuming_tokens = request.num_cached_tokens
    elif request.saved_tokens < 0:
        request.num_memory_tokens = 0  # what it was being filled from is not its own
        request.num_disk_tokens = 0
    forget_row(request)
    forget_pause(request)
    request.pause_reason = event.reason
    if request.held_reason == NO_CLIENT:
        request.held_reason = None  # that is for those in the queue
    request.paused_ns = state.now_ns
    request.num_pauses += not was_resuming
    insert_paused(state, request)


def insert_paused(state: SchedulerState, request: Request) -> None:
    """Held requests go on in the order in which they were first admitted."""
    insort(state.paused, request.number, key=lambda number: order_of(state.requests[number]))


# Going on


def resume_started(state: SchedulerState, event: events.ResumeStarted) -> None:
    request = state.get(event.request_id)
    enter(request, "resume_started")
    state.paused.remove(request.number)
    state.admitted.append(request.number)
    request.first_admitted_seq = request.first_admitted_seq or state.seq
    request.held_ns += event.held_ns
    request.restoring = event.num_cached_tokens > 0
    request.room_tokens = event.num_known_tokens if request.restoring else 0
    if request.saved_tokens < 0 or event.num_cached_tokens == 0:
        request.num_memory_tokens = 0
        request.num_disk_tokens = 0
    leases.join_chain(state, request, event.num_blocks)
    request.reserved_bytes = event.reserved_bytes
    request.admitted_ns = state.now_ns
    state.reserved_bytes += event.reserved_bytes
    state.reserved_tokens += request.num_prompt_tokens + request.max_tokens


def request_resumed(state: SchedulerState, event: events.RequestResumed) -> None:
    request = state.get(event.request_id)
    enter(request, "request_resumed")
    assert not request.restoring, "a row goes on when it has been filled"
    assert request.num_cached_tokens == event.num_cached_tokens, "the row is what was restored"
    forget_pause(request)
    request.resumed_tokens = event.num_cached_tokens


def chain_restore_failed(state: SchedulerState, event: events.ChainRestoreFailed) -> None:
    """The tail cannot be read: it is of no more use."""
    request = state.find(event.request_id)
    if request is None or not request.tail_bytes:
        return
    name = tail_name(request.request_id, request.saved_tokens)
    remove_tail(state.index, name)
    state.index.bad[name] = request.pin_domain
    request.tail_bytes = 0


def chain_unpinned(state: SchedulerState, event: events.ChainUnpinned) -> None:
    unpin(state, state.get(event.request_id))


def unpin(state: SchedulerState, request: Request) -> None:
    """Nothing holds its blocks and its tail any more. Those that are not there were lost before."""
    for name in request.pins:
        change(state.index, name, pins=-1)
    request.pins = {}
    if request.tail_bytes:
        remove_tail(state.index, tail_name(request.request_id, request.saved_tokens))
    request.tail_bytes = 0
    request.saved_tokens = -1
