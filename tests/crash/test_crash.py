"""`fermata crash` as it is called: a server is ended, and killed, and nothing is lost."""

import json
import subprocess
import sys
from typing import Any

import pytest

from journal.crashpoints import POINTS
from tools.crash import Report
from tools.crash_child import End
from tools.crash_plan import Tale, Told

pytestmark = pytest.mark.crash

LIMIT_S = 60
"""For stories; those that have begun by then come to their ends."""


def crash(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The command, to its end."""
    command = (sys.executable, "-P", "-m", "tools.cli", "crash", *arguments)
    return subprocess.run(command, capture_output=True, text=True, check=False)


def last_line(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """The JSON object of `--json`."""
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.timeout(240)
def test_a_server_that_is_ended_at_its_points_loses_nothing() -> None:
    limits = ("--seeds", "1", "--limit-s", str(LIMIT_S), "--new-processes", "1")
    done = crash(*limits, "--workers", "2", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = last_line(done)
    assert found["violations"] == []
    assert found["points"].keys() == POINTS.keys()
    assert sum(count > 0 for count in found["points"].values()) >= 40
    assert found["new_process_ends"] >= 1


@pytest.mark.timeout(180)
def test_a_loaded_server_that_is_killed_loses_nothing() -> None:
    done = crash("--kills", "5", "--seed", "3", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = last_line(done)
    assert (found["lost"], found["changed"], found["doubled"], found["problems"]) == (0, 0, 0, [])
    assert found["kills"] == 5
    assert found["tokens"] > 1000


def test_a_story_can_be_played_again() -> None:
    told = "plain:5:commit.before.tokens_decoded@9+recovery.done@1"
    done = crash("--story", told, "--json")  # the second of two workers has nothing to do
    assert done.returncode == 0, done.stdout + done.stderr
    assert last_line(done)["points"] == {"commit.before.tokens_decoded": 1, "recovery.done": 1}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--points", "no.such.point"), "no such point"),
        (("--story", "plain"), "VARIANT:SEED:POINT@NUMBER"),
        (("--story", "odd:1:"), "the variants are"),
        (("--story", "plain:1:odd@1"), "no point odd"),
        (("--model", "odd"), "--model odd"),
        (("--seeds", "0"), "--seeds"),
    ],
)
def test_what_cannot_be_done_is_refused(arguments: tuple[str, ...], words: str) -> None:
    done = crash(*arguments)
    assert done.returncode == 2
    assert words in done.stderr


def test_all_points_are_listed() -> None:
    done = crash("--list")
    assert done.returncode == 0
    assert [line.split()[0] for line in done.stdout.splitlines()] == list(POINTS)


def test_the_exit_status_tells_of_violations_and_of_points_that_nobody_reaches() -> None:
    told = Told(Tale("plain", 1), (End("step.done", 1),), (), (), 1.0)
    lost = Told(Tale("plain", 1), (), (), ("a token is lost",), 1.0)
    assert Report({"step.done": 1}, 1, [told]).status == 0
    assert Report({"step.done": 1}, 1, [told, lost]).status == 1
    assert Report({"step.done": 0}, 1, [told]).status == 1
    assert Report({"step.done": 0}, 1, [told], was_cut=True).status == 0
