"""`fermata bench mixed`: that it measures what it says; never how fast this machine is."""

import json
import sys
from contextlib import closing
from pathlib import Path

import pytest

from scheduler.engine import builtin
from tools.bench_mixed import FermataSide, compare, measure_gaps
from tools.bench_mixed import Size as MixedSize
from tools.bench_mixed_load import Played, Prompt, Workload, gaps
from tools.bench_mixed_sides import BatchSide, CommandSide, SideFailed, is_token

TEXT = "A"


def played(gap_s: float, done_s: float, first_s: tuple[float, ...]) -> Played:
    """A round with these figures."""
    return Played([-1.0, -0.1, gap_s - 0.1, gap_s], [[at, done_s] for at in first_s])


def test_gaps_are_those_in_the_time_that_is_asked_for() -> None:
    times = [-9.0, -2.0, 1.0, 2.0, 5.0, 11.0]
    assert gaps(times) == [3.0, 1.0, 3.0, 6.0]
    assert gaps(times, until=5.0) == [3.0, 1.0, 3.0]


def test_rounds_are_held_against_those_of_the_best_peer() -> None:
    ours = [played(0.4, 12.0, (1.0, 2.0, 3.0, 4.0)), played(0.7, 10.0, (3.0, 2.0, 4.0, 5.0))]
    slow = [played(9.0, 30.0, (9.0, 9.0, 9.0, 9.0))] * 2
    fast = [played(1.0, 10.0, (2.0, 2.0, 2.0, 2.0)), played(1.0, 8.0, (2.0, 2.0, 2.0, 2.0))]
    found, details = compare(ours, ["slow", "fast"], [slow, fast])
    by_name = {measurement.name: measurement for measurement in found}
    assert by_name["all_done_of_best_peer"].samples == (1.2, 1.25)
    assert by_name["longest_gap"].samples == (pytest.approx(400), pytest.approx(700))
    assert by_name["shortest_first"].samples == (1, 0)
    assert by_name["first_token_120.fermata"].samples == (1.0, 3.0)
    assert by_name["all_done.slow"].value == 30
    assert details["pieces of text in each answer, fast"] == "[[4, 2, 2, 2, 2], [4, 2, 2, 2, 2]]"
    assert [m.name for m in found if m.met is False] == [
        "longest_gap",
        "shortest_first",
    ]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('data: {"choices": [{"delta": {"content": "a"}}]}', True),
        ('data: {"choices": [{"delta": {"role": "assistant", "content": ""}}]}', False),
        ('data: {"choices": [{"text": "", "logprobs": {"tokens": ["a"]}}]}', True),
        ('data: {"choices": [], "usage": {}}', False),
        ("data: [DONE]", False),
        (": heartbeat", False),
    ],
)
def test_what_counts_as_a_token(line: str, expected: bool) -> None:
    assert is_token(line) is expected


def test_peer_that_does_not_start_is_said_with_its_last_words(tmp_path: Path) -> None:
    command = f"{sys.executable} -c 'print(\"{{model}} is nothing to me\")'"
    with pytest.raises(SideFailed, match="nothing to me"):
        CommandSide(command, tmp_path, tmp_path / "peer.log")


def workload() -> Workload:
    """A small one for the tiny model."""
    long, short = (Prompt(TEXT, tuple(range(n)), num_out) for n, num_out in ((20, 16), (9, 3)))
    return Workload(long, (short, short))


@pytest.mark.engine
@pytest.mark.timeout(120)
def test_batch_generator_says_when_each_token_came() -> None:
    with closing(BatchSide(builtin.ensure("tiny-plain"), "stock")) as side:
        for _ in range(2):
            found = side.play(workload())
            assert [len(found.stream), *map(len, found.four)] == [16, 3, 3]
            assert found.stream == sorted(found.stream)
            assert found.stream[9] < 0 < found.stream[-1], "the others come after ten tokens"


@pytest.mark.engine
@pytest.mark.timeout(120)
def test_server_plays_a_round(tmp_path: Path) -> None:
    with closing(FermataSide("fake", "auto", tmp_path)) as side:
        found = side.play(workload())
    assert 10 < len(found.stream) <= 16, "a token whose text is not whole comes with the next"
    assert [0 < len(times) <= 3 for times in found.four] == [True, True]
    assert found.stream[9] < 0, "the others come after ten tokens"
    assert all(times[0] > 0 for times in found.four)


@pytest.mark.engine
@pytest.mark.timeout(200)
def test_gap_is_measured_beside_a_prompt(tmp_path: Path) -> None:
    found = measure_gaps(MixedSize(gap_rounds=1, gap_tokens=400), tmp_path)
    assert [m.name for m in found] == [
        "prefill_gap_p99",
        "prefill_gap_p50",
        "prefill_gap_most",
        "prefill_beside",
    ]
    assert found[0].target == "at most 250 ms"
    assert 0 < found[1].value <= found[0].value <= found[2].value < found[3].value * 1000
    assert json.dumps([m.value for m in found])
