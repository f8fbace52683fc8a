"""The documents that a stranger needs, and the commands that they promise."""

import re
from collections.abc import Iterator, Sequence

from tools.checks.source import Finding, Source

REQUIRED = (
    "ARCHITECTURE.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "DECISIONS.md",
    "LICENSE",
    "README.md",
)
ARCHITECTURE_LINES = 300
FIRST_COMMANDS = (
    "pip install -q uv && uv run fermata demo",
    "pip install -q uv && uv run pytest -n 2",
)
HEADING = re.compile(r"^## (\d+)\. ", re.MULTILINE)


def check_present(sources: Sequence[Source]) -> Iterator[Finding]:
    """Documents that are missing or too long."""
    present = {source.path: source for source in sources}
    for path in REQUIRED:
        if path not in present:
            yield Finding(path, 1, "is missing")
    if (source := present.get("ARCHITECTURE.md")) and len(source.lines) > ARCHITECTURE_LINES:
        what = f"{len(source.lines)} lines ({ARCHITECTURE_LINES} is the limit)"
        yield Finding(source.path, len(source.lines), what)


def fenced_lines(text: str) -> Iterator[tuple[int, str]]:
    """The lines inside fenced blocks with their numbers, without comments and empty lines."""
    inside = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            inside = not inside
        elif inside and line and not line.startswith(("#", " ", "\t")):
            yield number, line


def check_commands(sources: Sequence[Source]) -> Iterator[Finding]:
    """The first two fenced commands of the README are all the set-up there is."""
    for source in sources:
        if source.path != "README.md":
            continue
        first = [line for _, line in fenced_lines(source.text)][:2]
        if first != list(FIRST_COMMANDS):
            yield Finding(source.path, 1, f"its first commands are not {FIRST_COMMANDS}")


def check_decisions(sources: Sequence[Source]) -> Iterator[Finding]:
    """Decisions are numbered without gaps, so that each can be cited for good."""
    for source in sources:
        if source.path != "DECISIONS.md":
            continue
        numbers = [int(number) for number in HEADING.findall(source.text)]
        if numbers != list(range(1, len(numbers) + 1)):
            yield Finding(source.path, 1, f"its decisions are numbered {numbers}")
