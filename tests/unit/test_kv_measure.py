"""Free space is reported when it is another one, so that an idle server writes no events."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from journal import events
from journal.events import Fact
from scheduler.kvcache.fake_codec import FakeCodec
from scheduler.kvstore import KvStore
from scheduler.settings import KvSettings


def test_free_space_is_reported_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts: list[Fact] = []
    kv = KvStore(
        tmp_path,
        KvSettings(num_writers=1),
        FakeCodec(),
        block_tokens=16,
        fingerprint="f" * 64,
        deliver=facts.append,
    )
    for free_bytes in (1_000, 1_000, 991, 989, 985, 1_000):
        monkeypatch.setattr(kv.store, "free_bytes", lambda free_bytes=free_bytes: free_bytes)
        kv.measure(0, 0)
    kv.measure(1, 5)
    kv.close(20)
    measured = [fact for fact in facts if isinstance(fact, events.StoreMeasured)]
    assert [fact.free_bytes for fact in measured] == [1_000, 989, 1_000, 1_000]
    assert measured[-1].num_swept == 1


def test_free_space_that_cannot_be_read_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kv = KvStore(
        tmp_path,
        KvSettings(num_writers=1),
        FakeCodec(),
        block_tokens=16,
        fingerprint="f" * 64,
        deliver=lambda _: None,
    )

    def broken() -> int:
        raise OSError(5, "Input/output error")

    with capture_logs() as logged:
        for free_bytes in (broken, broken, lambda: 1_000, broken):
            monkeypatch.setattr(kv.store, "free_bytes", free_bytes)
            kv.measure(0, 0)
    kv.close(20)
    assert [entry["log_level"] for entry in logged] == ["warning", "warning"]
