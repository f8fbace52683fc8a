"""The one gate, the same on every machine: `python -m tools.check`.

Format, lint, types and import contracts by ready-made tools, the rest by tools/checks. Every check
runs, also after a failure; each finding is one line `file:line: what`; the exit status is 1 when
there is any.
"""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from tools import pins
from tools.checks import documents, habits, purity, sizes, words
from tools.checks.source import Finding, Source, read_tree

Rule = Callable[[Sequence[Source]], Iterable[Finding]]

RULES: tuple[Rule, ...] = (
    sizes.check_functions,
    sizes.check_files,
    sizes.check_core,
    purity.check_purity,
    purity.check_heavy,
    words.check_names,
    words.check_text,
    words.check_unfinished,
    habits.check_tests,
    habits.check_handlers,
    documents.check_present,
    documents.check_commands,
    documents.check_decisions,
)

BROKEN_IMPORT = re.compile(r"^\s*(?:-\s+)?(?P<importer>[\w.]+) -> (?P<imported>[\w.]+) \(l\.(\d+)")


class CheckError(Exception):
    """A tool of the gate did not run at all."""


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    """Runs a tool from the environment of this interpreter. Raises CheckError if it is missing."""
    program = Path(sys.executable).parent / command[0]
    try:
        return subprocess.run(
            (str(program), *command[1:]),
            env={**os.environ, "COLUMNS": "400"},  # Else long lines are broken in two.
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError as error:
        raise CheckError(f"{command[0]} is not installed: run `uv sync`") from error


def _relative(path: str) -> str:
    return str(Path(path).relative_to(Path.cwd()))


def _ruff(*arguments: str) -> Iterator[Finding]:
    result = _run("ruff", *arguments, "--output-format=json", ".")
    if result.returncode > 1:
        raise CheckError(result.stdout + result.stderr)
    for entry in json.loads(result.stdout):
        place = _relative(entry["filename"]), entry["location"]["row"]
        yield Finding(*place, f"{entry['code']}: {entry['message']}")


def check_format() -> Iterator[Finding]:
    """What the formatter would change."""
    return _ruff("format", "--check")


def check_lint() -> Iterator[Finding]:
    """What the linter says."""
    return _ruff("check")


def check_types() -> Iterator[Finding]:
    """What the type checker says."""
    result = _run("pyright", "--outputjson", "--pythonpath", sys.executable)
    if result.returncode > 1:
        raise CheckError(f"pyright: {result.stdout}{result.stderr}")
    for entry in json.loads(result.stdout)["generalDiagnostics"]:
        message = " ".join(entry["message"].split())
        yield Finding(_relative(entry["file"]), entry["range"]["start"]["line"] + 1, message)


def check_imports() -> Iterator[Finding]:
    """Imports against the contracts in pyproject.toml."""
    result = _run("lint-imports", "--no-cache")
    if result.returncode == 0:
        return
    found = [match for line in result.stdout.splitlines() if (match := BROKEN_IMPORT.match(line))]
    if not found:
        raise CheckError(f"lint-imports: {result.stdout}{result.stderr}")
    for match in found:
        module = Path(*match["importer"].split("."))
        path = str(module / "__init__.py" if module.is_dir() else module.with_suffix(".py"))
        what = f"imports {match['imported']} against a contract (see `lint-imports`)"
        yield Finding(path, int(match[3]), what)


def check_pins() -> Iterator[Finding]:
    """Pins that uv.lock does not confirm."""
    try:
        text, fresh = pins.fresh_text(Path())
    except pins.PinsError as error:
        yield Finding("pyproject.toml", 1, str(error))
        return
    if text != fresh:
        yield Finding("pyproject.toml", 1, "pins are stale: run `uv lock`, `python -m tools.pins`")


def check_rules() -> Iterator[Finding]:
    """The project's own rules."""
    sources = read_tree(Path())
    for rule in RULES:
        yield from rule(sources)


CHECKS = (check_rules, check_pins, check_format, check_lint, check_imports, check_types)


def main() -> int:
    """Runs every check from the root of the checkout and returns the exit status."""
    started = time.monotonic()
    findings: set[Finding] = set()
    for check in CHECKS:
        try:
            findings.update(check())
        except (CheckError, SyntaxError) as error:
            findings.add(Finding(check.__name__, 1, str(error)))
    for finding in sorted(findings):
        print(finding)
    seconds = time.monotonic() - started
    print(f"check: {len(findings)} findings by {len(CHECKS)} checks in {seconds:.0f} s")
    return int(bool(findings))


if __name__ == "__main__":
    sys.exit(main())
