"""The demo's parts, without a server: its checks, its screen, its reading of events."""

import io
from dataclasses import replace

import pytest

from journal.rows import RequestRow
from tools.demo_checks import AtTheKill, Check, Output, Seen, check_all, check_uninterrupted
from tools.demo_client import Answer, read_events, read_lines
from tools.demo_plan import (
    LINE_TOKENS,
    MEASURE_LINES,
    MEASURE_PROMPTS,
    MEASURE_S,
    Measured,
    make_plan,
    measured_prompt,
    next_count,
)
from tools.demo_screen import Screen

WORDS = ("One", " two", " three", " four")


def row(phase: str) -> RequestRow:
    """A row of the journal; only its phase counts here."""
    return RequestRow(
        number=1,
        request_id="req_a",
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
    kill=AtTheKill([answer(2)], [row("decoding")], [Output((1, 2, 3))]),
    whole=[answer(4)],
    final=[Output((1, 2, 3, 4))],
    uninterrupted=[Output((1, 2, 3, 4))],
)


def failed(seen: Seen, *, new_tokens: bool = False) -> list[str]:
    """The checks that do not hold, but for the one that wants three requests."""
    found = check_all(seen, "stock", new_tokens=new_tokens)
    return [check.text for check in found[1:] if not check.holds]


def test_all_hold_when_nothing_was_lost() -> None:
    assert failed(SEEN) == []
    assert len(check_all(SEEN, "stock", new_tokens=False)) == 6


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


def test_the_kill_must_find_two_decoding_and_one_prefilling() -> None:
    phases = ["decoding", "decoding", "prefilling"]
    kills = [[row(phase) for phase in order] for order in (phases, phases[::-1])]
    checks = [
        check_all(replace(SEEN, kill=replace(SEEN.kill, rows=rows)), "stock", new_tokens=False)[0]
        for rows in kills
    ]
    assert [check.holds for check in checks] == [True, False]


def test_the_fake_model_computes_other_tokens_in_its_second_life() -> None:
    """Equal tokens would mean that they were computed again, by an engine of the first life."""
    second_life = replace(SEEN, uninterrupted=[Output((7, 8, 9, 4))])
    assert failed(second_life, new_tokens=True) == []
    assert failed(replace(SEEN, uninterrupted=[Output((7, 8, 9, 5))]), new_tokens=True)


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


@pytest.mark.parametrize(
    ("rate", "num_output_tokens"), [(1, 24), (15, 30), (100, 48), (600, 120), (100_000, 512)]
)
def test_prompts_and_answers_fit_the_machine(rate: float, num_output_tokens: int) -> None:
    plan = make_plan(Measured(rate, 15.0), seed=1, scale=1)
    assert LINE_TOKENS[0] - 15 <= plan.num_lines * 15 <= LINE_TOKENS[1] + 15
    assert plan.max_tokens == num_output_tokens
    assert plan.prompts[2].count("\n") == plan.num_lines + 1
    assert make_plan(Measured(rate, 15.0), seed=1, scale=1) == plan
    assert make_plan(Measured(rate, 15.0), seed=1, scale=2).max_tokens == 2 * plan.max_tokens


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


@pytest.mark.parametrize("line_s", [3.0, 1.9, 0.7, 0.1, 0.002])
def test_two_seconds_of_prefill_are_measured_and_not_much_more(line_s: float) -> None:
    number, duration_s, count = 0, 0.0, 1
    while (following := next_count(number, count, duration_s) if number else 1) is not None:
        count = following
        number, duration_s = number + 1, duration_s + count * line_s
        assert count <= MEASURE_LINES
    assert MEASURE_S <= duration_s <= 2 * max(MEASURE_S, line_s)


def test_what_is_measured_is_bounded_on_any_machine() -> None:
    assert next_count(MEASURE_PROMPTS, MEASURE_LINES, 0.1) is None


def test_no_two_measured_prompts_begin_alike() -> None:
    begin = {measured_prompt(number, 2, 1)[:4] for number in range(1, MEASURE_PROMPTS + 1)}
    assert len(begin) == MEASURE_PROMPTS
