"""What holds at every committed boundary. Broken, it is our own bug, never a user's or a disk's.

`check` goes through everything, for tests and simulation; `check_cheap` costs the same however
many wait.
"""

from scheduler.index_invariants import check_index
from scheduler.memory import rows_capacity_bytes
from scheduler.orphans import MAX_REMEMBERED
from scheduler.request import OPEN, WITH_ROW, Phase, Request, order_of
from scheduler.state import SchedulerState


class InvariantBroken(AssertionError):
    """The state contradicts itself."""


def require(holds: bool, what: str) -> None:
    """Raises InvariantBroken when something that must hold does not."""
    if not holds:
        raise InvariantBroken(what)


def check_cheap(state: SchedulerState) -> None:
    """Invariants over the engine's rows alone."""
    require(len(state.batch_rows) <= len(state.admitted), "the batch is part of the rows")
    require(
        len(state.requests) == num_placed(state),
        "each open request is waiting, held back, admitted or paused",
    )
    require(
        not (state.arrivals or state.endings or state.cancellations)
        and not (state.failures or state.holds or state.orphans),
        "decide has answered all that the facts brought",
    )
    require(state.reserved_bytes >= 0, "reserved bytes are not negative")


def num_placed(state: SchedulerState) -> int:
    """Requests in the lists, each once. After a crash a pause may be open whose row is gone."""
    without_row = sum(number not in state.admitted for number in state.pausing)
    queued = len(state.waiting) + len(state.held)
    return queued + len(state.admitted) + len(state.paused) + without_row


def check(state: SchedulerState) -> None:
    """All invariants."""
    check_cheap(state)
    check_queue(state)
    check_rows(state)
    check_limits(state)
    check_chunk(state)
    check_clients(state)
    for request in state.requests.values():
        check_request(state, request)
    check_index(state, require)


def check_queue(state: SchedulerState) -> None:
    """Queues are in the order of arrival, and hold nothing twice."""
    for numbers in (state.waiting, state.held):
        require(numbers == sorted(set(numbers)), "queues are sorted and hold each number once")
    for number in state.waiting + state.held:
        require(state.requests[number].phase is Phase.WAITING, f"{number} is queued and waits")
    for number in state.held:
        require(state.requests[number].held_reason is not None, f"{number} is held for a reason")
    for number in state.waiting:
        request = state.requests[number]
        require(not request.stays_held, f"{number} waits for nothing but room")
    for number in state.paused:
        require(state.requests[number].phase is Phase.PAUSED, f"{number} is paused")
    order = [order_of(state.requests[number]) for number in state.paused]
    require(order == sorted(set(order)), "held requests are in the order in which they go on")
    pausing = [n for n, request in state.requests.items() if request.phase is Phase.PAUSING]
    require(sorted(state.pausing) == pausing, "pauses under way are those of pausing requests")
    require(
        state.numbers == {r.request_id: n for n, r in state.requests.items()},
        "ids and numbers name the same requests",
    )


def check_rows(state: SchedulerState) -> None:
    """Rows, batch, chunk and reservations agree."""
    rows = [state.requests[n] for n in state.admitted]
    decoding = sorted(r.number for r in rows if r.phase is Phase.DECODING)
    require(sorted(state.batch_rows) == decoding, "the batch is the rows that decode")
    require(all(r.phase in WITH_ROW for r in rows), "what waits or is paused has no row")
    reserved = sum(r.reserved_bytes for r in rows) + sum(state.leaving.values())
    require(state.reserved_bytes == reserved, "reserved bytes are the rows' and the leaving rows'")
    tokens = sum(r.num_prompt_tokens + r.max_tokens for r in rows)
    require(state.reserved_tokens == tokens, "reserved tokens are the rows' upper bounds")
    if any(r.solo for r in rows):
        require(len(rows) == 1, "a request that runs solo is alone")


def check_limits(state: SchedulerState) -> None:
    """The rows keep the limits of the run. Bytes that still leave are still there, and count."""
    if state.limits is None or state.model is None:
        return
    max_rows = 1 if state.one_row_only else state.limits.max_rows
    require(len(state.admitted) <= max_rows, "rows are at most max_rows")
    require(
        len(state.admitted) <= 1 or state.reserved_tokens <= state.limits.token_budget,
        "rows are within the token budget, unless one is alone",
    )
    if state.limits.memory is not None:
        return  # a row may grow beyond what was reserved for it: then one is held
    capacity = rows_capacity_bytes(state.model, state.limits)
    require(
        state.reserved_bytes == 0 or capacity is None or state.reserved_bytes <= capacity,
        "reserved bytes are under the ceiling",
    )


def check_chunk(state: SchedulerState) -> None:
    """The planned chunk feeds the next tokens of a request that prefills."""
    chunk = state.chunk
    if chunk is None:
        return
    owner = state.requests.get(chunk.number)
    if owner is None or owner.phase not in (Phase.PREFILLING, Phase.PAUSING):
        raise InvariantBroken("the chunk's request is prefilling, or was when it was planned")
    require(chunk.start == owner.num_cached_tokens, "chunks follow each other")
    require(1 <= chunk.length <= owner.num_prefill_tokens, "chunks end before the last token")


def check_clients(state: SchedulerState) -> None:
    """Who has no client, and for how long, is one story."""
    for untils in (state.lost, state.found):
        require(list(untils.values()) == sorted(untils.values()), "who is overdue first is first")
    for number in (*state.lost, *state.found):
        require(state.requests[number].orphaned_by is not None, f"{number} has no client")
    require(not state.lost.keys() & state.found.keys(), "a client is lost in one way")
    for request in state.requests.values():
        if request.needs_client:
            require(request.orphaned_by is not None, f"{request.number} misses its client")
            runs = request.phase in WITH_ROW and request.phase is not Phase.PAUSING
            require(not runs, f"{request.number} does not run without its client")
    require(len(state.remembered) <= MAX_REMEMBERED, "no more is remembered than may be")
    require(not state.remembered.keys() & state.numbers.keys(), "what is open is not remembered")
    for digest, request_id in state.keys.items():
        number = state.numbers.get(request_id)
        holder = state.remembered.get(request_id) if number is None else state.requests[number]
        require(holder is not None and holder.key_digest == digest, "keys are held by requests")


def check_request(state: SchedulerState, request: Request) -> None:
    """One request's counts fit its phase."""
    where = f"request {request.number} ({request.phase.value})"
    require(request.phase in OPEN, f"{where} is open")
    require(1 <= request.number < state.next_number, f"{where} has a number that was given")
    require(0 <= request.num_output_tokens <= request.max_tokens, f"{where} keeps its limit")
    require(request.num_prompt_tokens >= 1, f"{where} has a prompt")
    match request.phase:
        case Phase.WAITING | Phase.PAUSED:
            require(request.num_cached_tokens == 0, f"{where} caches nothing")
            require(request.reserved_bytes == 0, f"{where} reserves nothing")
        case Phase.PREFILLING | Phase.PAUSING | Phase.RESUMING:
            require(request.num_cached_tokens < request.num_known_tokens, f"{where} is pending")
        case _:
            require(
                request.num_cached_tokens == request.num_known_tokens - 1,
                f"{where} has one pending token",
            )
