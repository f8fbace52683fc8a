"""`fermata bench scheduler`: that it measures what it says; never how fast this machine is."""

import json
from pathlib import Path

import pytest

from journal.reader import JournalReader
from journal.verify import verify
from scheduler.replay import Replay
from tools import bench_hits
from tools.bench_history import write_history
from tools.bench_rig import Rig, Stopwatch, rig_settings
from tools.bench_scheduler import Size, run

SMALL = Size(
    rounds=2,
    steps=20,
    events=2_500,
    replay_steps=100,
    long_replay_steps=2_000,
    starts=1,
    decisions=5,
)


@pytest.mark.timeout(120)
def test_it_reports_each_number_of_the_documented_form(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(SMALL, tmp_path, as_json=True)
    body = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert body["name"] == "scheduler.step p50"
    assert list(body)[:7] == ["name", "unit", "value", "samples", "machine", "versions", "seed"]
    found = {measurement["name"]: measurement for measurement in body["measurements"]}
    targets = {name for name, measurement in found.items() if measurement["target"]}
    assert targets == {
        "step p50",
        "step p99",
        "step p50, many / few waiting",
        "step p50, long / new journal",
        "start to listening, long - empty",
        "start to ready, long - empty",
        "replay",
        "replay of 2,000 steps",
        "replay, peak memory, all / a tenth",
        "decide, 64 rows, 64 held, p99",
    }
    assert status == int(not all(found[name]["met"] for name in targets))
    assert len(found["step p50"]["samples"]) == SMALL.rounds
    assert body["details"]["part of a step, us: journal.commit"] > 0
    assert list(tmp_path.iterdir()) == []


def test_its_long_journal_is_one_that_a_server_could_have_written(tmp_path: Path) -> None:
    write_history(tmp_path, 2_500, num_open=20, seed=1)
    with JournalReader.open(tmp_path) as reader:
        assert list(Replay(reader.read()).divergences()) == []
        with reader.transaction() as transaction:
            assert list(verify(transaction)) == []
            query = "SELECT count(*), sum(outcome IS NULL) FROM request"
            assert tuple(transaction(query).fetchone() or ()) == (3 * 8 + 20, 20)


def test_a_rig_steps_with_rows_that_decode_and_requests_that_wait(tmp_path: Path) -> None:
    write_history(tmp_path, 1_200, num_open=20, seed=1)
    rig = Rig(rig_settings(tmp_path, max_rows=4), seed=2)
    rig.fill(4, 30)
    first_step, first_seq = rig.state.step, rig.state.seq
    watch = Stopwatch(rig.loop)
    taken_ns = rig.steps_ns(10)
    assert (rig.state.step, rig.state.seq) == (first_step + 10, first_seq + 10)
    assert (len(rig.state.batch_rows), len(rig.state.waiting)) == (4, 30)
    assert 0 < watch.spent_ns["journal.commit"] < watch.spent_ns["commit and its side rows"]
    assert watch.spent_ns["commit and its side rows"] < sum(step.clock for step in taken_ns)
    rig.close()


@pytest.mark.engine
@pytest.mark.timeout(400)  # It starts five servers, one after the other.
def test_hits_are_measured_on_real_servers(capsys: pytest.CaptureFixture[str]) -> None:
    status = bench_hits.run(bench_hits.Size(num_tokens=200, rounds=1), as_json=True)
    body = json.loads(capsys.readouterr().out.splitlines()[-1])
    found = {measurement["name"]: measurement for measurement in body["measurements"]}
    targets = {name for name, measurement in found.items() if measurement["target"]}
    assert targets == {
        "repeated_first_token",
        "restarted_first_token",
        "saving_cost",
        "saving_cost_held_back",
    }
    assert status == int(not all(found[name]["met"] for name in targets))
    assert found["repeated_hit"]["value"] == 192, "three blocks of 64 tokens"
