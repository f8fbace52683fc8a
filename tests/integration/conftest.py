"""A state folder whose journal is replayed at the end, and writers and readers that are held
back."""

import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from scheduler.kvcache.fileformat import Tensor
from scheduler.kvcache.naming import KeptFile
from scheduler.kvcache.store import BlockStore, OpenFile, Saved, SaveFailed
from tests.integration.timeline_browser import Browser, fresh, opened
from tests.replaying import assert_replays

HELD_LIMIT_S = 20


@pytest.fixture
def state_folder(tmp_path: Path) -> Iterator[Path]:
    """An empty folder. The journal that the test leaves in it must replay without divergence."""
    folder = tmp_path / "state"
    yield folder
    assert_replays(folder)


@pytest.fixture
def held_writers(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Writers wait before each file, until the event is set."""
    may_write = threading.Event()
    save = BlockStore.save

    def held(
        store: BlockStore, file: KeptFile, tensors: Mapping[str, Tensor]
    ) -> Saved | SaveFailed:
        assert may_write.wait(HELD_LIMIT_S)
        return save(store, file, tensors)

    monkeypatch.setattr(BlockStore, "save", held)
    yield may_write
    may_write.set()


@pytest.fixture
def held_readers(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Saved files are opened once the event is set."""
    may_read = threading.Event()
    enter = OpenFile.__enter__

    def held(file: OpenFile) -> OpenFile:
        assert may_read.wait(HELD_LIMIT_S)
        return enter(file)

    monkeypatch.setattr(OpenFile, "__enter__", held)
    yield may_read
    may_read.set()


@pytest.fixture(scope="module")
def tab() -> Iterator[Browser]:
    """A browser for the tests of one module."""
    with opened() as browser:
        yield browser


@pytest.fixture
def browser(tab: Browser) -> Iterator[Browser]:
    """Its tab, with nothing of the test before."""
    with fresh(tab) as browser:
        yield browser
