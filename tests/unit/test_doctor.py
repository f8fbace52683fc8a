"""What the doctor makes of what it finds."""

import importlib.metadata
import json
import subprocess
from pathlib import Path

import pytest

from scheduler.settings import Settings
from tools import doctor
from tools.nameguard import NameTaken


def settings(state: Path, **groups: dict[str, object]) -> Settings:
    """Settings with this state folder."""
    return Settings.model_validate({"state": state, **groups})


@pytest.mark.parametrize(
    ("version", "level"),
    [((3, 10), "wrong"), ((3, 11), "ok"), ((3, 13), "ok"), ((3, 14), "wrong")],
)
def test_pythons(version: tuple[int, ...], level: str) -> None:
    assert doctor.python(version).level == level


@pytest.mark.parametrize(
    ("version", "level"),
    [((3, 36, 9), "wrong"), ((3, 37, 0), "note"), ((3, 51, 2), "note"), ((3, 51, 3), "ok")],
)
def test_sqlites(version: tuple[int, int, int], level: str) -> None:
    assert doctor.sqlite(version).level == level


def test_a_package_in_the_way_is_wrong() -> None:
    def check() -> None:
        raise NameTaken("the package 'api' comes from elsewhere")

    assert doctor.names(check).level == "wrong"
    assert doctor.names(lambda: None).level == "ok"


def test_a_missing_distribution_is_wrong() -> None:
    def version_of(name: str) -> str:
        if name == "mlx":
            return "1.2"
        raise importlib.metadata.PackageNotFoundError(name)

    assert [finding.level for finding in doctor.distributions(version_of)] == ["ok", "wrong"]


def test_a_folder_that_can_be_written_is_measured_and_left_as_it_was(tmp_path: Path) -> None:
    state = tmp_path / "deep" / "state"
    found = {finding.name: finding for finding in doctor.disk(settings(state))}
    assert found["state folder"].level == "ok"
    assert f"made at the first start, in {tmp_path}" in found["state folder"].text
    assert float(found["disk"].values["write_bytes_per_s"]) > 0
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_wrong(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    (finding,) = doctor.disk(settings(file))
    assert finding.level == "wrong"
    assert f"{file} cannot be written" in finding.text


@pytest.mark.parametrize(
    ("free_bytes", "level"), [(10**6, "wrong"), (10**9, "note"), (10**10, "ok")]
)
def test_free_space(free_bytes: int, level: str) -> None:
    assert doctor.free_space(free_bytes, keep_bytes=5 * 10**9).level == level


def test_the_device_says_what_it_is(tmp_path: Path) -> None:
    answer = json.dumps({"device": "Device(cpu, 0)", "blas": "stock", "float32_gflops": 8.0})
    device, blas = doctor.device(settings(tmp_path), lambda _: answer)
    assert (device.level, device.values["float32_gflops"]) == ("ok", 8.0)
    assert (blas.level, blas.values) == ("note", {"used": "stock"})
    assert "libopenblas0-pthread" in blas.text


def test_a_device_that_fails_is_wrong(tmp_path: Path) -> None:
    def ask(setting: str) -> str:
        raise subprocess.CalledProcessError(1, "device", stderr="Traceback\nno such library\n")

    (finding,) = doctor.device(settings(tmp_path), ask)
    assert (finding.level, finding.text) == ("wrong", "no such library")


def test_stock_by_choice_is_no_note() -> None:
    assert doctor.blas("stock", "stock").level == "ok"
    assert doctor.blas("openblas", "auto").level == "ok"
