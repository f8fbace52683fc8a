"""What every test that made a journal asks at its end: is it decided the same again?"""

from pathlib import Path

from journal.reader import JournalReader
from scheduler.replay import Replay


def assert_replays(path: Path) -> None:
    """Every step of the journal in this state folder or file comes out as it was recorded."""
    with JournalReader.open(path) as reader:
        replay = Replay(reader.read())
        assert list(replay.divergences()) == []
    assert replay.num_steps > 0
