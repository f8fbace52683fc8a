"""The benchmark runs, finds what it saved, and says what it measured."""

import json
from pathlib import Path

import pytest

from scheduler.kvcache.layout import layout_of
from tools.bench_kv import BenchError, SavedChain, Size, make_row, run, timed_restore, timed_save

pytestmark = pytest.mark.engine

SMALL = Size(rounds=1, chain_tokens=64, block_tokens=(32,))


def test_a_round_is_measured_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(SMALL, tmp_path, as_json=True)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["name"] == "kv.1_mib.save.ratio"
    names = [measurement["name"] for measurement in found["measurements"]]
    assert names == [
        "1_mib.save.ratio",
        "1_mib.save",
        "1_mib.plain_write",
        "1_mib.restore.ratio",
        "1_mib.restore",
        "1_mib.plain_read",
        "1_mib.restore.peak",
        "hash_100k_tokens",
    ]
    met = [measurement["met"] for measurement in found["measurements"]]
    assert status == (False in met)
    assert found["details"]["chain_bytes"] == 2 * 2**20
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_comes_back_changed_is_no_measurement(tmp_path: Path) -> None:
    row = make_row(64)
    chain = SavedChain(tmp_path, layout_of(row, 64), row, 64, 32)
    timed_save(chain)
    chain.row = make_row(64)
    keys = chain.row[3].keys
    assert keys is not None
    chain.row[3].keys = keys + 1
    with pytest.raises(BenchError, match="not the one"):
        timed_restore(chain)
