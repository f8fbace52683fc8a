"""`fermata service`: what it prints is understood by what reads it, and starts a server."""

import os
import plistlib
import shlex
import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from tools import service
from tools.service_parts import Kind
from tools.systemd_unit import quoted

VERIFY_LIMIT_S = 30


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings of whoever runs the tests would be refused."""
    for name in [name for name in os.environ if name.upper().startswith("FERMATA_")]:
        monkeypatch.delenv(name)


def run(
    kind: Kind, state: Path, *, for_user: bool = False, config: Path | None = None, **more: object
) -> int:
    overrides = {"model": "fake", "state": state, "server.port": 0, **more}
    return service.run(service.Wanted(kind, for_user, config, overrides))


def printed(
    capfdbinary: pytest.CaptureFixture[bytes], kind: Kind, state: Path, **more: object
) -> bytes:
    """What is printed for a service with these options."""
    assert run(kind, state, **more) == 0  # pyright: ignore[reportArgumentType]
    return capfdbinary.readouterr().out


def settings_of(unit: str) -> dict[str, str]:
    """The assignments of a unit; none is made twice."""
    lines = [line for line in unit.splitlines() if line and line[0] not in "#["]
    assignments = dict(line.split("=", 1) for line in lines)
    assert len(assignments) == len(lines)
    return assignments


def words_of(exec_start: str) -> list[str]:
    """A command line as systemd splits it: inside double quotes, backslashes are as in a shell."""
    words = [word.replace("%%", "%") for word in shlex.split(exec_start)]
    assert words[0].startswith(":")  # a dollar is a dollar
    return [words[0][1:], *words[1:]]


def start_and_stop(command: list[str]) -> None:
    """The command is a server that listens, and stops cleanly."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("listening on http://127.0.0.1:")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=20)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 0


@pytest.mark.parametrize("for_user", [False, True])
def test_systemd_accepts_the_unit(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], for_user: bool
) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("there is no systemd-analyze here")
    state = tmp_path / "state 100%n $HOME ;"
    file = tmp_path / "fermata.service"
    file.write_bytes(printed(capfdbinary, Kind.SYSTEMD, state, for_user=for_user))
    result = subprocess.run(
        ("systemd-analyze", *(["--user"] if for_user else []), "verify", str(file)),
        env=os.environ | {"XDG_RUNTIME_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=VERIFY_LIMIT_S,
        check=False,
    )
    about_it = [line for line in result.stderr.splitlines() if file.name in line]
    assert (result.returncode, about_it) == (0, []), result.stderr


def test_unit_starts_a_server_and_again_after_any_death(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    config = tmp_path / "a file.toml"
    config.write_text("[server]\ndrain_limit_ms = 120_500\nhold_limit_ms = 30_000\n")
    state = tmp_path / "100% 'of' $HOME \\ \""
    unit = printed(capfdbinary, Kind.SYSTEMD, state, for_user=True, config=config).decode()
    settings = settings_of(unit)
    assert (settings["Restart"], settings["RestartPreventExitStatus"]) == ("always", "2")
    assert (settings["StartLimitIntervalSec"], settings["KillSignal"]) == ("0", "SIGTERM")
    assert int(settings["RestartSec"]) < 5
    assert int(settings["TimeoutStopSec"]) > 150
    command = words_of(settings["ExecStart"])
    assert command[command.index("--config") + 1] == str(config)
    start_and_stop(command)
    assert (state / "journal.db").exists()


def test_unit_of_the_system_leaves_state_and_devices_open(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    unit = printed(capfdbinary, Kind.SYSTEMD, Path("st ate"), **{"server.port": 80}).decode()
    settings = settings_of(unit)
    assert settings["ReadWritePaths"] == f'"-{tmp_path}/st ate"'
    assert settings["AmbientCapabilities"] == "CAP_NET_BIND_SERVICE"
    assert settings["WantedBy"] == "multi-user.target"
    assert not {"PrivateDevices", "ProtectClock", "DeviceAllow", "DevicePolicy"} & set(settings)
    assert "MemoryDenyWriteExecute" not in settings


@pytest.mark.parametrize(("folder", "expected"), [("/tmp/state", "no"), ("/srv/state", "yes")])
def test_temporary_folders_stay_in_sight_of_a_state_that_lies_there(
    folder: str,
    expected: str,
    capfdbinary: pytest.CaptureFixture[bytes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("sys.executable", "/opt/venv/bin/python")
    unit = printed(capfdbinary, Kind.SYSTEMD, Path(folder)).decode()
    assert settings_of(unit)["PrivateTmp"] == expected


def test_property_list_starts_a_server_and_again_after_a_failure(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    state = tmp_path / '<state> & "100%"'
    listed = plistlib.loads(printed(capfdbinary, Kind.LAUNCHD, state))
    assert listed["KeepAlive"] == {"SuccessfulExit": False}
    assert listed["ThrottleInterval"] < 10 < listed["ExitTimeOut"]
    assert listed["Umask"] == 0o077
    assert Path(listed["StandardErrorPath"]).is_absolute()
    assert listed["UserName"] == service.user_name(os.getuid())
    start_and_stop(listed["ProgramArguments"])
    assert (state / "journal.db").exists()


@pytest.mark.parametrize("kind", Kind)
def test_newline_begins_no_second_line(
    kind: Kind, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(kind, tmp_path / "one\nExecStart=/bin/sh") == 2
    said = capfd.readouterr()
    assert (said.out, said.err.count("\n")) == ("", 1)
    assert "one\\nExecStart=" in said.err


def test_what_a_server_would_refuse_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(Kind.SYSTEMD, tmp_path, model="no-such-model") == 2
    assert "'no-such-model'" in capfd.readouterr().err
    assert run(Kind.SYSTEMD, tmp_path, config=tmp_path / "none.toml") == 2
    assert "none.toml is no file" in capfd.readouterr().err
    assert run(Kind.SYSTEMD, tmp_path / 'quo"te') == 2
    assert "choose another folder" in capfd.readouterr().err


def test_setting_of_the_environment_would_be_lost(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FERMATA_STATE", "taken over by the option of that name")
    assert run(Kind.SYSTEMD, tmp_path) == 0
    monkeypatch.setenv("FERMATA_SERVER__API_KEY", "secret")
    capfd.readouterr()
    assert run(Kind.SYSTEMD, tmp_path) == 2
    said = capfd.readouterr().err
    assert "FERMATA_SERVER__API_KEY" in said
    assert "secret" not in said


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("/opt/fermata-1.0/bin", "/opt/fermata-1.0/bin"),
        ("two words", '"two words"'),
        ("", '""'),
        (";", '";"'),
        ("100%", "100%%"),
        ('say "no"', '"say \\"no\\""'),
        ("back\\slash", '"back\\\\slash"'),
    ],
)
def test_words_are_quoted_as_systemd_reads_them(word: str, expected: str) -> None:
    assert quoted(word) == expected
