"""The form in which benchmarks speak."""

import json

import pytest

from tools.bench_common import measure, show

KEYS = ["name", "unit", "value", "samples", "machine", "versions", "seed"]


def test_the_last_line_is_one_object_with_the_documented_keys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    headline = measure("p50", "ms", [0.3, 0.1, 0.2], at_most=0.25)
    other = measure("rate", "tokens/s", [9, 11], at_least=12)
    show("scheduler", [headline, other], seed=7, as_json=True, details={"rows": 32})
    *text, last = capsys.readouterr().out.splitlines()
    body = json.loads(last)
    assert list(body) == [*KEYS, "measurements", "details"]
    assert (body["name"], body["value"], body["seed"]) == ("scheduler.p50", 0.2, 7)
    assert body["samples"] == [0.3, 0.1, 0.2]
    assert [(m["name"], m["met"]) for m in body["measurements"]] == [("p50", True), ("rate", False)]
    assert ["MISSED" in line for line in text] == [False, True, False]


def test_a_measurement_needs_a_round() -> None:
    with pytest.raises(ValueError, match="p50 was not measured"):
        measure("p50", "ms", [])
