"""Each rule of the gate finds a bad sample, and lets the good neighbour of it pass."""

import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from tools import check
from tools.check import Rule
from tools.checks import documents, habits, purity, sizes, words
from tools.checks.source import Source, read_tree


def found(rule: Rule, files: Mapping[str, str]) -> list[str]:
    return [str(finding) for finding in rule([Source.of(*item) for item in files.items()])]


def body(count: int) -> str:
    return "    x = 1\n" * count


def dispatch(name: str, arm: str) -> str:
    arms = "".join(f"        case {number}:\n            {arm}\n" for number in range(40))
    return f"def {name}(x):\n    '''Hands over.'''\n    match x:\n{arms}"


def test_a_long_function_is_found() -> None:
    good, bad = "def f():\n" + body(69), "\ndef g():\n" + body(70)
    assert found(sizes.check_functions, {"a.py": good + bad}) == [
        "a.py:72: g has 71 lines (70 is the limit)"
    ]


def test_one_dispatch_is_exempt_and_a_second_is_not() -> None:
    text = dispatch("f", "return g(x)")
    assert found(sizes.check_functions, {"a.py": text}) == []
    assert found(sizes.check_functions, {"a.py": text, "b.py": text}) == [
        "b.py:1: f has 83 lines (70 is the limit)"
    ]


@pytest.mark.parametrize("arm", ["x += 1", "return x", "g(x); h(x)"])
def test_an_arm_that_is_not_one_call_makes_no_dispatch(arm: str) -> None:
    assert len(found(sizes.check_functions, {"a.py": dispatch("f", arm)})) == 1


def test_a_long_file_is_found() -> None:
    files = {"a.py": "x = 1\n" * 400, "b.py": "x = 1\n" * 401, "c.md": "x\n" * 401}
    assert found(sizes.check_files, files) == ["b.py:401: 401 lines (400 is the limit)"]


def test_a_large_core_is_found() -> None:
    third = "x = 1\n" * (sizes.CORE_LINES // 3)
    files = {f"scheduler/{name}.py": third for name in ("loop", "policy", "state", "evolve")}
    assert found(sizes.check_core, files) == []
    more = "x = 1\n" * (sizes.CORE_LINES % 3 + 1)
    limit = sizes.CORE_LINES
    assert found(sizes.check_core, {**files, "scheduler/memory.py": more}) == [
        f"scheduler/policy.py:1: the pure core has {limit + 1} lines in all ({limit} is the limit)"
    ]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import time", "imports time"),
        ("from os import path", "imports os.path"),
        ("def f():\n    import random", "imports random"),
        ("import journal.database", "imports journal.database"),
        ("from scheduler import loop", "imports scheduler.loop"),
        ("x = hash('a')", "calls hash()"),
        ("x = open('a')", "calls open()"),
        ("x = 0.5", "has a float, 0.5"),
        ("x = a / b", "divides to a float; use //"),
        ("x /= b", "divides to a float; use //"),
        ("for x in {1, 2}: pass", "iterates over a set; sort it"),
        ("x = [y for y in set(z)]", "iterates over a set; sort it"),
    ],
)
def test_impurity_in_the_core_is_found(text: str, what: str) -> None:
    line = text.count("\n") + 1
    expected = [f"scheduler/policy.py:{line}: the core {what}"]
    assert found(purity.check_purity, {"scheduler/policy.py": text}) == expected
    assert found(purity.check_purity, {"scheduler/loop.py": text}) == []


def test_the_core_may_import_its_own_and_plain_data() -> None:
    text = "import msgspec\nfrom journal.events import A\nfrom scheduler.state import B\nx = 1 // 2"
    assert found(purity.check_purity, {"scheduler/policy.py": text}) == []


@pytest.mark.parametrize("module", ["mlx.core", "mlx_lm", "mlx_vlm.models", "transformers"])
def test_mlx_outside_of_the_engine_is_found(module: str) -> None:
    text = f"import {module}"
    what = f"imports {module}, which only the engine, kvcache and bench may"
    assert found(purity.check_heavy, {"scheduler/engine/a.py": text, "tools/ps.py": text}) == [
        f"tools/ps.py:1: {what}"
    ]


@pytest.mark.parametrize(
    ("text", "word", "name"),
    [
        ("def park_row(): ...", "park", "park_row"),
        ("class SwapSpace: ...", "Swap", "SwapSpace"),
        ("num_pages = 1", "pages", "num_pages"),
        ("self.jobs = []", "jobs", "jobs"),
        ("def f(suspended): ...", "suspended", "suspended"),
        ("import x as task", "task", "task"),
        ("for sequence in x: ...", "sequence", "sequence"),
        ("MAX_RETRACTIONS = RETRACTED = 1", "RETRACTED", "RETRACTED"),
    ],
)
def test_a_banned_word_in_a_name_is_found(text: str, word: str, name: str) -> None:
    assert found(words.check_names, {"a.py": text}) == [
        f"a.py:1: the word '{word}' in the name {name}"
    ]


def test_a_banned_word_in_the_name_of_a_file_is_found() -> None:
    assert found(words.check_names, {"a/page_pool.py": ""}) == [
        "a/page_pool.py:1: the word 'page' in the file's name"
    ]


