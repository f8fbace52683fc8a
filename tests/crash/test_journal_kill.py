"""SIGKILL of the process that writes a journal: nothing acknowledged is lost, no file is half."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from journal.events import StateCarried
from journal.files import replacement_of
from journal.journal import Journal
from journal.reader import JournalReader
from tests.journal_child import MOMENTS, NUM_STEPS_BEFORE
from tests.journal_steps import Steps, request_id

ROOT = Path(__file__).resolve().parents[2]


def command(folder: Path, how: str) -> list[str]:
    return [sys.executable, "-m", "tests.journal_child", str(folder), how]


@pytest.mark.crash
def test_what_was_committed_is_there_after_a_kill(tmp_path: Path) -> None:
    acknowledged = 0
    with subprocess.Popen(command(tmp_path, "commit"), stdout=subprocess.PIPE, cwd=ROOT) as child:
        assert child.stdout is not None
        for _ in range(100):
            acknowledged = int(child.stdout.readline())
        child.kill()
    with JournalReader.open(tmp_path) as reader:
        read = list(reader.read())
    journal = Journal.open(tmp_path)
    assert list(journal.read()) == read
    assert journal.last_seq >= acknowledged
    tokens = list(range(journal.last_step - NUM_STEPS_BEFORE))
    assert journal.output_tokens(request_id(1))[0].tolist() == tokens
    doubled = [token for token in tokens for _ in range(2)]
    assert journal.output_tokens(request_id(2))[0].tolist() == doubled
    assert journal.verify() == []
    journal.close()


@pytest.mark.crash
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_kill_while_compacting_leaves_one_whole_journal(tmp_path: Path, moment: str) -> None:
    child = subprocess.run(command(tmp_path, moment), cwd=ROOT, check=False)
    assert child.returncode == -signal.SIGKILL
    journal = Journal.open(tmp_path)
    records = list(journal.read())
    assert isinstance(records[0].event, StateCarried) == (moment == "renamed")
    assert records[-1].step == NUM_STEPS_BEFORE + 12
    assert not replacement_of(journal.file).exists()
    assert journal.output_tokens(request_id(1))[0].tolist() == list(range(12))
    assert journal.verify() == []
    Steps(journal).start()
    assert journal.verify() == []
    journal.close()
