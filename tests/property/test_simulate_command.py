"""`fermata simulate`: what it prints, what it finds, and what it refuses."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from scheduler.simulation.coverage import WANTED
from scheduler.simulation.scenario import from_text, to_text
from scheduler.simulation.seeds import story_of
from scheduler.simulation.stories import Told
from tools import simulate, simulate_mutations, simulate_workers
from tools.cli import app
from tools.mutations import MUTATIONS, Mutation
from tools.simulate import Report, Tally, Wanted
from tools.simulate_mutations import MutationError, mutated, mutated_copy
from tools.simulate_workers import Worker, Workers, packages_folder

SCRIPT = """
import sys
from tools.cli import app
sys.argv = ["fermata", "simulate", *sys.argv[1:]]
try:
    app()
finally:
    print("loaded:", *sorted({name.partition(".")[0] for name in sys.modules}))
"""

LOST_BYTES = next(each for each in MUTATIONS if each.name == "bytes that never come back")


def command(folder: Path, *arguments: str) -> tuple[int, list[str]]:
    """The command as a user runs it, with the packages of this folder: its status and its lines."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, *arguments],
        env=os.environ | {"PYTHONPATH": f"{folder}{os.pathsep}{packages_folder()}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    return done.returncode, done.stdout.splitlines()


def refused(capsys: pytest.CaptureFixture[str], status: int) -> str:
    """The one line that says why."""
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert printed.err.startswith("fermata simulate: ")
    assert printed.err.count("\n") == 1
    return printed.err


# Seeds


def test_it_tells_what_was_met_and_how_fast_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate.run(Wanted(seeds=5, seed=1, workers=2, as_json=True)) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    report = json.loads(last)
    assert (report["first_seed"], report["num_seeds"], report["failures"]) == (1, 5, [])
    assert report["num_steps"] > 500
    assert list(report["met"]) == list(WANTED)
    assert report["missing"] == [name for name in WANTED if not report["met"][name]]
    counts = dict(line.rsplit(maxsplit=1) for line in lines[1 : len(WANTED) + 1])
    assert {name: int(count) for name, count in counts.items()} == report["met"]
    assert lines[len(WANTED) + 1].startswith("5 seeds from 1: ")
    assert lines[len(WANTED) + 2 :] == [f"not met: {name}" for name in report["missing"]]


def test_a_situation_may_be_missing_among_few_seeds_only() -> None:
    def status(num_seeds: int, missing: list[str]) -> int:
        return Report(
            first_seed=0,
            num_seeds=num_seeds,
            num_steps=1,
            duration_s=1,
            steps_per_s_and_core=1,
            met={},
            missing=missing,
            failures=[],
            was_cut=False,
        ).status

    assert [status(199, ["solo"]), status(200, ["solo"]), status(200, [])] == [0, 1, 0]


def test_a_seed_that_fails_is_shown_with_what_repeats_it(tmp_path: Path) -> None:
    """In a copy of the packages with a mistake, and the smaller story also in one without."""
    copy = mutated_copy(LOST_BYTES, tmp_path / "copy")
    out = tmp_path / "found"
    status, lines = command(copy, "--seed", "2", "--seeds", "1", "--out", str(out))
    assert status == 1
    at = lines.index("    again: fermata simulate --seed 2 --seeds 1")
    assert lines[at - 1].startswith("seed 2 fails: InvariantBroken: reserved bytes are")
    assert lines[at - 1].endswith(" check_rows)")
    file = out / "seed-2.json"
    assert lines[at + 1] == f"    made smaller: fermata simulate --scenario {file}"
    assert len(from_text(file.read_text()).visits) == 1
    status, lines = command(copy, "--scenario", str(file))
    assert status == 1
    assert lines[0].startswith("the scenario fails: InvariantBroken: reserved bytes are")
    assert lines[1] == f"    again: fermata simulate --scenario {file}"
    status, lines = command(packages_folder(), "--scenario", str(file))
    assert status == 0
    assert lines[0].endswith(" steps, all of it holds")
    loaded = set(lines[-1].split())
    assert "scheduler" in loaded
    assert not {"mlx", "fastapi", "transformers"} & loaded


def test_an_interrupt_is_no_success(monkeypatch: pytest.MonkeyPatch) -> None:
    def hear(workers: Workers) -> Iterator[tuple[Worker, list[simulate_workers.Line]]]:
        raise KeyboardInterrupt
        yield workers.all()[0], []

    monkeypatch.setattr(Workers, "hear", hear)
    assert simulate.run(Wanted(seeds=1)) == 130
    assert simulate_mutations.run(Wanted(seeds=1), None) == 130


def test_an_interrupt_ends_it_with_what_was_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def hear(workers: Workers) -> Iterator[tuple[Worker, list[simulate_workers.Line]]]:
        told = Told(failure="AssertionError: planted", place="here", num_steps=7)
        yield workers.all()[0], [simulate_workers.Line(30, told)]
        raise KeyboardInterrupt

    monkeypatch.setattr(Workers, "hear", hear)
    assert simulate.run(Wanted(seeds=500, seed=30)) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("1 seeds from 30: 7 steps, ") for line in lines)
    assert any(line.endswith(" 1 failures, interrupted") for line in lines)
    assert lines[-2:] == [
        "seed 30 fails: AssertionError: planted (here)",
        "    again: fermata simulate --seed 30 --seeds 1",
    ]


