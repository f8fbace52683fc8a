"""Limits below which nothing of a model would ever be saved."""

from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from journal.events import KvLimits, ModelFacts
from scheduler.engine.fake import FakeSource
from scheduler.kvcache.limits import why_none_is_saved
from scheduler.run import Exit
from scheduler.service import Service
from scheduler.settings import KvSettings
from tests.run_driver import ready, serve, settings_in

BLOCK_TOKENS = 16
FACTS = FakeSource(settings_in(Path()).fake).describe().facts
BLOCK_BYTES = BLOCK_TOKENS * FACTS.kv_bytes_per_token


def limits_of(model: ModelFacts = FACTS, **bounds: int) -> KvLimits:
    limits = KvSettings.model_validate({"block_tokens": BLOCK_TOKENS, **bounds}).limits(model)
    assert limits is not None
    return limits


def test_the_defaults_have_room() -> None:
    assert why_none_is_saved(FACTS, limits_of()) is None


@pytest.mark.parametrize(("spare_bytes", "fits"), [(-1, False), (0, True)])
def test_writers_must_hold_a_block(spare_bytes: int, fits: bool) -> None:
    why = why_none_is_saved(FACTS, limits_of(writing_bytes=BLOCK_BYTES + spare_bytes))
    assert fits is (why is None)
    if why is not None:
        assert why.startswith(f"kv.writing_bytes is {BLOCK_BYTES - 1}, ")


@pytest.mark.parametrize(("spare_bytes", "fits"), [(-1, False), (0, True)])
def test_the_disk_must_hold_a_block_beside_the_writers_tenth(spare_bytes: int, fits: bool) -> None:
    max_bytes = BLOCK_BYTES * 10 // 9 + spare_bytes
    why = why_none_is_saved(FACTS, limits_of(max_bytes=max_bytes))
    assert fits is (why is None)
    if why is not None:
        assert why.startswith(f"kv.max_bytes is {max_bytes}, ")


def test_the_state_at_its_end_counts() -> None:
    model = msgspec.structs.replace(FACTS, state_bytes=BLOCK_BYTES)
    assert why_none_is_saved(model, limits_of(model, max_bytes=2 * BLOCK_BYTES)) is not None
    assert why_none_is_saved(model, limits_of(model, max_bytes=3 * BLOCK_BYTES)) is None
    assert why_none_is_saved(model, limits_of(model, writing_bytes=BLOCK_BYTES - 1)) is not None


def test_a_server_says_so_at_its_start(tmp_path: Path) -> None:
    async def talk(service: Service) -> None:
        await ready(service)

    with capture_logs() as lines:
        assert serve(settings_in(tmp_path / "small", kv__max_bytes=1), talk) == Exit(0)
        assert serve(settings_in(tmp_path / "large"), talk) == Exit(0)
    (said,) = [line for line in lines if line["event"] == "no KV of this model will be saved"]
    assert said["reason"].startswith("kv.max_bytes is 1, ")
