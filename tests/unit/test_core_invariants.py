"""Each invariant finds the state that breaks it."""

from collections.abc import Callable

import msgspec
import pytest

from journal import events
from scheduler.invariants import InvariantBroken, check, check_cheap
from scheduler.request import Phase
from scheduler.state import Chunk, SchedulerState
from tests.unit.core_driver import LIMITS, MODEL, CoreDriver


def busy() -> SchedulerState:
    """1 decodes, 2 prefills with a chunk, 3 leaves, 4 waits, 5 is held."""
    driver = CoreDriver(msgspec.structs.replace(LIMITS, max_rows=2, ceiling_bytes=2_000_000))
    driver.begin_run()
    driver.serve(1, 100, 100, 100, 500)
    driver.state.requests[5].model_fingerprint = "0" * 64
    driver.step(events.EngineReady(model=MODEL, one_row_only=False, note="", load_ns=1))
    driver.step(driver.decoded())
    driver.state.leaving[3] = 1_000
    driver.state.reserved_bytes += 1_000
    state = driver.state
    assert (state.batch_rows, state.admitted, state.waiting, state.held) == (
        [1],
        [1, 2],
        [3, 4],
        [5],
    )
    assert state.chunk == Chunk(number=2, chunk=1, start=0, length=50)
    return state


def setting(what: str, value: object, number: int = 0) -> Callable[[SchedulerState], None]:
    """Sets a field of the state, or of the request with this number."""

    def change(state: SchedulerState) -> None:
        setattr(state.requests[number] if number else state, what, value)

    return change


def test_whole_state_is_sound() -> None:
    check(busy())
    check(SchedulerState())


CHEAP = [
    (setting("batch_rows", [1, 2, 3]), "batch is part of the rows"),
    (setting("waiting", [3]), "waiting, held back, admitted or paused"),
    (setting("held", []), "waiting, held back, admitted or paused"),
    (setting("arrivals", [1]), "decide has answered"),
    (setting("endings", [1]), "decide has answered"),
    (setting("cancellations", [1]), "decide has answered"),
    (setting("failures", [1]), "decide has answered"),
    (setting("holds", [1]), "decide has answered"),
    (setting("reserved_bytes", -1), "not negative"),
]

WHOLE = [
    (setting("waiting", [4, 3]), "sorted"),
    (setting("waiting", [3, 3]), "hold each number once"),
    (setting("held", [1]), "is queued and waits"),
    (setting("held_reason", None, 5), "held for a reason"),
    (setting("numbers", {}), "name the same requests"),
    (setting("request_id", "x", 1), "name the same requests"),
    (setting("batch_rows", [2]), "batch is the rows that decode"),
    (setting("batch_rows", []), "batch is the rows that decode"),
    (setting("admitted", [1, 3]), "what waits or is paused has no row"),
    (setting("leaving", {}), "reserved bytes are"),
    (setting("reserved_bytes", 7, 2), "reserved bytes are"),
    (setting("reserved_tokens", 7), "reserved tokens are"),
    (setting("solo", True, 1), "solo"),
    (setting("limits", msgspec.structs.replace(LIMITS, max_rows=1)), "at most max_rows"),
    (setting("one_row_only", True), "at most max_rows"),
    (setting("limits", msgspec.structs.replace(LIMITS, token_budget=120)), "token budget"),
    (
        setting("limits", msgspec.structs.replace(LIMITS, ceiling_bytes=1_505_120)),
        "under the ceiling",
    ),
    (setting("chunk", Chunk(1, 1, 0, 64)), "chunk's request is prefilling"),
    (setting("chunk", Chunk(99, 1, 0, 64)), "chunk's request is prefilling"),
    (setting("chunk", Chunk(2, 1, 5, 64)), "chunks follow each other"),
    (setting("chunk", Chunk(2, 1, 0, 0)), "chunks end before the last token"),
    (setting("chunk", Chunk(2, 1, 0, 100)), "chunks end before the last token"),
    (setting("next_number", 5), "number that was given"),
    (setting("num_output_tokens", 11, 3), "keeps its limit"),
    (setting("num_output_tokens", -1, 3), "keeps its limit"),
    (setting("num_prompt_tokens", 0, 3), "has a prompt"),
    (setting("num_cached_tokens", 1, 3), "caches nothing"),
    (setting("reserved_bytes", 1, 3), "reserves nothing"),
    (setting("num_cached_tokens", 0, 1), "one pending token"),
]


@pytest.mark.parametrize(("change", "message"), CHEAP)
def test_cheap_invariant_finds(change: Callable[[SchedulerState], None], message: str) -> None:
    state = busy()
    change(state)
    for each in (check_cheap, check):
        with pytest.raises(InvariantBroken, match=message):
            each(state)


@pytest.mark.parametrize(("change", "message"), WHOLE)
def test_invariant_finds(change: Callable[[SchedulerState], None], message: str) -> None:
    state = busy()
    change(state)
    check_cheap(state)
    with pytest.raises(InvariantBroken, match=message):
        check(state)


def test_prefilling_request_keeps_its_last_token_back() -> None:
    state = busy()
    state.chunk = None
    state.requests[2].num_cached_tokens = 99
    check(state)
    state.requests[2].num_cached_tokens = 100
    with pytest.raises(InvariantBroken, match="pending"):
        check(state)


def test_request_that_has_ended_does_not_stay() -> None:
    state = busy()
    state.chunk = None
    state.requests[2].phase = Phase.FINISHED
    with pytest.raises(InvariantBroken, match="has no row"):
        check(state)
    state.requests[2].phase = Phase.PREFILLING
    state.requests[3].phase = Phase.FINISHED
    with pytest.raises(InvariantBroken, match="is queued and waits"):
        check(state)


def test_row_that_is_alone_may_exceed_the_token_budget() -> None:
    driver = CoreDriver(msgspec.structs.replace(LIMITS, token_budget=50))
    driver.start()
    driver.serve(100)
    assert driver.state.admitted == [1]
    check(driver.state)
