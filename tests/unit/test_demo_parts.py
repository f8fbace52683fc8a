"""The demo's parts, without a server: its checks, its screen, its reading of events."""

import io
from dataclasses import replace

import msgspec
import pytest

from journal.audit import Pause
from journal.rows import RequestRow
from tools.demo_checks import (
    AtTheKill,
    Check,
    Output,
    Seen,
    check_all,
    check_chain,
    check_ends,
    check_pauses,
    check_uninterrupted,
)
from tools.demo_client import Answer, read_events, read_lines
from tools.demo_screen import Screen
from tools.demo_table import pause_lines

WORDS = ("One", " two", " three", " four")


def row(phase: str, request_id: str = "req_a", outcome: str | None = None) -> RequestRow:
    """A row of the journal; only what is given counts here."""
    return RequestRow(
        number=1,
        request_id=request_id,
        outcome=outcome,
        client_request_id=None,
        model_fingerprint="",
        route="",
        stream=1,
        phase=phase,
        run_id=1,
        received_seq=1,
        received_ns=0,
        num_prompt_tokens=5,
        asked_max_tokens=4,
    )


def answer(num_tokens: int) -> Answer:
    """An answer as far as so many tokens; each is a word."""
    words = WORDS[:num_tokens]
    return Answer(
        "A",
        "",
        4,
        text="".join(words),
        tokens=[(word, -0.5) for word in words],
        position=num_tokens,
        done=num_tokens == len(WORDS),
    )


SEEN = Seen(
    joined=[answer(4)],
    kill=AtTheKill([answer(2)], [row("decoding")], [Output((1, 2, 3))], []),
    whole=[answer(4)],
    final=[Output((1, 2, 3, 4))],
    uninterrupted=[Output((1, 2, 3, 4))],
)


def failed(seen: Seen, *, comparable: bool = True) -> list[str]:
    """The checks that do not hold, but for the one that wants three requests."""
    found = check_all(seen, "stock", comparable=comparable)
    return [check.text for check in found[1:] if check.holds is False]


def pause(reason: str = "high", outcome: str = "resumed", num_lost_tokens: int = 0) -> Pause:
    """A row of the view, of a request that went on in the second run."""
    return Pause(
        pause_seq=7,
        number=1,
        request_id="req_a",
        run_id=1,
        reason=reason,
        from_phase="decoding",
        outcome=outcome,
        dropped=None,
        started_at="2026-01-02T03:04:05.500Z",
        saved_at=None,
        paused_at=None,
        freed_at=None,
        resume_started_at=None,
        resumed_at=None,
        ended_at=None,
        pausing_ms=20,
        freeing_ms=31,
        held_ms=2_040,
        resuming_ms=None,
        rank=1,
        num_candidates=2,
        usage_bytes=95,
        ceiling_bytes=100,
        frees_bytes=11,
        unsaved_bytes=1_500,
        freed_bytes=11_700_000,
        tail_bytes=0,
        num_blocks=3,
        read_bytes=None,
        num_cached_tokens=250,
        num_output_tokens=34,
        num_restored_tokens=None,
        num_lost_tokens=num_lost_tokens,
        resumed_run_id=2 if outcome == "resumed" else None,
    )


def test_all_hold_when_nothing_was_lost() -> None:
    assert failed(SEEN) == []
    assert len(check_all(SEEN, "stock", comparable=True)) == 6


def test_a_token_that_changed_over_the_kill_is_found() -> None:
    changed = replace(SEEN, final=[Output((1, 9, 3, 4))], uninterrupted=[Output((1, 9, 3, 4))])
    assert failed(changed) == ["A: token 1 was 2 before the kill, and is 9 now"]


def test_a_token_that_was_sent_and_not_recorded_is_found() -> None:
    early = replace(SEEN, kill=replace(SEEN.kill, recorded=[Output((1,))]))
    assert failed(early) == ["A: 2 tokens delivered before the kill, 1 recorded"]


def test_a_delivered_token_that_reads_otherwise_is_found() -> None:
    other = answer(4)
    other.tokens[1] = (" two", -0.25)
    assert failed(replace(SEEN, whole=[other], joined=[other])) == [
        "A: token 1, (' two', -0.5), delivered before the kill reads otherwise now"
    ]


def test_a_repeated_token_is_found() -> None:
    twice = answer(4)
    twice.text = "One two two three four"
    assert failed(replace(SEEN, joined=[twice])) == [
        "A: both pieces together part from the whole answer at character 9"
    ]


def test_another_token_than_in_the_uninterrupted_run_is_found() -> None:
    assert failed(replace(SEEN, uninterrupted=[Output((1, 2, 3))])) == [
        "A: token 3 is 4, uninterrupted missing"
    ]


@pytest.mark.parametrize(
    ("phases", "holds"),
    [
        (("decoding", "paused", "waiting"), True),
        (("decoding", "decoding", "prefilling"), False),
        (("paused", "waiting", "resuming"), False),
    ],
)
def test_the_kill_must_find_one_held_and_one_decoding(phases: tuple[str, ...], holds: bool) -> None:
    rows = [row(phase) for phase in phases]
    [check, *_] = check_all(
        replace(SEEN, kill=replace(SEEN.kill, rows=rows)), "stock", comparable=True
    )
    assert check.holds is holds


