"""Which tokens are fed next, and which rows decode together."""

import msgspec

from journal import events
from scheduler.request import Phase
from scheduler.state import Chunk
from tests.unit.core_driver import LIMITS, CoreDriver, engine_ready, kinds, only


def ready(**changes: int) -> CoreDriver:
    driver = CoreDriver(msgspec.structs.replace(LIMITS, **changes))
    driver.start()
    return driver


def planned(decisions: list[events.Decision]) -> list[tuple[int, int, int]]:
    """Number, start and length of the chunk that these decisions plan."""
    return [(d.number, d.start, d.length) for d in only(decisions, events.PrefillChunkPlanned)]


def batches(decisions: list[events.Decision]) -> list[tuple[int, ...]]:
    return [d.numbers for d in only(decisions, events.BatchChanged)]


def test_prompt_is_fed_in_chunks_up_to_its_last_token() -> None:
    driver = ready(chunk_tokens=100)
    assert planned(driver.serve(251)) == [(1, 0, 100)]
    assert driver.state.chunk == Chunk(number=1, chunk=1, start=0, length=100)
    second = driver.step(driver.chunk_done())
    assert kinds(second) == ["prefill_chunk_committed", "prefill_chunk_planned"]
    assert planned(second) == [(1, 100, 100)]
    assert driver.request("a").num_cached_tokens == 100
    assert driver.request("a").num_prefill_tokens == 150
    assert planned(driver.step(driver.chunk_done())) == [(1, 200, 50)]
    last = driver.step(driver.chunk_done())
    assert kinds(last) == ["prefill_chunk_committed", "batch_changed"]
    assert last[1] == events.BatchChanged(batch=1, numbers=(1,), joined=(1,), left=())
    request = driver.request("a")
    assert (request.phase, request.num_cached_tokens, request.joined_batch) == (
        Phase.DECODING,
        250,
        1,
    )
    assert driver.state.chunk is None
    assert [
        d.chunk for d in only([r.event for r in driver.records], events.PrefillChunkPlanned)
    ] == [1, 2, 3]


def test_prompt_of_one_token_decodes_at_once() -> None:
    driver = ready()
    decisions = driver.serve(1)
    assert kinds(decisions) == ["request_queued", "request_admitted", "batch_changed"]
    assert driver.request("a").phase is Phase.DECODING
    assert driver.state.batch_rows == [1]


def test_prompt_with_least_left_to_prefill_comes_first() -> None:
    driver = ready(chunk_tokens=10, chunk_tokens_beside_rows=10)
    turns = planned(driver.serve(51, 21))
    turns += planned(driver.step(driver.receive(31, name="c"), driver.chunk_done()))
    assert planned(driver.step(driver.chunk_done())) == [], "b decodes, and a step of it is due"
    turns += planned(driver.step(driver.decoded()))
    assert turns == [(2, 0, 10), (2, 10, 10), (3, 0, 10)]


def test_prompts_of_one_length_go_in_the_order_of_arrival() -> None:
    driver = ready(chunk_tokens=10)
    turns = planned(driver.serve(21, 21))
    turns += planned(driver.step(driver.chunk_done()))
    assert turns == [(1, 0, 10), (1, 10, 10)]


def test_long_prompt_is_not_passed_for_ever() -> None:
    driver = ready(chunk_tokens=100)
    driver.serve(301, 101)
    fed = 0
    while driver.state.chunk == Chunk(number=fed + 2, chunk=fed + 1, start=0, length=100):
        fed += 1
        name = driver.state.requests[fed + 1].request_id
        gone = events.CancelRequested(request_id=name)
        driver.step(driver.chunk_done(), gone, driver.receive(101, name=f"short{fed}"))
    # Each chunk of others is worth a quarter of one: 300 - 8 * 25 = 100, and it came first.
    assert fed == 8
    assert driver.state.chunk == Chunk(number=1, chunk=9, start=0, length=100)


def test_chunk_beside_a_running_row_is_small() -> None:
    driver = ready(chunk_tokens=100, chunk_tokens_beside_rows=8)
    driver.serve(1)
    driver.step(driver.receive(300, name="b"))
    assert planned(driver.step(driver.decoded())) == [(2, 0, 8)]


def test_without_a_bound_chunks_beside_a_row_are_as_set() -> None:
    driver = ready(chunk_tokens_beside_rows=64, gap_ns=0)
    driver.serve(1, 5_000)
    assert planned(driver.step(driver.decoded())) == [(2, 0, 64)]


def test_rest_of_a_prompt_is_fed_in_even_parts_beside_a_row() -> None:
    driver = ready(chunk_tokens_beside_rows=8, gap_ns=0)
    driver.serve(1, 22)
    chunks = planned(driver.step(driver.decoded()))
    for _ in range(2):
        driver.step(driver.chunk_done())
        chunks += planned(driver.step(driver.decoded()))
    assert chunks == [(2, 0, 7), (2, 7, 7), (2, 14, 7)]


def test_turns_follow_tokens_and_not_chunks() -> None:
    driver = ready(chunk_tokens=2_048, chunk_tokens_beside_rows=8, gap_ns=0)
    driver.serve(1, 41, 201)
    turns = planned(driver.step(driver.decoded()))
    for _ in range(5):
        driver.step(driver.chunk_done())
        turns += planned(driver.step(driver.decoded()))
    assert [number for number, _, _ in turns] == [2, 2, 2, 2, 2, 3]


