"""`fermata bench whatif`: that it measures what it says; never how fast this machine is."""

import json
from pathlib import Path

import pytest

from journal.events import Record
from scheduler.whatif.totals import Totals, totals_of
from tools import bench_whatif
from tools.bench_whatif import Pair, Round, Size, compare, details_of, load_of, run


def totals(total_ms: int, held_ms: int, pauses: int) -> Totals:
    nothing: list[Record] = []
    fields = {name: getattr(totals_of(nothing), name) for name in Totals.__struct_fields__}
    changed = {"total_ms": total_ms, "held_ms": held_ms, "pauses": pauses, "finished": 6}
    return Totals(**(fields | changed))


def test_each_number_is_held_against_its_own_target() -> None:
    good = Pair(totals(1_000, 100, 1), totals(950, 109, 1))
    free = Pair(totals(900, 0, 0), totals(900, 0, 0))
    bad = Pair(totals(900, 0, 0), totals(1_100, 5, 1))
    rounds = [Round(good, {"lower": good, "higher": other}, 1.0) for other in (free, bad, bad)]
    found = {measurement.name: measurement for measurement in compare(rounds)}
    assert found["second half, total off"].value == 5
    assert found["second half, held off"].value == 9
    assert found["higher ceiling, held off"].samples == (0, 100, 100)
    missed = {name for name, measurement in found.items() if not measurement.met}
    assert missed == {f"higher ceiling, {name} off" for name in ("total", "held", "pauses")}
    details = details_of(rounds)
    assert details["higher: pauses, held ms, total ms"] == (
        "0, 0, 900 recorded; 1, 5, 1100 simulated"
    )


def test_the_load_is_two_bursts_that_grow() -> None:
    load = load_of(1)
    assert [sent.at_ms for sent in load] == [0, 600, 1_200, 14_000, 14_600, 15_200]
    assert load[0].num_prompt_tokens < load[2].num_prompt_tokens
    assert load[:3] == [
        type(sent)(sent.at_ms - 14_000, sent.num_prompt_tokens, sent.num_output_tokens)
        for sent in load[3:]
    ]


@pytest.mark.timeout(120)
def test_servers_under_three_ceilings_are_compared_with_what_is_said_of_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench_whatif, "OUTPUT_TOKENS", 20)
    monkeypatch.setattr(bench_whatif, "EACH", 1)
    fast = Size(rounds=1, more_rounds=0, speed=10)
    status = run(fast, tmp_path, as_json=True)
    body = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert body["name"] == "whatif.second half, total off"
    found = {measurement["name"]: measurement for measurement in body["measurements"]}
    assert found["higher ceiling, finished off"]["met"]
    assert status == int(not all(measurement["met"] for measurement in found.values()))
    assert body["details"]["rounds"] == 1
    assert list(tmp_path.iterdir()) == []