@pytest.mark.parametrize(
    ("reason", "why"), [("operator", "by hand"), ("high", "because memory was over its high mark")]
)
def test_it_is_said_whether_memory_or_a_hand_held_it(reason: str, why: str) -> None:
    rows = [row("paused"), row("decoding", "req_b")]
    pauses = [pause("no_room"), pause(reason, outcome="open")]
    kill = replace(SEEN.kill, rows=rows, pauses=pauses)
    [check, *_] = check_all(replace(SEEN, kill=kill), "stock", comparable=True)
    assert check.text.endswith(f"; held {why}")


def test_tokens_of_two_lives_of_the_fake_model_are_not_compared() -> None:
    """Equal tokens would mean nothing: each life of its engine has tokens of its own."""
    other_life = replace(SEEN, uninterrupted=[Output((7, 8, 9, 5))])
    assert failed(other_life)
    assert failed(other_life, comparable=False) == []
    last = check_all(other_life, "none", comparable=False)[-1]
    assert last.holds is None
    assert last.line().startswith("-       A: not comparable")


def test_a_pause_that_lost_tokens_or_is_not_over_is_found() -> None:
    assert check_pauses("A", [pause()]) == Check(
        True, "A: held 1 x, went on 1 x, 1 of them after the kill; 0 tokens lost"
    )
    assert check_pauses("A", [pause(outcome="given_up")]).holds
    assert not check_pauses("A", [pause(num_lost_tokens=4)]).holds
    assert not check_pauses("A", [pause(), pause(outcome="open")]).holds


def test_an_abort_is_found() -> None:
    rows = [row(outcome, outcome=outcome) for outcome in ("finished", "aborted")]
    assert check_ends("A", rows[:1]).holds
    assert not check_ends("AB", rows).holds


@pytest.mark.parametrize(("num_restored", "num_fed", "holds"), [(32, 7, True), (0, 39, False)])
def test_a_request_must_go_on_from_saved_kv(num_restored: int, num_fed: int, holds: bool) -> None:
    assert check_chain("A", 40, num_restored, num_fed).holds is holds
    assert not check_chain("A", 40, num_restored, num_fed + 1).holds


def test_each_pause_is_shown_with_its_bytes_and_times() -> None:
    start_ns = 1_767_323_042_000_000_000  # 3.5 s before the pause
    other = msgspec.structs.replace(pause("operator", outcome="ended"), request_id="req_z")
    head, line = pause_lines({"req_a": "A"}, [pause(), other], start_ns)
    assert head.split()[:3] == ["held", "because", "in"]
    assert line.split("  ")[0] == "A"
    assert "3.5 s" in line
    assert "11.7MB" in line
    assert "1.5KB" in line
    assert "31 ms" in line
    assert "2.0 s" in line
    assert line.endswith("0  resumed, after the kill")


@pytest.mark.parametrize(
    ("gap", "ties", "holds"), [(0.0005, True, True), (0.0005, False, False), (0.002, True, False)]
)
def test_a_first_difference_may_be_a_near_tie_only(gap: float, ties: bool, holds: bool) -> None:
    top = {2: -1.0, 5: -1.0 - gap}
    final = Output((1, 2, 3), [{1: 0.0}, top, {3: 0.0}])
    expected = Output((1, 5, 6), [{1: 0.0}, top, {6: 0.0}])
    check = check_uninterrupted("A", final, expected, ties=ties)
    assert check.holds is holds
    assert "token 1 is 2, uninterrupted 5, with log-probabilities" in check.text
    assert ("a near-tie" in check.text) is (gap <= 0.001)


def test_a_check_that_fails_says_so() -> None:
    assert Check(False, "A: gone").line() == "FAILED  A: gone"


def test_events_are_read_with_their_ids_and_a_cut_one_is_none() -> None:
    lines = ["id: 3", "data: {}", "", ": heartbeat", "", "data: a", "data: b", "", "data: cut"]
    assert list(read_events(lines)) == [("3", "{}"), (None, "a\nb")]


def test_only_a_line_feed_ends_a_line() -> None:
    chunks = [b"one\xc2", b"\x85 and \xe2\x80\xa8 on\ntw", b"o\n\nthree"]
    assert list(read_lines(chunks)) == ["one\x85 and \u2028 on", "two", ""]


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_is_painted_over_and_a_pipe_is_not() -> None:
    first, second = answer(1), answer(2)
    terminal, pipe = Terminal(), io.StringIO()
    for stdout in (terminal, pipe):
        screen = Screen(stdout)
        screen.show([first])
        screen.show([second])
        screen.rest([second])
    assert terminal.getvalue() == (
        "  A   1 tokens | One\n\x1b[1A\x1b[J  A   2 tokens | One two\n\x1b[1A\x1b[J  A | One two\n"
    )
    assert pipe.getvalue() == "  A | One two\n"


def test_what_a_model_writes_does_not_command_the_terminal() -> None:
    terminal = Terminal()
    shown = answer(0)
    shown.text = "a\x1b[2Jb\x07\u009bc"
    screen = Screen(terminal)
    screen.show([shown])
    screen.wipe()
    screen.rest([shown])
    assert terminal.getvalue() == ("  A   0 tokens | a [2Jb c\n\x1b[1A\x1b[J  A | a [2Jb c\n")


def test_a_pipe_gets_lines_that_break_between_words() -> None:
    pipe = io.StringIO()
    screen = Screen(pipe)
    long = answer(0)
    long.text = "word " * 40
    screen.show([long])
    screen.rest([long])
    lines = pipe.getvalue().splitlines()
    assert [line.removeprefix("  A | ") for line in lines] == [
        " ".join(["word"] * count) for count in (15, 15, 10)
    ]
