"""What a rule reads and what it reports."""

import ast
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef

CORE = tuple(
    f"scheduler/{name}.py"
    for name in (
        "request",
        "state",
        "evolve",
        "policy",
        "draft",
        "admission",
        "saving",
        "eviction",
        "feeding",
        "chains",
        "runs",
        "memory",
        "prefix",
        "effects",
        "invariants",
        "index_invariants",
        "leaving",
        "leases",
        "orphans",
        "adopting",
        "losses",
        "usage",
        "holding",
        "readings",
        "pausing",
        "relief",
        "resuming",
        "deadlines",
    )
)


@dataclass(frozen=True, order=True)
class Finding:
    """One place that breaks a rule."""

    path: str
    line: int
    what: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: {self.what}"


@dataclass(frozen=True)
class Source:
    """One text file of the tree; `tree` is its syntax where it is Python, and empty otherwise."""

    path: str
    text: str
    tree: ast.Module

    @classmethod
    def of(cls, path: str, text: str) -> "Source":
        """Parses a file. Raises SyntaxError when a Python file is none."""
        return cls(path, text, ast.parse(text if path.endswith(".py") else "", path))

    @property
    def is_python(self) -> bool:
        return self.path.endswith(".py")

    @property
    def is_core(self) -> bool:
        return self.path in CORE

    @property
    def lines(self) -> list[str]:
        return self.text.splitlines()

    def functions(self) -> Iterator[Function]:
        """Every function and method, nested ones too."""
        return (node for node in ast.walk(self.tree) if isinstance(node, Function))


def imported(tree: ast.Module) -> Iterator[tuple[str, int]]:
    """Every module that is imported anywhere in a file, with its line.

    `from a import b` counts as `a.b`, because b may be a module.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((f"{node.module}.{alias.name}", node.lineno) for alias in node.names)


def read_tree(root: Path) -> list[Source]:
    """Every text file that git tracks or would track, in the order of their paths.

    Raises CalledProcessError outside of a git checkout.
    """
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard")
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    sources: list[Source] = []
    for path in sorted(set(listed.stdout.splitlines())):
        try:
            sources.append(Source.of(path, (root / path).read_text(encoding="utf-8")))
        except (UnicodeDecodeError, FileNotFoundError):
            continue  # A picture or a database, or a file that was deleted and not yet committed.
    return sources
