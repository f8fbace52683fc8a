"""What is in the picture of a journal is what is in the journal."""

import json
from itertools import pairwise
from pathlib import Path

import msgspec
import pytest

from journal import audit, events
from journal.events import KINDS, Record
from journal.reader import JournalReader
from scheduler.evolve import evolve
from scheduler.state import STATE_VERSION, SchedulerState
from tests.integration.timeline_journals import ALL, drawn, kept_story, kind_name, story
from tools.timeline_file import data_of
from tools.timeline_kinds import GROUPS, KINDS_OF, UNDRAWN
from tools.timeline_parts import PHASES, Entry, Lane
from tools.timeline_window import Window

STORIES = ("every_rung", "crash_while_paused", "disk_full_while_pausing", "lost_clients")


def phase_at(lane: Lane, at_ns: int) -> str | None:
    """Where the lane says that its request was, after all that happened at this time."""
    if lane.end_ns is not None and at_ns >= lane.end_ns:
        return None
    begun = [stretch for stretch in lane.stretches if stretch.begin_ns <= at_ns]
    return PHASES[begun[-1].phase] if begun else None


def was_alone(lane: Lane, at_ns: int) -> bool:
    """Whether the lane says that its request had no client, after all that happened by then."""
    return any(
        begin is not None and begin <= at_ns and (end is None or at_ns < end)
        for begin, end in lane.alone
    )


def test_every_kind_is_in_one_group() -> None:
    grouped = [kind for kinds in KINDS_OF.values() for kind in kinds]
    assert sorted(grouped) == sorted(KINDS)
    assert list(KINDS_OF) == list(GROUPS)
    assert set(UNDRAWN) < set(GROUPS)


@pytest.mark.parametrize("name", STORIES)
def test_lanes_are_where_the_state_has_them(name: str) -> None:
    records = story(name)
    picture = drawn(records)
    lanes = {lane.request_id: lane for lane in picture.lanes}
    state, base_ns = SchedulerState(), records[0].at_ns
    for record, after in zip(records, [*records[1:], None], strict=True):
        evolve(state, record)
        if after is not None and after.at_ns == record.at_ns:
            continue  # only what holds after all of a moment can be seen
        for request_id, lane in lanes.items():
            request = state.find(request_id)
            seen = phase_at(lane, record.at_ns - base_ns)
            assert seen == (None if request is None else request.phase.value), record
            is_alone = request is not None and request.orphaned_by is not None
            assert was_alone(lane, record.at_ns - base_ns) == is_alone, record
    received = [r.event.request_id for r in records if isinstance(r.event, events.RequestReceived)]
    assert list(lanes) == received
    assert all(lane.outcome for lane in picture.lanes)


@pytest.mark.parametrize("name", STORIES)
def test_every_event_is_there_with_its_numbers(name: str) -> None:
    records = story(name)
    picture = drawn(records)
    by_seq = {record.seq: record for record in records}
    told = [entry.seq for entry in picture.entries]
    assert told == sorted(told)
    steps = sum(
        entry.body["num_steps"] if kind_name(picture, entry) == "tokens_decoded" else 1
        for entry in picture.entries
    )
    assert steps == len(records) == picture.num_events
    for entry in picture.entries:
        record = by_seq[entry.seq]
        assert picture.kinds[entry.kind].source == record.source
        assert entry.at_ns == record.at_ns - records[0].at_ns
        assert entry.step == record.step
        if not isinstance(record.event, events.TokensDecoded):
            expect_numbers(entry, record)


def expect_numbers(entry: Entry, record: Record) -> None:
    """Each number of the event, exactly."""
    body = msgspec.to_builtins(record.event)
    for name, value in body.items():
        if isinstance(value, int) and name != "number":
            assert entry.body[name] in (value, str(value)), (record.seq, name)


def test_decode_steps_of_one_batch_are_one_entry_with_all_tokens() -> None:
    records = story("every_rung")
    picture = drawn(records)
    tokens: dict[str, int] = {}
    for entry in picture.entries:
        if kind_name(picture, entry) == "tokens_decoded":
            for number, count in entry.body["tokens"].items():
                tokens[number] = tokens.get(number, 0) + count
    finished = [r.event for r in records if isinstance(r.event, events.RequestFinished)]
    assert tokens == {str(event.number): event.num_output_tokens for event in finished}
    decoded = [e for e in picture.entries if kind_name(picture, e) == "tokens_decoded"]
    assert len(decoded) < sum(isinstance(r.event, events.TokensDecoded) for r in records) / 4


def test_holds_say_who_why_and_with_which_numbers() -> None:
    records = story("every_rung")
    picture = drawn(records)
    started = [r for r in records if isinstance(r.event, events.PauseStarted)]
    assert len(picture.holds) == len(started) == 2
    for hold, record in zip(picture.holds, started, strict=True):
        event = record.event
        assert isinstance(event, events.PauseStarted)
        assert picture.lanes[hold.lane].request_id == event.request_id
        assert (hold.seq, hold.begin_ns) == (record.seq, record.at_ns - records[0].at_ns)
        assert (hold.reason, hold.rank, hold.frees_bytes) == (
            event.reason,
            event.rank,
            event.frees_bytes,
        )
        assert (hold.usage_bytes, hold.ceiling_bytes) == (event.usage_bytes, event.ceiling_bytes)
        resumed = [r for r in records if isinstance(r.event, events.RequestResumed)]
        ends = {r.event.request_id: r.at_ns - records[0].at_ns for r in resumed}  # pyright: ignore[reportAttributeAccessIssue]
        assert hold.end_ns == ends[event.request_id]
        assert hold.became in ("prefilling", "decoding")


