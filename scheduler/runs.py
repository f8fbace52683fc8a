"""How a run begins: what recovery makes of the requests of the run before, and what the engine's
start changes.

Called by `evolve` alone.
"""

from bisect import insort

import msgspec

from journal import events
from journal.events import ModelFacts
from scheduler.memory import max_context_tokens
from scheduler.prefix import forget_engine_life, set_domain
from scheduler.request import Phase, Request, enter
from scheduler.state import STATE_VERSION, SchedulerState


def server_started(state: SchedulerState, event: events.ServerStarted) -> None:
    """The recovery table: what was in the dead run's engine waits again, with its tokens.

    A run that ended without `server_stopping` died, and each request that was in its engine is
    charged with it: after `max_deaths` the request comes back alone, and after one more `decide`
    gives it up.
    """
    died = state.limits is not None and not state.stopping
    for request in list(state.requests.values()):
        if request.phase is not Phase.WAITING:
            enter(request, "server_started")
            back_to_waiting(state, request)
            request.deaths += died
        forget_chain(request)
        request.solo = request.deaths >= event.limits.max_deaths
        if request.deaths > event.limits.max_deaths:
            request.failure = f"in the engine at {request.deaths} deaths of the server"
            state.failures.append(request.number)
    state.policy_version = event.policy_version
    state.code_digest = event.code_digest
    state.limits = event.limits
    state.engine_ready = False
    state.one_row_only = False
    state.stopping = False
    forget_engine(state)
    set_model(state, event.model)


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
        set_domain(state.index, event.kv_domain)
        for request in state.requests.values():
            request.hashes = []
    state.one_row_only = event.one_row_only
    set_model(state, event.model)


def set_model(state: SchedulerState, model: ModelFacts) -> None:
    """Takes what is known of the model, and holds back the requests that this server cannot run."""
    assert state.limits is not None
    state.model = model
    state.max_context_tokens = max_context_tokens(model, state.limits)
    open_numbers = sorted(state.waiting + state.held)
    for number in open_numbers:
        request = state.requests[number]
        request.held_reason = held_reason(state, request)
    state.waiting = [n for n in open_numbers if state.requests[n].held_reason is None]
    state.held = [n for n in open_numbers if state.requests[n].held_reason is not None]


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


def back_to_waiting(state: SchedulerState, request: Request) -> None:
    """The row is gone, the tokens stay: the request takes its old place in the queue."""
    request.num_cached_tokens = 0
    request.num_memory_tokens = 0
    request.num_disk_tokens = 0
    request.reserved_bytes = 0
    request.admitted_ns = 0
    request.failure = None
    request.end_reason = None
    insort(state.waiting, request.number)