def test_a_process_that_ends_too_early_is_a_failure_of_its_seed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(simulate, "packages_folder", lambda: tmp_path)
    tally = simulate.play_all(Wanted(seeds=2, seed=8, workers=1))
    assert list(tally.failed) == [8]
    assert tally.failed[8].failure.startswith("the process ended: AssertionError: the packages of")


def test_a_seed_that_comes_to_no_end_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulate_workers, "SILENCE_S", 0)
    tally = simulate.play_all(Wanted(seeds=1, seed=8, workers=1))
    words = "the process ended: no seed has come to an end for 0 s"
    assert [told.failure for told in tally.failed.values()] == [words]
    assert simulate.explain_all(tally, Wanted())[0].scenario is None


def test_the_first_failing_seeds_are_made_smaller(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(simulate, "tell", lambda _: Told(place="here"))  # whatever is left out
    failed = {seed: Told(failure="planted", place="here") for seed in (7, 5, 6, 4)}
    failures = simulate.explain_all(Tally(failed=failed), Wanted(out=tmp_path))
    assert [each.seed for each in failures] == [4, 5, 6, 7]
    files = [str(tmp_path / f"seed-{seed}.json") for seed in (4, 5, 6)]
    assert [each.scenario for each in failures] == [*files, None]
    assert not from_text(Path(files[0]).read_text()).happenings


# Mutations


def test_each_mutation_is_a_change_of_the_source() -> None:
    assert len(MUTATIONS) >= 8
    assert len({each.name for each in MUTATIONS}) == len(MUTATIONS)
    for mutation in MUTATIONS:
        changed = mutated(mutation, (packages_folder() / mutation.file).read_text())
        compile(changed, mutation.file, "exec")


@pytest.mark.parametrize("source", ["", "once, once", "never"])
def test_a_text_that_is_not_there_once_is_no_mutation(source: str) -> None:
    mutation = Mutation("name", "file.py", "once", "never", "Nothing.")
    with pytest.raises(MutationError, match=r"name: its text is in file\.py . times"):
        mutated(mutation, source)


@pytest.mark.parametrize(
    ("name", "failure"),
    [
        (LOST_BYTES.name, "InvariantBroken: reserved bytes are"),
        ("room up to the ceiling", "AssertionError: req_"),
        ("held ones overtake each other", "AssertionError: req_"),
        ("drain holds nobody", "AssertionError: 1 is decoding after the end of a drain"),
    ],
)
def test_a_mutation_is_found(name: str, failure: str, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = Wanted(seeds=20, workers=1, as_json=True)
    assert simulate_mutations.run(wanted, name) == 0
    shown, count, last = capsys.readouterr().out.splitlines()
    [found] = json.loads(last)["found"]
    assert found["name"] == name
    assert found["failure"].startswith(failure)
    assert shown.startswith(f"{name}: seed {found['seed']}, ")
    assert count == "1 of 1 mutations found within 20 seeds, 0 not found, 0 not played"


def test_one_that_nobody_notices_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    harmless = Mutation(
        "harmless", "scheduler/policy.py", "MAX_OVERDUE = 8\n", "MAX_OVERDUE = 9\n", ""
    )
    monkeypatch.setattr(simulate_mutations, "MUTATIONS", (harmless,))
    assert simulate_mutations.run(Wanted(seeds=1, workers=1), None) == 1
    assert capsys.readouterr().out.startswith("not found: harmless, ")
    lost = Mutation("lost", "scheduler/policy.py", "no such text", "", "")
    monkeypatch.setattr(simulate_mutations, "MUTATIONS", (lost,))
    assert simulate_mutations.run(Wanted(seeds=1), None) == 1
    assert "its text is in scheduler/policy.py 0 times" in capsys.readouterr().err


def test_one_that_cannot_be_played_is_not_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(simulate_mutations, "mutated_copy", lambda *_: tmp_path)
    assert simulate_mutations.run(Wanted(seeds=1, workers=1), LOST_BYTES.name) == 1
    words = f"fermata simulate: mutation {LOST_BYTES.name}: the process ended: AssertionError: the"
    assert capsys.readouterr().err.startswith(words)


# Scenario files


def test_a_story_is_the_same_when_it_is_read_again() -> None:
    for seed in range(50):
        story = story_of(seed)
        assert from_text(to_text(story)) == story


START = '{"seed": 1, "ceiling_bytes": 2000000'
ASKED = START + ', "visits": [{"habits": {}, "asked": {"max_tokens": 1, "num_prompt_tokens": '


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "Input data was truncated"),
        ("[1, 2]", "Expected `object`, got `array`"),
        ("{}", "missing required field `seed`"),
        ('{"seed": 1, "ceiling_bytes": "much"}', "Expected `int`, got `str`"),
        (START + ', "colour": 3}', "colour means nothing"),
        (START + ', "settings": {"kv__x": 1}}', "settings: setting kv.x"),
        (START + ', "settings": {"kv__enabled": false}}', "settings: kv.enabled"),
        (
            START + ', "happenings": [{"at_ms": 1, "kind": "rain"}]}',
            "happenings[0]: there is no kind 'rain'; there are broken disk, ",
        ),
        (
            START + ', "happenings": [{"at_ms": 1, "kind": "mark", "word": "step.begun"}]}',
            "happenings[0]: there is no point 'step.begun'",
        ),
        (ASKED + '1, "when": 2}}]}', "visits[0].asked.when means nothing"),
        (
            ASKED + "1180591620717411303424}}]}",
            "visits[0].asked.num_prompt_tokens",
        ),
        (ASKED + "100001}}]}", "visits[0].asked.num_prompt_tokens: 100001 is not from 0 to 100000"),
        (
            START + ', "happenings": [{"at_ms": 9223372036854775807, "kind": "settle"}]}',
            "happenings[0].at_ms: 9223372036854775807 is not from 0 to 3600000",
        ),
        (START + ', "state_bytes": -1}', "state_bytes: -1 is not from 0 to "),
        ('{"seed": 1, "ceiling_bytes": 10}', "ceiling_bytes: the model alone takes 1000000 bytes"),
        (ASKED + "0}}]}", "Expected `int` >= 1 - at `$.visits[0].asked.num_prompt_tokens`"),
    ],
)
def test_what_is_no_scenario_is_refused(
    text: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "story.json"
    file.write_text(text)
    line = refused(capsys, simulate.run_scenario(file, as_json=False))
    assert line.startswith(f"fermata simulate: {file}: ")
    assert why in line


def test_a_file_that_cannot_be_read_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    for name, why in (("none", "No such file"), ("", "Is a directory"), ("binary", "no text")):
        assert why in refused(capsys, simulate.run_scenario(tmp_path / name, as_json=False))


def test_a_scenario_for_programs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "story.json"
    file.write_text('{"seed": 1, "ceiling_bytes": 2000000}')
    assert simulate.run_scenario(file, as_json=True) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (told["failure"], list(told["met"])) == (None, list(WANTED))


# Options


@pytest.mark.parametrize(
    "options",
    [
        ["--seeds", "0"],
        ["--seed", "-1"],
        ["--workers", "0"],
        ["--mutations", "--seeds", "0"],
        ["--mutations", "--only", "no such one"],
        ["--only", "oldest is held"],
        ["--scenario", "file", "--mutations"],
        ["--out", __file__],
    ],
)
def test_options_that_cannot_be_are_refused(options: list[str]) -> None:
    done = CliRunner().invoke(app, ["simulate", *options])
    assert done.exit_code == 2
    assert done.output.startswith("fermata simulate: ")
    assert done.output.count("\n") == 1


def test_it_lists_what_it_counts_and_what_it_breaks() -> None:
    listed = CliRunner().invoke(app, ["simulate", "--list"])
    assert listed.output.splitlines() == list(WANTED)
    listed = CliRunner().invoke(app, ["simulate", "--mutations", "--list"])
    assert len(listed.output.splitlines()) == len(MUTATIONS)
    assert "oldest is held (scheduler/relief.py): The oldest row may be" in listed.output
    listed = CliRunner().invoke(app, ["simulate", "--list", "--json"])
    assert json.loads(listed.output) == {"situations": list(WANTED)}
    listed = CliRunner().invoke(app, ["simulate", "--mutations", "--list", "--json"])
    assert len(json.loads(listed.output)["mutations"]) == len(MUTATIONS)
