"""Habits that hide failures: tests that assert nothing, handlers that catch everything."""

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence

from tools.checks.source import Finding, Function, Source

ASSERTING = re.compile(r"raises|warns|assert|check|verify|expect")

BROAD = ("Exception", "BaseException")

# Where catching everything is right, and how often: at the edges of the loop's and the engine's
# thread, any error of ours ends the process in a way that the journal explains.
EDGES = {"scheduler/engine/mlx_engine.py": 1, "scheduler/run.py": 1}


def _asserts(function: Function) -> bool:
    for node in ast.walk(function):
        if isinstance(node, ast.Assert):
            return True
        if isinstance(node, ast.Call) and ASSERTING.search(ast.unparse(node.func)):
            return True
    return False


def check_tests(sources: Sequence[Source]) -> Iterator[Finding]:
    """Tests without an assertion of their own or a call of something that asserts."""
    for source in sources:
        if not source.path.startswith("tests/"):
            continue
        for function in source.functions():
            if function.name.startswith("test_") and not _asserts(function):
                yield Finding(source.path, function.lineno, f"{function.name} asserts nothing")


def _is_broad(node: ast.expr | None) -> bool:
    if isinstance(node, ast.Tuple):
        return any(_is_broad(element) for element in node.elts)
    return node is None or ast.unparse(node).removeprefix("builtins.") in BROAD


def _broad_lines(tree: ast.Module) -> Iterator[int]:
    for node in ast.walk(tree):
        match node:
            case ast.ExceptHandler(type=caught) if _is_broad(caught):
                yield node.lineno
            case ast.Call(args=arguments) if ast.unparse(node.func).endswith("suppress"):
                if any(_is_broad(argument) for argument in arguments):
                    yield node.lineno
            case _:
                continue


def check_handlers(sources: Sequence[Source]) -> Iterator[Finding]:
    """Handlers of every exception there is, outside of the edges."""
    left = Counter(EDGES)
    for source in sources:
        for line in sorted(_broad_lines(source.tree)):
            left[source.path] -= 1
            if left[source.path] < 0:
                yield Finding(source.path, line, "catches every exception")