@pytest.mark.parametrize(
    "text",
    [
        "from collections.abc import Sequence",
        "x: asyncio.Task[None] = asyncio.create_task(f())",
        "with asyncio.TaskGroup() as group: group.create_task(f())",
        "connection.execute('PRAGMA page_size')",
        "call(page=1)",
        "sparks = homepage = multitasking = swapfile = 1",
        "'''Each page is swapped.'''",
    ],
)
def test_names_of_others_and_longer_words_pass(text: str) -> None:
    assert found(words.check_names, {"a.py": text}) == []


@pytest.mark.parametrize(
    "text",
    [
        "https://py" + "pi.org/simple",
        "https://files.python" + "hosted.org/x",
        "read it from /wo" + "rk/shared",
        "written by a sub" + "agent",
        "see iss" + "ue #12",
        "as iss" + "ue 7 says",
    ],
)
def test_words_about_elsewhere_are_found(text: str) -> None:
    findings = found(words.check_text, {"a.md": f"Fine.\n{text}\n"})
    assert len(findings) == 1
    assert findings[0].startswith("a.md:2: ")


def test_words_about_the_project_pass() -> None:
    text = "https://example.org/work/x, networks/work, a session of an agent, the issue with it"
    assert found(words.check_text, {"a.md": text}) == []


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME", "NotImplemented" + "Error"])
def test_unfinished_code_is_found(word: str) -> None:
    files = {"a.py": f"# {word}: later", "a.md": word}
    assert found(words.check_unfinished, files) == [f"a.py:1: unfinished: {word}"]


def test_a_test_that_asserts_nothing_is_found() -> None:
    good = "def test_a():\n    with pytest.raises(E): f()\ndef test_b():\n    assert_close(x)\n"
    bad = "async def test_c():\n    await f()\n"
    assert found(habits.check_tests, {"tests/test_a.py": good + bad, "a.py": bad}) == [
        "tests/test_a.py:5: test_c asserts nothing"
    ]


@pytest.mark.parametrize(
    "caught", ["except Exception:", "except:", "except (KeyError, BaseException) as error:"]
)
def test_a_handler_of_everything_is_found(caught: str) -> None:
    text = f"try: f()\n{caught} g()\n"
    assert found(habits.check_handlers, {"a.py": text}) == ["a.py:2: catches every exception"]
    assert found(habits.check_handlers, {"scheduler/run.py": text + text}) == [
        "scheduler/run.py:4: catches every exception"
    ]


def test_suppressing_everything_is_found_and_a_typed_handler_passes() -> None:
    text = "try: f()\nexcept KeyError: g()\nwith contextlib.suppress(Exception): f()\n"
    assert found(habits.check_handlers, {"a.py": text}) == ["a.py:3: catches every exception"]


def test_missing_and_long_documents_are_found() -> None:
    files: dict[str, str] = dict.fromkeys(documents.REQUIRED, "x\n")
    assert found(documents.check_present, files) == []
    del files["LICENSE"]
    files["ARCHITECTURE.md"] = "x\n" * 301
    assert found(documents.check_present, files) == [
        "LICENSE:1: is missing",
        "ARCHITECTURE.md:301: 301 lines (300 is the limit)",
    ]


def test_other_first_commands_in_the_readme_are_found() -> None:
    blocks = (f"Run it:\n\n```\n# x\n{command}\n```" for command in documents.FIRST_COMMANDS)
    good = "\n".join(blocks)
    assert found(documents.check_commands, {"README.md": good}) == []
    assert len(found(documents.check_commands, {"README.md": f"```\nmake\n```\n{good}"})) == 1


def test_gaps_between_decisions_are_found() -> None:
    assert found(documents.check_decisions, {"DECISIONS.md": "## 1. A\n\n## 2. B\n"}) == []
    assert found(documents.check_decisions, {"DECISIONS.md": "## 1. A\n\n## 3. B\n"}) == [
        "DECISIONS.md:1: its decisions are numbered [1, 3]"
    ]


def test_read_tree_takes_new_files_and_leaves_out_ignored_and_deleted_ones(tmp_path: Path) -> None:
    subprocess.run(("git", "init", "-q", tmp_path), check=True)
    for name, content in {"a.py": b"x = 1\n", "b.py": b"", "c.bin": b"\xff\xfe", "d": b""}.items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / ".gitignore").write_text("d\n")
    subprocess.run(("git", "-C", tmp_path, "add", "b.py"), check=True)
    (tmp_path / "b.py").unlink()
    assert [source.path for source in read_tree(tmp_path)] == [".gitignore", "a.py"]


def test_main_prints_each_finding_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    source = Source.of("a.py", "x = 1\n" * 401)
    monkeypatch.setattr(check, "CHECKS", (lambda: sizes.check_files([source]),))
    assert check.main() == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "a.py:401: 401 lines (400 is the limit)"
    assert lines[1].startswith("check: 1 findings by 1 checks")
    monkeypatch.setattr(check, "CHECKS", ())
    assert check.main() == 0
