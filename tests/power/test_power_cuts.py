"""A power cut at every moment of short lives: no wrong byte, no lost pin, no file too many.

What is read of each state and what is pinned in it is checked in all of them. A server is started
on some, drawn with a seed: half of them hold a request.
"""

import random
from collections.abc import Iterable
from pathlib import Path

import pytest

from journal import events
from scheduler.kvcache.files import TEMPORARY_SUFFIX
from scheduler.kvcache.store import BlockStore, OpenFile
from tests.power import broken
from tests.power.cuts import Check, Cut, Cuts, pinned
from tests.power.server import PowerJournal, PowerServer, SteadyFiles
from tests.power.stories import Story, held_and_evicted, held_once, held_over_deaths

NUM_LIVES = 12
FEW_STATES = 20
STATE_BYTES = (0, 4096)


def told(
    story: Story, folder: Path, files: type[SteadyFiles] = SteadyFiles, state_bytes: int = 0
) -> tuple[Cuts, Check]:
    """A story from its start to its end, how it can be cut off, and what must be so then."""
    folder.mkdir()
    recorded = files(folder)
    journal = PowerJournal(recorded)
    server = PowerServer(recorded, journal, fake__state_bytes=state_bytes)
    story(server)
    server.close()
    return Cuts(recorded.history), Check(recorded, journal)


def complaints(cuts: Cuts, check: Check) -> set[str]:
    """All that is not as it must be in any of them; if there are many, in some of them."""
    found: set[str] = set()
    cuts.most_states = FEW_STATES
    for cut in cuts:
        try:
            check.files(cut)
        except AssertionError as error:
            found.add(str(error).partition("\n")[0])
    return found


def drawn(cuts: Iterable[Cut], check: Check, seed: int) -> list[Cut]:
    """Some of the cuts, half of them with a pin."""
    dice = random.Random(seed)
    parts: tuple[list[Cut], list[Cut]] = [], []
    for cut in cuts:
        parts[bool(pinned(check.recovered(cut.num_commits)))].append(cut)
    return [cut for part in parts for cut in dice.sample(part, min(len(part), NUM_LIVES // 2))]


@pytest.mark.parametrize("state_bytes", STATE_BYTES)
@pytest.mark.parametrize("story", [held_once, held_over_deaths, held_and_evicted])
def test_a_power_cut_costs_no_pin_and_gives_no_wrong_byte(
    tmp_path: Path, story: Story, state_bytes: int
) -> None:
    cuts, check = told(story, tmp_path / "cut", state_bytes=state_bytes)
    every: list[Cut] = []
    for cut in cuts:
        check.files(cut)
        every.append(cut)
    assert len(every) > 500
    assert cuts.num_sampled <= 5, "all but a few of the moments are gone through one by one"
    for number, cut in enumerate(drawn(every, check, seed=5)):
        folder = tmp_path / str(number)
        folder.mkdir()
        check.life(cut, folder, fake__state_bytes=state_bytes)


BROKEN = {
    broken.NeverFlushed: ("the key is torn", "a pin is damaged"),
    broken.NamesNeverFlushed: ("a pin is missing", "the key of a pin is missing"),
    broken.FoldersNeverFlushed: ("a pin is missing",),
    broken.FlushedTooLate: ("the key is torn", "a pin is damaged", "a pin is missing"),
}


@pytest.mark.parametrize("files", BROKEN)
def test_what_is_done_in_the_wrong_order_is_found(tmp_path: Path, files: type[SteadyFiles]) -> None:
    assert complaints(*told(held_once, tmp_path / "cut", files)) == {*BROKEN[files]}


def test_a_file_that_is_removed_before_its_unpinning_is_durable_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.loop.REMOVING", ())
    assert complaints(*told(held_once, tmp_path / "cut")) == {"a pin is missing"}


def test_a_sweep_that_does_not_wait_for_the_journal_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scheduler.loop.REMOVING", ())
    monkeypatch.setattr("scheduler.kvstore.KvStore.remove", lambda *_: None)

    def story(server: PowerServer) -> None:
        held_once(server)
        server.kill()

    assert complaints(*told(story, tmp_path / "cut")) == set()
    monkeypatch.setattr("scheduler.loop.LASTING", (events.ChainPinned,))
    assert complaints(*told(story, tmp_path / "swept")) == {"a pin is missing"}


def test_bytes_that_nobody_verifies_are_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cuts, check = told(held_once, tmp_path / "cut", broken.NeverFlushed)
    monkeypatch.setattr(OpenFile, "compare", lambda *_: None)
    assert "a file has other bytes" in complaints(cuts, check)


def test_what_nobody_sweeps_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuts, check = told(held_once, tmp_path / "cut")
    unknown = next(cut for cut in cuts if any(is_temporary(path) for path in cut.state))
    monkeypatch.setattr(BlockStore, "sweep", lambda *_: False)
    (tmp_path / "life").mkdir()
    with pytest.raises(AssertionError, match="unknown and there"):
        check.life(unknown, tmp_path / "life")


def is_temporary(path: str) -> bool:
    """Whether this is a file of the store that was not whole."""
    return path.startswith("kv/") and path.endswith(TEMPORARY_SUFFIX)
