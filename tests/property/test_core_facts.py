"""Facts that make no sense: results for rows that never were, twice, too late, of another batch.

The engine, the sensor and the disk do not lie, but their results cross each other, and a core that
falls over one would take every request with it.
"""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from journal import events
from journal.events import AnyEvent, Record, RowEnd
from scheduler.evolve import fold
from scheduler.memory import max_context_tokens, row_bytes
from scheduler.policy import decide
from scheduler.state import SchedulerState
from tests.property.client_world import looked_after
from tests.property.fake_world import HEAVY_MODEL, LIMITS, MODEL, NARROW, OTHER_MODEL
from tests.unit.core_driver import CoreDriver, engine_ready, server_started

NUMBERS = st.integers(0, 9)
NAMES = NUMBERS.map(lambda number: f"r{number}")
ENDS = st.builds(RowEnd, number=NUMBERS, reason=st.sampled_from(["stop", "end_of_turn", "length"]))
ROWS = st.lists(st.tuples(NUMBERS, st.integers(0, 2)), max_size=5)


def tokens_decoded(
    batch: int, rows: list[tuple[int, int]], ended: list[RowEnd]
) -> events.TokensDecoded:
    return events.TokensDecoded(
        batch=batch,
        numbers=tuple(number for number, _ in rows),
        counts=tuple(count for _, count in rows),
        ended=tuple(ended),
        duration_ns=1,
    )


RESULTS = st.one_of(
    st.builds(tokens_decoded, st.integers(0, 9), ROWS, st.lists(ENDS, max_size=3)),
    st.builds(
        events.PrefillChunkDone,
        request_id=NAMES,
        chunk=st.integers(0, 6),
        start=st.sampled_from([0, 16, 64]),
        length=st.sampled_from([1, 16, 64]),
        duration_ns=st.just(1),
        peak_bytes=st.just(1),
        active_bytes=st.just(1),
    ),
    st.builds(events.KvFreed, request_id=NAMES, number=NUMBERS, freed_bytes=st.just(1)),
    st.builds(
        events.EngineFailed,
        request_id=NAMES,
        number=NUMBERS,
        during=st.sampled_from(["start", "prefill", "decode"]),
        error=st.just("boom"),
    ),
    st.builds(events.ClientGone, request_id=NAMES),
    st.builds(events.ClientAttached, request_id=NAMES),
    st.builds(events.CancelRequested, request_id=NAMES),
    st.builds(events.HoldRequested, request_id=NAMES),
    st.builds(events.ReleaseRequested, request_id=NAMES),
    st.just(events.DrainEnded()),
    st.just(events.ServerStopping(reason="SIGTERM")),
    st.sampled_from(
        [engine_ready(MODEL), engine_ready(HEAVY_MODEL, one_row_only=True)],
    ),
)
STARTS = st.sampled_from(
    [
        server_started(LIMITS, MODEL),
        server_started(NARROW, OTHER_MODEL),
        server_started(looked_after(LIMITS), MODEL),
        server_started(looked_after(NARROW, on_restart="hold"), MODEL),
        server_started(looked_after(LIMITS, on_restart="cancel", grace_ns=0), MODEL),
    ]
)
"""The start of a run opens its step: nothing of the run before is left to be answered."""
ARRIVALS = st.integers(1, 100)
"""An arrival is given by the size of its prompt: its number and id are what the loop gives it. What
it asks is one of three things, and some have one of two keys.
"""


FACTS = st.lists(st.one_of(ARRIVALS, ARRIVALS, RESULTS, RESULTS), max_size=6)
STEPS = st.one_of(FACTS, FACTS, FACTS, st.tuples(STARTS, FACTS).map(lambda s: [s[0], *s[1]]))


@settings(max_examples=200, derandomize=True, database=None)
@given(st.lists(STEPS, max_size=20))
def test_no_fact_makes_the_core_fall_over(steps: list[list[int | AnyEvent]]) -> None:
    driver, state = CoreDriver(), SchedulerState()
    limits = looked_after(LIMITS)
    records = driver.place("fact", [server_started(limits, MODEL), engine_ready(MODEL)])
    fold(state, records)
    for step in steps:
        for given_fact in step:
            fact = arrival(driver, state, given_fact) if isinstance(given_fact, int) else given_fact
            fold(state, [Record(state.seq + 1, 1, state.step, "fact", 1_000, fact)])
        for decision in decide(state):
            fold(state, [Record(state.seq + 1, 1, state.step, "decision", 1_000, decision)])
        assert [*state.arrivals, *state.endings, *state.cancellations, *state.failures] == []
        assert [*state.holds, *state.orphans] == []


def arrival(driver: CoreDriver, state: SchedulerState, size: int) -> events.RequestReceived:
    number = state.next_number
    received = driver.receive(size, name=f"r{number}")
    key = f"key {size % 2}" if size % 7 == 0 else ""
    content = f"content {size % 3}"
    return msgspec.structs.replace(received, number=number, content_digest=content, key_digest=key)


@settings(max_examples=200, derandomize=True, database=None)
@given(
    st.integers(0, 5_000),
    st.integers(1, 600),
    st.integers(1, 64),
    st.lists(st.tuples(st.integers(0, 30), st.integers(1, 400)), max_size=2),
    st.integers(0, 3_000),
)
def test_largest_context_is_exactly_the_largest_that_fits(
    room: int, context: int, step: int, windows: list[tuple[int, int]], state_bytes: int
) -> None:
    model = msgspec.structs.replace(
        MODEL,
        context_tokens=context,
        kv_step_tokens=step,
        state_bytes=state_bytes,
        window_layers=tuple(
            events.WindowLayers(bytes_per_token=each, window_tokens=tokens)
            for each, tokens in windows
        ),
    )
    limits = msgspec.structs.replace(LIMITS, ceiling_bytes=1_000 + 64 + room)
    fits = max_context_tokens(model, limits)
    assert 0 <= fits <= context
    assert fits == 0 or row_bytes(model, fits) <= room
    assert fits == context or row_bytes(model, fits + 1) > room