def test_chunk_is_large_again_when_the_running_row_has_ended() -> None:
    driver = ready(chunk_tokens=100, chunk_tokens_beside_rows=8)
    driver.serve(1, 300)
    assert planned(driver.step(driver.decoded(a="stop"))) == [(2, 0, 100)]


def test_chunk_is_small_when_a_row_joins_in_the_same_step() -> None:
    driver = ready(chunk_tokens=100, chunk_tokens_beside_rows=8)
    driver.serve(5, 300)
    assert planned(driver.step(driver.chunk_done())) == []
    assert planned(driver.step(driver.decoded())) == [(2, 0, 8)]


def test_rows_that_decode_get_a_step_between_two_chunks() -> None:
    driver = ready(chunk_tokens_beside_rows=8)
    driver.serve(1, 300)
    assert planned(driver.step(driver.decoded())) == [(2, 0, 8)]
    assert planned(driver.step(driver.chunk_done())) == []
    assert planned(driver.step(events.ClientGone(request_id="nobody"))) == []
    assert planned(driver.step(driver.decoded())) == [(2, 8, 8)]


def test_step_that_came_while_the_chunk_was_fed_is_enough() -> None:
    driver = ready(chunk_tokens_beside_rows=8)
    driver.serve(1, 300)
    driver.step(driver.decoded())
    assert planned(driver.step(driver.decoded())) == []
    assert planned(driver.step(driver.chunk_done())) == [(2, 8, 8)]


def test_one_chunk_is_planned_at_a_time() -> None:
    driver = ready(chunk_tokens=10)
    driver.serve(31, 31)
    assert planned(driver.step(driver.receive(31))) == []


def test_nothing_is_planned_when_all_rows_decode() -> None:
    driver = ready()
    driver.serve(1, 1)
    assert driver.step(driver.decoded()) == []


def test_rows_join_and_leave_in_one_change() -> None:
    driver = ready()
    driver.serve(1, 1, 20)
    driver.step(driver.decoded())
    decisions = driver.step(driver.decoded(a="stop"), driver.chunk_done(), driver.receive(1))
    assert only(decisions, events.BatchChanged) == [
        events.BatchChanged(batch=2, numbers=(2, 3, 4), joined=(3, 4), left=(1,))
    ]
    assert [driver.state.requests[n].joined_batch for n in (2, 3, 4)] == [1, 2, 2]
    assert driver.state.batch == 2


def test_batch_keeps_its_order_and_newcomers_come_last() -> None:
    driver = ready(chunk_tokens=100)
    driver.serve(50, 1)
    assert driver.state.batch_rows == [2]
    driver.step(driver.decoded())
    assert batches(driver.step(driver.chunk_done())) == [(2, 1)]


def test_joined_rows_are_in_the_order_of_arrival() -> None:
    driver = ready()
    driver.serve(5)
    assert batches(driver.step(driver.receive(1, name="b"), driver.chunk_done())) == [(1, 2)]


def test_batch_does_not_change_without_need() -> None:
    driver = ready(max_rows=1)
    driver.serve(1)
    assert driver.step(driver.decoded(), driver.receive(1)) == [
        events.RequestQueued(request_id="req_2", max_tokens=10, num_waiting=0)
    ]


def test_last_row_that_leaves_empties_the_batch() -> None:
    driver = ready()
    driver.serve(1)
    decisions = driver.step(driver.decoded(a="length"))
    assert only(decisions, events.BatchChanged) == [
        events.BatchChanged(batch=2, numbers=(), joined=(), left=(1,))
    ]
    assert driver.state.batch_rows == []


def test_row_that_prefills_leaves_the_batch_as_it_is() -> None:
    driver = ready(chunk_tokens_beside_rows=8)
    driver.serve(1, 300)
    driver.step(driver.decoded())
    decisions = driver.step(events.CancelRequested(request_id="b"))
    assert kinds(decisions) == ["request_cancelled"]
    assert driver.state.batch_rows == [1]


def test_chunk_of_the_next_prompt_is_planned_when_the_planned_one_is_cancelled() -> None:
    driver = ready(chunk_tokens=10)
    driver.serve(31, 31)
    decisions = driver.step(events.CancelRequested(request_id="a"))
    assert planned(decisions) == [(2, 0, 10)]


def test_stopping_server_goes_on_with_what_it_has() -> None:
    driver = ready(chunk_tokens=10)
    driver.serve(31)
    driver.step(events.ServerStopping(reason="SIGTERM"))
    assert planned(driver.step(driver.chunk_done())) == [(1, 10, 10)]


def test_known_tokens_after_a_restart_are_fed_like_a_prompt() -> None:
    driver = ready(chunk_tokens=100)
    driver.serve(1)
    driver.step(driver.decoded())
    driver.step(driver.decoded())
    driver.begin_run()
    decisions = driver.step(engine_ready())
    assert only(decisions, events.RequestAdmitted)[0].num_known_tokens == 3
    assert planned(decisions) == [(1, 0, 2)]
    driver.prefill()
    assert driver.request("a").num_cached_tokens == 2
    assert driver.state.batch_rows == [1]


def test_result_of_another_length_does_not_count() -> None:
    driver = ready(chunk_tokens=10)
    driver.serve(31)
    done = driver.chunk_done()
    assert driver.step(msgspec.structs.replace(done, length=9)) == []
    assert driver.step(msgspec.structs.replace(done, start=1)) == []
    assert kinds(driver.step(done))[0] == "prefill_chunk_committed"
