"""Standard output that cannot be written: no command ends with a traceback."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.loop_driver import LoopDriver

MAIN = "from tools.cli import main; main()"
NO_SPACE = "fermata: cannot write the output: No space left on device\n"

COMMANDS = (
    ("audit", "phases", "{}", "--format", "csv"),
    ("replay", "{}", "--json"),
    ("journal", "verify", "{}"),
    ("--help",),
)
"""Of each kind one: rows as they come, one object at the end, a status of its own, typer's own."""


@pytest.fixture(scope="module")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    driver = LoopDriver(tmp_path_factory.mktemp("state"))
    driver.submit("hello", 5)
    driver.run_until_idle()
    driver.journal.close()
    return driver.journal.file


def ended(command: tuple[str, ...], journal: Path, output: int) -> tuple[int, str]:
    """The status and what is on stderr."""
    arguments = [word.format(journal) for word in command]
    result = subprocess.run(
        (sys.executable, "-c", MAIN, *arguments),
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    return result.returncode, result.stderr


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_full_disk_is_one_line(command: tuple[str, ...], journal: Path) -> None:
    with Path("/dev/full").open("w") as full:
        assert ended(command, journal, full.fileno()) == (2, NO_SPACE)


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command[0])
def test_a_closed_pipe_is_quiet(command: tuple[str, ...], journal: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert ended(command, journal, writer) == (141, "")
    finally:
        os.close(writer)


def test_what_does_not_fit_into_the_buffer_is_the_same(tmp_path: Path) -> None:
    """It fails while the command prints, and not at its end."""
    script = (
        "import sys; from tools.output import checked_output\n"
        "with checked_output():\n"
        "    print('x' * 10**6); open(sys.argv[1], 'w').close()"
    )
    reader, writer = os.pipe()
    os.close(reader)
    arguments = (sys.executable, "-c", script, str(tmp_path / "after"))
    result = subprocess.run(
        arguments, stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")
    assert not (tmp_path / "after").exists(), "it ends where nobody reads any more"


def test_a_mistake_of_ours_is_still_shown() -> None:
    script = (
        "from tools.output import checked_output\n"
        "with checked_output():\n"
        "    print('so far'); raise OSError('ours')"
    )
    result = subprocess.run(
        (sys.executable, "-c", script), capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (1, "so far\n")
    assert "OSError: ours" in result.stderr
