"""The name guard: all packages from one root, or one line that names what is in the way."""

from importlib.machinery import ModuleSpec
from importlib.metadata import Distribution
from pathlib import Path

import pytest

from tools import cli, nameguard
from tools.nameguard import PACKAGES, ROOT, NameTaken, check_names, owners_of


def spec_in(root: Path, name: str) -> ModuleSpec:
    spec = ModuleSpec(name, None, origin=str(root / name / "__init__.py"), is_package=True)
    assert spec.submodule_search_locations is not None
    return spec


def install(folder: Path, name: str, *files: str) -> Distribution:
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Name: {name}\nVersion: 1.0\n")
    (info / "RECORD").write_text("".join(f"{file},,\n" for file in files))
    for file in files:  # From Python 3.12 on, files that are only recorded don't count.
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).touch()
    return Distribution.at(info)


def test_this_installation_passes() -> None:
    check_names()
    assert {nameguard.root_of(spec_in(ROOT, name)) for name in PACKAGES} == {ROOT}


@pytest.mark.parametrize("taken", PACKAGES)
def test_a_package_from_elsewhere_is_refused(taken: str, tmp_path: Path) -> None:
    def find_spec(name: str) -> ModuleSpec:
        return spec_in(tmp_path if name == taken else ROOT, name)

    with pytest.raises(NameTaken, match=f"'{taken}' comes from {tmp_path}") as caught:
        check_names(find_spec)
    assert "uv tool install" in str(caught.value)


@pytest.mark.parametrize("spec", [None, ModuleSpec("api", None, is_package=True)])
def test_a_missing_package_is_refused(spec: ModuleSpec | None) -> None:
    with pytest.raises(NameTaken, match="'api' is missing"):
        check_names(lambda name: spec if name == "api" else spec_in(ROOT, name))


def test_the_distribution_in_the_way_is_named(tmp_path: Path) -> None:
    installed = [
        install(tmp_path, "other", "api/__init__.py", "api/x.py"),
        install(tmp_path, "mlx-fermata", "api/__init__.py"),
        install(tmp_path, "unrelated", "unrelated/api/__init__.py", "api.py"),
    ]
    assert owners_of("api", installed) == ["other"]


def test_the_command_line_refuses_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def taken() -> None:
        raise NameTaken("the package 'api' is taken")

    monkeypatch.setattr(cli, "check_names", taken)
    with pytest.raises(SystemExit) as caught:
        cli.main()
    assert caught.value.code == 2
    assert capsys.readouterr().err == "fermata: the package 'api' is taken\n"
