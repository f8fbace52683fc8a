"""Scenario files: facts in, decisions and effects out, to be read and reviewed as text.

`pytest tests/scenarios --rewrite` writes down what the core does now; the difference is reviewed.
"""

from pathlib import Path

import pytest

from tests.scenarios.script import rewritten

FILES = sorted((Path(__file__).parent / "golden").glob("*.txt"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_scenario_goes_as_it_is_written(file: Path, request: pytest.FixtureRequest) -> None:
    text = file.read_text()
    now = rewritten(text)
    if request.config.getoption("--rewrite"):
        file.write_text(now)
    else:
        assert text == now


def test_there_are_scenarios() -> None:
    assert len(FILES) >= 8


def test_scenario_that_says_something_else_is_found() -> None:
    text = FILES[0].read_text()
    assert rewritten(text.replace("request_queued", "request_taken")) == text


def test_unknown_fact_is_refused() -> None:
    with pytest.raises(KeyError, match="request_lost"):
        rewritten("# Nonsense.\n\nrequest_lost a\n----\n")
