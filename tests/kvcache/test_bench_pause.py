"""The benchmark of pauses runs, on rows that are what they say; never how fast this disk is."""

import json
from pathlib import Path

import mlx.core as mx
import pytest

from tools import bench_pause
from tools.bench_kv import BenchError
from tools.bench_pause import HeldRow, Size, run
from tools.bench_pause_rows import HYBRID, PLAIN, Content, RowChanged, Shape
from tools.bench_pause_server import serving

pytestmark = pytest.mark.engine

SMALL_HYBRID = Shape("hybrid", 2, 1, 16, num_states=2, state_shape=(1, 2, 8, 8))
SMALL_PLAIN = Shape("plain", 2, 2, 16)
SMALL = Size(rounds=2, rest_s=0.0, num_tokens=(256, 768), shapes=(SMALL_HYBRID, SMALL_PLAIN))


def test_the_shapes_have_the_sizes_of_real_models() -> None:
    assert (HYBRID.bytes_per_token, HYBRID.state_bytes) == (65_536, 150_994_944)
    assert (PLAIN.bytes_per_token, PLAIN.state_bytes) == (147_456, 0)


@pytest.mark.timeout(120)
def test_a_round_is_measured_and_nothing_is_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status = run(SMALL, tmp_path, as_json=True)
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["name"] == "pause.hybrid.pause.long_to_short"
    by_name = {measurement["name"]: measurement for measurement in found["measurements"]}
    targets = {name for name, measurement in by_name.items() if measurement["target"]}
    assert targets == {
        f"{shape}.{each}"
        for shape in ("hybrid", "plain")
        for each in (
            "pause.long_to_short",
            "256.pause.share",
            "256.resume.ratio",
            "768.pause.share",
            "768.resume.ratio",
        )
    }
    assert status == int(not all(by_name[name]["met"] for name in targets))
    details = found["details"]
    kept, state_bytes = 3 * 256, SMALL_HYBRID.state_bytes
    assert details["hybrid.768, bytes read"] > kept * SMALL_HYBRID.bytes_per_token + state_bytes
    pause = by_name["plain.256.pause"]["value"]
    parts = ("step under way, cut", "write", "commit of the pin, drop")
    assert sum(details[f"plain.256, ms: {part}"] for part in parts) == pytest.approx(pause, abs=0.1)
    assert list(tmp_path.iterdir()) == []


def test_a_row_is_held_behind_its_blocks_with_its_memory_free(tmp_path: Path) -> None:
    with serving(SMALL_PLAIN, tmp_path / "state") as server:
        row = HeldRow(server, 0, 512, tmp_path / "plain")
        row.begin()
        paths = row.paths()
        tail_tokens = bench_pause.FIRST_TAIL_TOKENS + bench_pause.TOKENS_BETWEEN
        sizes = [path.stat().st_size for path in paths]
    assert len(paths) == 3, "two blocks and what is behind them"
    assert sizes[0] == sizes[1] > 256 * SMALL_PLAIN.bytes_per_token
    assert sizes[2] >= tail_tokens * SMALL_PLAIN.bytes_per_token


def test_a_row_that_comes_back_changed_is_no_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def other(content: Content, caches: object, num_tokens: int) -> None:
        del caches
        changed = content.shape.make_caches()
        content.feed(changed, 0, num_tokens)
        changed[-1].keys = changed[-1].keys + 1
        check(content, changed, num_tokens)

    check = Content.check
    monkeypatch.setattr(Content, "check", other)
    with pytest.raises(BenchError, match="came back with other numbers"):
        run(SMALL, tmp_path, as_json=False)


def test_content_is_told_from_that_of_other_positions() -> None:
    content = Content(SMALL_HYBRID, seed=1)
    caches = SMALL_HYBRID.make_caches()
    content.feed(caches, 0, 40)
    content.check(caches, 40)
    caches[0][0] = caches[0][0] + mx.array(1.0)
    with pytest.raises(RowChanged):
        content.check(caches, 40)
