"""`fermata demo`, as a user runs it."""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from tools.server_process import command

TABLE = re.compile(r"^  ([ABC]) +\d+\.\d s( +\d+ \+ \d+){3} +\d x .* finished, ", re.MULTILINE)
PAUSE = re.compile(r"^  [ABC] +(\w+) +(?:prefilling|decoding) .* resumed, after the kill$", re.M)


def start(tmp_path: Path, *options: str) -> subprocess.Popen[str]:
    """The demo, with a folder of its own for what it leaves behind."""
    return subprocess.Popen(
        command("demo", *options),
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.crash
@pytest.mark.engine
@pytest.mark.timeout(180)
def test_all_its_checks_hold_on_the_tiny_model(tmp_path: Path) -> None:
    with start(tmp_path, "--model", "tiny-plain", "--blas", "stock") as demo:
        output, _ = demo.communicate()
    assert demo.returncode == 0, output
    assert re.search(r"^  [ABC] is paused: .* tokens on disk, .* given back$", output, re.M)
    assert PAUSE.findall(output), "one is held when the server dies, and goes on in its next life"
    assert set(PAUSE.findall(output)) <= {"high", "emergency", "no_room"}, "by memory, not by hand"
    assert [found[0] for found in TABLE.findall(output)] == ["A", "B", "C"]
    assert re.search(r"^ok      replay: \d+ steps, \d+ decisions, 0 divergences$", output, re.M)
    assert output.count("equal those of an uninterrupted run") == 3
    restored = re.findall(r"^ok      .: of .*known tokens (\d+) were restored", output, re.M)
    assert len(restored) == 3
    assert min(map(int, restored)) > 0
    assert "FAILED" not in output
    assert "\x1b" not in output, "a pipe gets plain lines"
    assert list(tmp_path.glob("fermata-*")) == []


@pytest.mark.crash
@pytest.mark.timeout(180)
def test_the_fake_model_has_no_text_to_compare(tmp_path: Path) -> None:
    with start(tmp_path, "--model", "fake") as demo:
        output, _ = demo.communicate()
    assert demo.returncode == 0, output
    assert output.count("not comparable with an uninterrupted run") == 3
    assert re.search(r"\d+ checks, all hold; 3 not comparable$", output.strip())
    assert PAUSE.findall(output)


@pytest.mark.timeout(60)
def test_an_interrupt_leaves_neither_a_process_nor_a_folder(tmp_path: Path) -> None:
    with start(tmp_path, "--model", "fake") as demo:
        assert demo.stdout is not None
        line = demo.stdout.readline()
        found = re.search(r"process (\d+) serves fake", line)
        assert found, line
        demo.send_signal(signal.SIGINT)
        rest = demo.stdout.read()
    assert demo.returncode == 130
    assert "interrupted" in rest
    assert "Traceback" not in rest
    with pytest.raises(ProcessLookupError):
        os.kill(int(found[1]), 0)
    assert list(tmp_path.glob("fermata-*")) == []


@pytest.mark.timeout(60)
def test_a_server_that_does_not_start_says_why(tmp_path: Path) -> None:
    with start(tmp_path, "--model", "nonesuch") as demo:
        output, _ = demo.communicate()
    assert demo.returncode == 1
    assert "the demo failed: the server ended with status 2" in output
    assert "  server: fermata: model 'nonesuch' is neither a folder nor one of" in output
    assert "Traceback" not in output
