"""Sizes: what a reader can hold in the head."""

import ast
from collections.abc import Iterator, Sequence

from tools.checks.source import Finding, Function, Source

FUNCTION_LINES = 70
FILE_LINES = 400
CORE_LINES = 5_600
DISPATCHES = 1


def _is_one_call(statement: ast.stmt) -> bool:
    """Whether an arm's body only hands over to something else: a call, or a call returned."""
    return isinstance(statement, ast.Expr | ast.Return) and isinstance(statement.value, ast.Call)


def is_dispatch(function: Function) -> bool:
    """Whether a function is one `match` after its docstring, each arm of it one call."""
    body = function.body[1:] if ast.get_docstring(function) is not None else function.body
    if len(body) != 1 or not isinstance(body[0], ast.Match):
        return False
    return all(len(case.body) == 1 and _is_one_call(case.body[0]) for case in body[0].cases)


def _long_functions(source: Source) -> Iterator[tuple[Function, int]]:
    for function in source.functions():
        count = (function.end_lineno or function.lineno) - function.lineno + 1
        if count > FUNCTION_LINES:
            yield function, count


def check_functions(sources: Sequence[Source]) -> Iterator[Finding]:
    """Long functions, but for the one dispatch over the closed union of events."""
    dispatches = 0
    for source in sources:
        for function, count in _long_functions(source):
            dispatches += is_dispatch(function)
            if is_dispatch(function) and dispatches <= DISPATCHES:
                continue
            what = f"{function.name} has {count} lines ({FUNCTION_LINES} is the limit)"
            yield Finding(source.path, function.lineno, what)


def check_files(sources: Sequence[Source]) -> Iterator[Finding]:
    """Long Python files."""
    for source in sources:
        if source.is_python and len(source.lines) > FILE_LINES:
            what = f"{len(source.lines)} lines ({FILE_LINES} is the limit)"
            yield Finding(source.path, len(source.lines), what)


def check_core(sources: Sequence[Source]) -> Iterator[Finding]:
    """The core as a whole."""
    core = [source for source in sources if source.is_core]
    count = sum(len(source.lines) for source in core)
    if count > CORE_LINES:
        what = f"the pure core has {count} lines in all ({CORE_LINES} is the limit)"
        yield Finding(core[0].path, 1, what)
