"""How a run begins: what recovery makes of the requests of the run before, and what the engine's
start changes.

Called by `evolve` alone.
"""

import msgspec

from journal import events
from journal.events import ModelFacts
from scheduler import orphans
from scheduler.holding import insert_paused, unpin
from scheduler.leaving import NO_CLIENT, back_to_waiting, forget_row
from scheduler.memory import max_context_tokens
from scheduler.prefix import forget_engine_life, remove_tail, set_domain, tail_name
from scheduler.request import WITH_ROW, Phase, Request, enter
from scheduler.state import STATE_VERSION, Memory, SchedulerState


def server_started(state: SchedulerState, event: events.ServerStarted) -> None:
    """The recovery table: what was in the dead run's engine waits again, with its tokens.

    A run that ended without `server_stopping` died, and each request that was in its engine is
    charged with it: after `max_deaths` the request comes back alone, and after one more `decide`
    gives it up.
    """
    died = state.limits is not None and not state.stopping
    state.limits = event.limits
    if event.limits.orphans is not None:
        orphans.kept_for(state, event.limits.orphans.retention_ns)
    for request in list(state.requests.values()):
        request.deaths += died and request.phase in WITH_ROW
        recover(state, request)
        forget_chain(request)
        orphans.server_started(state, request)
        request.solo = request.deaths >= event.limits.max_deaths
        if request.deaths > event.limits.max_deaths:
            request.failure = f"in the engine at {request.deaths} deaths of the server"
            state.failures.append(request.number)
    state.policy_version = event.policy_version
    state.code_digest = event.code_digest
    state.engine_ready = False
    state.one_row_only = False
    state.stopping = False
    state.drained = False
    forget_engine(state)
    set_model(state, event.model)


def recover(state: SchedulerState, request: Request) -> None:
    """One request's line of the recovery table. A pause whose chain is whole is completed by
    `decide`; before that its tail is of no use.
    """
    match request.phase:
        case Phase.PREFILLING | Phase.DECODING:
            enter(request, "server_started")
            back_to_waiting(state, request)
        case Phase.PAUSING if is_whole(state, request):
            pass
        case Phase.PAUSING:
            state.pausing.remove(request.number)
            forget_tail(state, request)
            enter(request, "server_started")
            back_to_waiting(state, request)
        case Phase.RESUMING:
            enter(request, "server_started")
            forget_row(request)
            insert_paused(state, request)
        case _:
            pass


def is_whole(state: SchedulerState, request: Request) -> bool:
    """Whether all that a pausing row held is on disk."""
    if request.saved_tokens < 0 or request.saved_tokens != request.num_cached_tokens:
        return False
    return all(name in state.index.blocks for name in request.hashes[: request.chain_blocks])


def forget_tail(state: SchedulerState, request: Request) -> None:
    """The sweep at the start removes the file."""
    if request.tail_bytes:
        remove_tail(state.index, tail_name(request.request_id, request.saved_tokens))
    request.tail_bytes = 0
    request.saved_tokens = -1


def forget_engine(state: SchedulerState) -> None:
    """Rows, reservations, the batch and the chunk belong to an engine's life, and end with it."""
    state.unsaved = {}
    forget_engine_life(state.index)
    state.admitted = []
    state.batch_rows = []
    state.chunk = None
    state.decoded_since_chunk = False
    state.leaving = {}
    state.reserved_bytes = 0
    state.reserved_tokens = 0
    state.memory = Memory(ceiling_bytes=state.limits.ceiling_bytes if state.limits else None)
    state.reliefs = []
    state.fed = None
    state.chunk_bytes_per_token = 0
    state.step_ns = 0
    state.progress_ns = state.now_ns


def forget_chain(request: Request) -> None:
    """Leases, a restore and a wait end with the process; the names of its blocks stay."""
    request.leases = {}
    request.unsaved = []
    request.restoring = False
    request.deferred_hash = ""
    request.deferred_ns = 0
    request.deferred_until_ns = 0


def engine_ready(state: SchedulerState, event: events.EngineReady) -> None:
    state.engine_ready = True
    if event.kv_domain != state.index.domain:
        for request in state.requests.values():
            lose_chain(state, request)
        set_domain(state.index, event.kv_domain)
    state.one_row_only = event.one_row_only
    set_model(state, event.model)


def lose_chain(state: SchedulerState, request: Request) -> None:
    """Its blocks are of another domain: it has its tokens only."""
    tail = tail_name(request.request_id, request.saved_tokens) if request.tail_bytes else ""
    unpin(state, request)
    if tail:
        state.index.bad[tail] = request.pin_domain
    request.hashes = []


def set_model(state: SchedulerState, model: ModelFacts) -> None:
    """Takes what is known of the model, and holds back the requests that this server cannot run."""
    assert state.limits is not None
    state.model = model
    state.max_context_tokens = max_context_tokens(model, state.limits)
    open_numbers = sorted(state.waiting + state.held)
    for number in open_numbers:
        request = state.requests[number]
        aside = NO_CLIENT if request.needs_client else None
        request.held_reason = held_reason(state, request) or aside
    state.waiting = [n for n in open_numbers if state.requests[n].held_reason is None]
    state.held = [n for n in open_numbers if state.requests[n].held_reason is not None]
    for number in state.paused:
        state.requests[number].held_reason = held_reason(state, state.requests[number])
    fit = [n for n in open_numbers if state.requests[n].held_reason in (None, NO_CLIENT)]
    wanted = [n for n in fit if state.requests[n].hold and n not in state.holds]
    state.holds += wanted  # a wish stands until it is released, whatever becomes of a row


def held_reason(state: SchedulerState, request: Request) -> str | None:
    """Why a queued request cannot run on this server, however long it waits; null when it can."""
    assert state.model is not None
    if request.model_fingerprint != state.model.fingerprint:
        return "other_model"
    if request.num_prompt_tokens + request.max_tokens > state.max_context_tokens:
        return "exceeds_capacity"
    return None


def state_carried(state: SchedulerState, event: events.StateCarried) -> None:
    """The journal begins with the whole state at this seq, in place of the events before it."""
    assert event.state_version == STATE_VERSION, f"state version {event.state_version}"
    carried = msgspec.convert(event.state, SchedulerState, str_keys=True)
    for field in SchedulerState.__struct_fields__:
        setattr(state, field, getattr(carried, field))
    state.seq = event.through_seq
