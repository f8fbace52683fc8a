"""The points at which a process may be ended: the list is closed, and no hook is installed."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from journal import crashpoints, events
from journal.crashpoints import EFFECTS, POINTS, reach, reach_kinds
from journal.events import kind_of
from scheduler import effects

ROOT = Path(__file__).resolve().parents[2]
REACHES = ("reach", "reach_kinds", "between")
ANY = "[a-z_]+"


def pattern_of(node: ast.expr) -> str:
    """What names an argument can come to: a constant, or one with gaps."""
    match node:
        case ast.Constant(value=str(text)):
            return re.escape(text)
        case ast.JoinedStr(values=parts):
            return "".join(pattern_of(part) for part in parts)
        case _:
            return ANY


def called_with(path: Path) -> Iterator[str]:
    """The patterns of all points that a file says it comes to."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Call) or ast.unparse(node.func) not in REACHES:
            continue
        pattern = pattern_of(node.args[0])
        if ast.unparse(node.func) == "reach_kinds":
            yield pattern + ANY
        elif ast.unparse(node.func) == "between":
            what = pattern_of(node.args[1])
            yield from (rf"file\.{pattern}\.{when}\.{what}" for when in ("before", "after"))
        elif pattern != ANY:
            yield pattern


def patterns() -> list[str]:
    """All of them, in production code."""
    folders = ("journal", "scheduler", "api", "migrations")
    files = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [found for path in files for found in called_with(path)]


def test_code_comes_to_the_points_that_are_listed_and_to_no_others() -> None:
    found = patterns()
    assert len(found) > 60
    unknown = [p for p in found if not any(re.fullmatch(p, name) for name in POINTS)]
    assert unknown == [], "not in POINTS"
    never = [name for name in POINTS if not any(re.fullmatch(p, name) for p in found)]
    assert never == [], "no code says that it comes there"


def test_each_kind_of_event_and_each_effect_has_its_points() -> None:
    kinds = {name.split(".")[2] for name in POINTS if name.startswith("commit.before.")}
    assert kinds == set(events.KINDS) - {"state_carried"}
    assert kinds == {name.split(".")[2] for name in POINTS if name.startswith("commit.after.")}
    classes = (effects.Effect | effects.EngineEffect).__args__
    assert sorted(kind_of(each.__name__) for each in classes) == sorted(EFFECTS)


def test_nothing_happens_at_a_point_unless_a_hook_is_installed() -> None:
    seen: list[str] = []
    assert not crashpoints.is_armed()
    reach("step.done")
    crashpoints.install(seen.append)
    try:
        assert crashpoints.is_armed()
        reach("step.done")
        reach_kinds("commit.before.", [events.ClockTicked()])
        with pytest.raises(AssertionError):
            crashpoints.install(seen.append)
    finally:
        crashpoints.remove()
    reach("step.done")
    assert seen == ["step.done", "commit.before.clock_ticked"]


def test_nobody_that_serves_installs_a_hook() -> None:
    installing = re.compile(r"crashpoints\.install|import .*\binstall\b")
    folders = ("journal", "scheduler", "api", "migrations")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    files = [path for path in files if ROOT / "scheduler" / "simulation" not in path.parents]
    assert [p for p in files if installing.search(p.read_text())] == []
