"""Traces of requests: what is read of them, what is refused, and what they come to."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from scheduler.settings import ConfigurationError
from scheduler.simulation.models import hybrid_27b, workstation
from scheduler.whatif.sizing import cells_of, run_trace, settings_without_journal
from scheduler.whatif.trace import (
    BLOCK_TOKENS,
    BadTrace,
    Row,
    check_trace,
    coming_of_trace,
    prompt_of_row,
    row_of,
    rows_of,
)
from tools import whatif_trace
from tools.whatif_trace import Wanted


def line(at_ms: int, num_tokens: int, num_output: int, ids: Sequence[int]) -> str:
    row = {"timestamp": at_ms, "input_length": num_tokens, "output_length": num_output}
    return json.dumps(row | {"hash_ids": list(ids), "session": 3})


def write(folder: Path, *lines: str) -> Path:
    file = folder / "trace.jsonl"
    file.write_text("".join(f"{text}\n" for text in lines))
    return file


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two conversations of two turns; the second turn begins with the first one's prompt."""
    return write(
        tmp_path,
        line(5_000, 20_000, 40, range(40)),
        "",
        line(6_000, 9_000, 200, range(100, 118)),
        line(300_000, 21_000, 30, [*range(39), *range(200, 203)]),
        line(301_000, 9_500, 20, [*range(100, 117), 300, 301]),
    )


def test_prompts_are_equal_where_ids_are() -> None:
    one = prompt_of_row(Row(0, 1_300, 1, (1, 2, 3)))
    other = prompt_of_row(Row(0, 1_500, 1, (1, 2, 4)))
    assert (len(one), len(other)) == (1_300, 1_500)
    assert one[: 2 * BLOCK_TOKENS] == other[: 2 * BLOCK_TOKENS]
    assert one[2 * BLOCK_TOKENS :] != other[2 * BLOCK_TOKENS : 1_300]


def test_a_trace_is_read_line_by_line_as_far_as_it_is_wanted(trace: Path) -> None:
    assert [number for number, _ in rows_of(trace, 2)] == [1, 3]
    assert check_trace(trace, None, hybrid_27b()) == 4
    assert check_trace(trace, 3, hybrid_27b()) == 3
    coming = list(coming_of_trace(trace))
    assert [each.at_ns // 10**9 for each in coming] == [0, 1, 295, 296]
    assert [each.num_output_tokens for each in coming] == [40, 200, 30, 20]


def test_what_is_behind_the_limit_is_not_read(tmp_path: Path) -> None:
    file = write(tmp_path, line(0, 10, 1, [1]), "broken")
    assert check_trace(file, 1, hybrid_27b()) == 1


GOOD = line(1_000, 600, 5, [1, 2])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "there is no request in it"),
        ([GOOD, "{"], "line 2: Input data was truncated"),
        ([GOOD, '{"timestamp": 1}'], "line 2: .*input_length"),
        ([line(-1, 600, 5, [1])], "line 1: timestamp is negative"),
        ([line(1, 0, 5, [])], "line 1: input_length"),
        ([line(1, 600, 5, [1, 2, 3])], "line 1: 3 hash_ids; 600 tokens begin 2 blocks of 512"),
        ([GOOD, line(2_000, 513, 5, [1])], "line 2: 1 hash_ids; 513 tokens begin 2 blocks of 512"),
        ([line(1, 600, 5, [])], "line 1: 0 hash_ids"),
        (
            [GOOD.replace("1000", "1e30")],
            "line 1: timestamp is negative, or more than 1",
        ),
        ([GOOD.replace("1000", "1e999")], "line 1: "),
        ([GOOD, line(10**12, 600, 5, [1, 2])], "line 2: more than 31622400000 ms after the first"),
        ([GOOD, line(999, 600, 5, [1, 2])], "line 2: .*sort"),
        (
            [GOOD, line(2_000, 600_000, 5, range(1172))],
            "line 2: 600005 tokens; .*524288",
        ),
    ],
)
def test_what_is_no_trace_is_refused_by_its_line(
    tmp_path: Path, lines: list[str], message: str
) -> None:
    with pytest.raises(BadTrace, match=message):
        check_trace(write(tmp_path, *lines), None, hybrid_27b())


