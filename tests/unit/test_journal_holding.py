"""The tables of pauses, pins and readings say how requests were held, and can be rebuilt."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from journal.events import (
    KvFreed,
    PrefillChunkCommitted,
    RequestFinished,
    RequestRetried,
)
from journal.rows import (
    PauseRow,
)
from tests.journal_steps import (
    KV_DOMAIN,
    SECOND_NS,
    admitted,
    request_id,
    run_sql,
)
from tests.pause_steps import (
    NUM_CACHED,
    PROMPT,
    TAIL_BYTES,
    A,
    B,
    Held,
    admitted_from,
    at,
    cancelled,
    chain_restored,
    chain_saved,
    chain_unpinned,
    decoding,
    hold,
    join_again,
    kv_dropped,
    pause_of,
    pause_started,
    phase_of,
    request_paused,
    request_resumed,
    resume_started,
)

NAME = request_id(1)


@pytest.fixture
def held(tmp_path: Path) -> Iterator[Held]:
    held = decoding(tmp_path)
    yield held
    held.close()


def test_a_pause_is_followed_from_its_decision_to_the_next_token(held: Held) -> None:
    hold(held)
    assert held.parts(1) == (0, 0, 39)
    held("resume", 1, 16, 24, 0)
    assert phase_of(held) == "prefilling"
    assert pause_of(held) == PauseRow(
        pause_seq=pause_of(held).pause_seq,
        number=1,
        request_id=NAME,
        run_id=1,
        reason="high",
        from_phase="decoding",
        outcome="resumed",
        started_ns=at(8),
        saved_ns=at(10),
        paused_ns=at(10),
        freed_ns=at(11),
        resume_started_ns=at(12),
        resumed_ns=at(13),
        rank=1,
        num_candidates=3,
        frees_bytes=400,
        unsaved_bytes=90,
        usage_bytes=950,
        ceiling_bytes=1000,
        freed_bytes=390,
        domain=KV_DOMAIN,
        tail_bytes=TAIL_BYTES,
        num_blocks=2,
        num_cached_tokens=NUM_CACHED,
        num_output_tokens=2,
        read_bytes=280,
        num_restored_tokens=40,
        num_lost_tokens=0,
        resumed_run_id=1,
    )
    row, minute = held.requests()[0], held.minute()
    assert (row.num_pauses, row.held_ns) == (1, 3 * SECOND_NS)
    assert (minute.num_pauses, minute.num_resumes, minute.held_ns) == (1, 1, 3 * SECOND_NS)
    assert (row.num_admissions, row.num_recoveries, held.parts(1)) == (1, 0, (0, 0, 39))


def test_what_is_pinned_is_there_until_the_request_goes_on(held: Held) -> None:
    hold(held)
    (pin,) = held.pins()
    assert (pin.number, pin.request_id, pin.domain, pin.pinned_ns) == (1, NAME, KV_DOMAIN, at(10))
    assert (pin.num_blocks, pin.last_hash, pin.num_tokens) == (2, B, NUM_CACHED)
    assert pin.tail_bytes == TAIL_BYTES
    held("decide", resume_started(1, NUM_CACHED, 2))
    assert [pin.number for pin in held.pins()] == [1]
    uses = run_sql(held.file.journal, "SELECT last_use_ns FROM block").fetchall()
    assert uses == [(at(12),), (at(12),)], "going on is a use of the chain"
    went_on = (request_resumed(1, NUM_CACHED, 0), chain_unpinned(1))
    held("commit", [chain_restored(1, 0, NUM_CACHED)], went_on)
    assert held.pins() == []


def test_a_chain_of_which_nothing_is_left_is_unpinned_without_an_event(held: Held) -> None:
    hold(held)
    held("decide", resume_started(1, 0), request_resumed(1, 0, NUM_CACHED))
    assert (held.pins(), pause_of(held).num_lost_tokens) == ([], NUM_CACHED)
    assert held.parts(1) == (0, 0, 0)


def test_a_prompt_adds_up_when_part_of_the_chain_is_lost(held: Held) -> None:
    """The request itself had 16 tokens from disk; it goes on with 20, and feeds the rest again."""
    held("receive", 2, PROMPT)
    held("decide", admitted_from(2, 16))
    held("know", chain_restored(2, 0, 16))
    held("decide", PrefillChunkCommitted(request_id=request_id(2), num_cached_tokens=30))
    assert held.parts(2) == (0, 16, 14)
    held("decide", pause_started(2))
    held("end_pause", 2, [A])
    held("decide", resume_started(2, 20, 1))
    went_on = (request_resumed(2, 20, 10), chain_unpinned(2))
    held("commit", [chain_restored(2, 8, 12)], went_on)
    assert held.parts(2) == (0, 16, 4)
    held("decide", PrefillChunkCommitted(request_id=request_id(2), num_cached_tokens=38))
    join_again(held, 2)
    held("late_token", 2, 5)
    assert held.parts(2) == (0, 16, 23)
    pause = pause_of(held)
    assert (pause.from_phase, pause.num_restored_tokens, pause.num_lost_tokens) == (
        "prefilling",
        20,
        10,
    )


def test_a_request_that_keeps_its_tokens_only_begins_anew(held: Held) -> None:
    held("begin_pause", 1)
    held("decide", kv_dropped(1), request_paused(1))
    assert (pause_of(held).dropped, pause_of(held).tail_bytes, held.pins()) == (
        "disk_full",
        None,
        [],
    )
    held("know", chain_saved(1))
    assert pause_of(held).saved_ns is None, "what is saved too late is of no use"
    held("decide", resume_started(1, 32, 2))
    assert held.parts(1) == (0, 0, 0)
    went_on = (request_resumed(1, 32, 8), chain_unpinned(1))
    held("commit", [chain_restored(1, 0, 32)], went_on)
    assert held.parts(1) == (0, 32, 0), "what another request has saved is found, not kept"
    late = chain_restored(1, 4, 4)
    held("know", late)
    assert held.parts(1) == (0, 32, 0), "a row is filled once"


def test_less_may_be_restored_of_what_came_from_memory_and_disk(held: Held) -> None:
    held("receive", 2, PROMPT)
    held("decide", admitted_from(2, 32))
    held("know", chain_restored(2, 16, 16))
    held("know", chain_restored(2, 0, 32))
    assert held.parts(2) == (16, 16, 0), "a row is filled once"
    for num_left, parts in ((20, (16, 4, 0)), (12, (12, 0, 0))):
        held("decide", pause_started(2, "operator"))
        held("end_pause", 2, [A, B])
        held("resume", 2, 0, num_left, 12)
        assert held.parts(2) == parts


def test_a_row_that_is_dropped_while_it_is_filled_got_nothing(held: Held) -> None:
    held("receive", 2, PROMPT)
    held("decide", admitted_from(2, 32))
    held("decide", pause_started(2))
    held("decide", kv_dropped(2), request_paused(2))
    held("know", chain_restored(2, 0, 32))
    assert held.parts(2) == (0, 0, 0)


def test_one_that_waits_is_held_in_one_step(held: Held) -> None:
    held("receive", 2, PROMPT)
    held("decide", request_paused(2, "operator", had_row=False))
    pause = pause_of(held)
    assert (pause.from_phase, pause.reason, pause.rank) == ("waiting", "operator", None)
    assert pause.started_ns == pause.paused_ns == at(9)
    assert (phase_of(held, 2), held.requests()[1].num_pauses) == ("paused", 1)
    held("decide", resume_started(2, 0), request_resumed(2, 0, 0))
    assert (pause_of(held).outcome, held.requests()[1].held_ns) == ("resumed", SECOND_NS)


def test_one_that_is_going_on_may_be_held_again(held: Held) -> None:
    hold(held)
    held("decide", resume_started(1, NUM_CACHED, 2))
    assert phase_of(held) == "resuming"
    held("decide", request_paused(1, "operator"))
    held(
        "know", chain_restored(1, 0, NUM_CACHED), KvFreed(request_id=NAME, number=1, freed_bytes=5)
    )
    assert phase_of(held) == "paused"
    pause = pause_of(held)
    assert (pause.outcome, pause.resume_started_ns, pause.reason) == ("open", None, "high")
    assert (pause.paused_ns, pause.freed_bytes, pause.read_bytes) == (at(10), 390, None)
    assert (held.requests()[0].num_pauses, held.minute().num_pauses) == (1, 1)
    assert held.pins() != []


def test_the_end_of_a_held_request_ends_its_pause(held: Held) -> None:
    hold(held)
    held("decide", chain_unpinned(1, "ended"), cancelled(1))
    pause, row = pause_of(held), held.requests()[0]
    assert (pause.outcome, pause.ended_ns, pause.resumed_ns) == ("ended", at(12), None)
    assert (row.phase, row.held_ns, held.pins()) == ("cancelled", 2 * SECOND_NS, [])
    assert held.minute().held_ns == 2 * SECOND_NS


def test_a_token_under_way_may_end_what_was_to_be_held(held: Held) -> None:
    held("begin_pause", 1)
    finished = RequestFinished(
        request_id=NAME, number=1, reason="stop", num_prompt_tokens=39, num_output_tokens=1
    )
    held("decide", finished)
    held("know", chain_saved(1), KvFreed(request_id=NAME, number=1, freed_bytes=390))
    pause = pause_of(held)
    assert (pause.outcome, pause.paused_ns, pause.ended_ns) == ("ended", None, at(9))
    assert (pause.saved_ns, pause.freed_ns) == (None, None), "facts about what has ended are late"
    assert (held.requests()[0].num_pauses, held.requests()[0].held_ns) == (0, 0)


def test_a_row_that_fails_while_it_is_held_or_filled_waits(held: Held) -> None:
    held("begin_pause", 1)
    held("decide", RequestRetried(request_id=NAME, number=1, retry=1))
    assert (pause_of(held).outcome, phase_of(held)) == ("given_up", "waiting")
    held("decide", admitted(1))
    join_again(held)
    held("begin_pause", 1)
    held("end_pause", 1, [A, B])
    held("decide", resume_started(1, NUM_CACHED, 2))
    retried = RequestRetried(request_id=NAME, number=1, retry=2)
    held("decide", chain_unpinned(1, "ended"), retried)
    first, second = held.pauses()
    assert (first.paused_ns, second.outcome, phase_of(held)) == (None, "given_up", "waiting")
    assert second.ended_ns == at(16)
    assert (held.pins(), held.requests()[0].num_pauses) == ([], 1)
    held("know", chain_restored(1, 0, NUM_CACHED))
    assert held.parts(1) == (0, 0, 0), "what a dropped row was filled with is late"