@pytest.mark.parametrize("name", STORIES)
def test_holds_are_as_long_as_the_view_has_them(name: str, tmp_path: Path) -> None:
    picture = drawn(story(name))
    with JournalReader.open(kept_story(name, tmp_path)) as reader:
        pauses = list(audit.pauses(reader))
    assert pauses
    assert [
        (hold.seq, ((hold.end_ns or 0) - (hold.paused_ns or 0)) // 1_000_000)
        for hold in picture.holds
    ] == [(pause.pause_seq, pause.held_ms) for pause in pauses]


def test_memory_is_what_the_scheduler_compared() -> None:
    records = story("every_rung")
    picture = drawn(records)
    state = SchedulerState()
    expected: list[tuple[int, int, str]] = []
    for record in records:
        evolve(state, record)
        if isinstance(record.event, events.MemorySampled):
            expected.append((record.seq, state.memory.usage_bytes, state.memory.level))
    assert [(s.seq, s.usage_bytes, s.level) for s in picture.samples] == expected
    assert {s.level for s in picture.samples} == {"", "high", "emergency"}
    limits = state.limits
    assert limits is not None
    assert limits.memory is not None
    [marks] = picture.marks
    assert marks.ceiling_bytes == limits.ceiling_bytes
    assert marks.high_permille == limits.memory.high_permille


def test_a_death_is_shown_between_two_runs() -> None:
    records = story("crash_while_paused")
    [away] = drawn(records).aways
    starts = [r for r in records if isinstance(r.event, events.ServerStarted)]
    assert away.died
    assert away.end_ns == starts[1].at_ns - records[0].at_ns
    assert away.last_seq == starts[1].seq - 1


def test_a_window_begins_with_who_is_open() -> None:
    records = story("crash_while_paused")
    paused = next(r for r in records if isinstance(r.event, events.RequestPaused))
    window = Window("part", paused.seq + 3, records[-1].seq, 0, 2**63)
    picture = drawn(records, window)
    assert picture.first_seq == paused.seq + 3
    lane = next(lane for lane in picture.lanes if lane.number == 2)
    assert (lane.stretches[0].begin_ns, PHASES[lane.stretches[0].phase]) == (0, "paused")
    [hold] = picture.holds
    assert hold.begin_ns == paused.at_ns - int(picture.base_ns) <= 0
    assert hold.reason == "operator"


def test_a_lost_client_is_shown_and_why_its_request_was_held() -> None:
    picture = drawn(story("lost_clients"))
    lost, ended = picture.lanes
    assert [hold.reason for hold in picture.holds] == ["client_gone", "client_gone"]
    assert [picture.holds[0].became, picture.holds[1].became] == ["prefilling", "cancelled"]
    assert (lost.outcome, ended.outcome) == ("finished", "cancelled")
    [[begin_ns, end_ns]] = lost.alone
    assert begin_ns is not None
    assert end_ns is not None
    assert end_ns - begin_ns == pytest.approx(4_000_000_000, rel=0.05)


def test_a_journal_that_begins_with_a_state_shows_who_was_open() -> None:
    records = story("crash_while_paused")
    paused = next(r for r in records if isinstance(r.event, events.RequestPaused))
    through = next(r for r in records if r.step > paused.step + 1)
    state = SchedulerState()
    rest = [record for record in records if record.step >= through.step]
    for record in records[: through.seq - 1]:
        evolve(state, record)
    carried = events.StateCarried(
        state_version=STATE_VERSION,
        through_seq=through.seq - 1,
        state=msgspec.to_builtins(state, str_keys=True),
    )
    first = msgspec.structs.replace(records[through.seq - 2], event=carried)
    picture = drawn((first, *rest))
    whole = drawn(records)
    assert picture.entries[0].body == {
        "state_version": STATE_VERSION,
        "through_seq": through.seq - 1,
    }
    assert [lane.outcome for lane in picture.lanes] == [lane.outcome for lane in whole.lanes]
    [hold], [other] = picture.holds, whole.holds
    at_ns = [int(p.base_ns) for p in (picture, whole)]
    assert hold.begin_ns + at_ns[0] == paused.at_ns == (other.paused_ns or 0) + at_ns[1]
    assert (hold.end_ns or 0) + at_ns[0] == (other.end_ns or 0) + at_ns[1]


def test_numbers_that_javascript_rounds_are_digits() -> None:
    picture = drawn(story("emergency_alone"))
    started = next(e for e in picture.entries if kind_name(picture, e) == "server_started")
    events_in = json.loads(data_of(picture))["entries"]
    assert "limits" in started.body
    assert max_number(events_in) < 2**53
    nonce = msgspec.structs.replace(
        next(
            e.event for e in story("emergency_alone") if isinstance(e.event, events.ServerStarted)
        ),
        engine_nonce=2**60 + 1,
    )
    first = msgspec.structs.replace(story("emergency_alone")[0], event=nonce)
    assert drawn((first,)).entries[0].body["engine_nonce"] == str(2**60 + 1)


def max_number(value: object) -> int:
    """The largest whole number in JSON."""
    match value:
        case bool():
            return 0
        case int():
            return value
        case list():
            return max(map(max_number, value), default=0)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        case dict():
            return max(map(max_number, value.values()), default=0)  # pyright: ignore[reportUnknownArgumentType, reportUnknownVariableType]
        case _:
            return 0


def test_stretches_are_in_order() -> None:
    for name in STORIES:
        for lane in drawn(story(name)).lanes:
            for before, after in pairwise(lane.stretches):
                assert before.begin_ns <= after.begin_ns
                assert before.phase != after.phase


def test_the_whole_picture_is_all_of_it() -> None:
    picture = drawn(story("crowded_disk"))
    assert picture.what == ALL.what
    assert picture.last_seq == len(story("crowded_disk"))