def test_a_line_without_an_end_is_not_read_into_memory() -> None:
    with pytest.raises(BadTrace, match="line 7: longer than 4000000 bytes"):
        row_of("x: line 7", b"[" * 4_000_001)


def test_a_trace_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadTrace, match="cannot be read"):
        check_trace(tmp_path, None, hybrid_27b())


def test_what_comes_again_is_found_and_what_was_put_out_comes_out(trace: Path) -> None:
    settings = settings_without_journal({})
    totals = run_trace(coming_of_trace(trace), settings, workstation()).totals
    assert (totals.requests, totals.finished, totals.pauses) == (4, 4, 0)
    assert totals.output_tokens == 290
    shared = 39 * 512 + 17 * 512
    assert 0.9 * shared < totals.hit_tokens <= shared
    without = settings_without_journal({"kv.max_bytes": 0})
    cold = run_trace(coming_of_trace(trace), without, workstation()).totals
    assert cold.hit_tokens == 0
    assert cold.prefilled_tokens == totals.prefilled_tokens + totals.hit_tokens


def test_a_grid_has_a_column_for_each_combination(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = Wanted(ceilings=("22GB", "60GB"), budgets=("0", "50GB"), as_json=True)
    assert whatif_trace.run(trace, wanted) == 0
    report = json.loads(capsys.readouterr().out)
    cells = {tuple(cell["changes"].values()): cell["totals"] for cell in report["cells"]}
    assert list(cells) == [("22GB", "0"), ("22GB", "50GB"), ("60GB", "0"), ("60GB", "50GB")]
    assert cells["60GB", "0"]["hit_tokens"] == 0
    assert cells["60GB", "50GB"]["hit_tokens"] > 0
    assert cells["22GB", "0"]["peak_bytes"] <= 22 * 10**9
    assert (report["model"], report["requests"]) == ("hybrid-27b", 4)


def test_how_far_it_is_off_comes_first(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert whatif_trace.run(trace, Wanted(limit=1)) == 0
    first, _, header, *_ = capsys.readouterr().out.splitlines()
    assert first == (
        "cost model: hybrid-27b by its description; how far that is off was not measured"
    )
    assert header.split() == ["simulated"]


def test_only_people_see_progress(
    trace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    progress = whatif_trace.Progress("1 of 1", 4)
    progress.show(3)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    progress = whatif_trace.Progress("1 of 1", 4)
    progress.show(3)
    progress.clear()
    assert capsys.readouterr().err == "\r\033[Ksimulation 1 of 1: 3 of 4 requests\r\033[K"


def test_what_never_fits_under_any_ceiling_is_an_error_and_else_a_number(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert whatif_trace.run(trace, Wanted(ceilings=("16500MB",))) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "line 1: its 20000 + 40 tokens take" in printed.err
    assert printed.err.count("\n") == 1
    assert whatif_trace.run(trace, Wanted(ceilings=("16500MB", "none"), as_json=True)) == 0
    cells = json.loads(capsys.readouterr().out)["cells"]
    assert [cell["totals"]["rejected"] > 0 for cell in cells] == [True, False]


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (Wanted(model="large"), "--model large: known are hybrid-27b, hybrid-27b-8bit"),
        (Wanted(model="hybrid-27b", journal=Path("there")), "give one"),
        (Wanted(changes=("memory.roof=1",)), "--set memory.roof: there is no such setting"),
        (Wanted(ceilings=("much",)), "memory.ceiling"),
        (Wanted(ceilings=("auto",)), "memory.ceiling=auto follows a machine"),
        (Wanted(ceilings=("1GB",), changes=("memory.ceiling=2GB",)), "--ceiling and --set"),
        (Wanted(budgets=("1GB",), changes=("kv.max_bytes=2GB",)), "--ssd and --set"),
        (Wanted(journal=Path("there")), "no such journal"),
        (Wanted(ceilings=("1GB",) * 9, budgets=("1GB",) * 9), "81 combinations"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    trace: Path, wanted: Wanted, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert whatif_trace.run(trace, wanted) == 2
    printed = capsys.readouterr()
    assert message in printed.err
    assert (printed.out, printed.err.count("\n")) == ("", 1)


def test_cells_without_a_choice_are_one() -> None:
    assert cells_of((), ()) == [{}]
    with pytest.raises(ConfigurationError, match="64 are possible"):
        cells_of(("1GB",) * 65, ())
