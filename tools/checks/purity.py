"""Purity: the core sees what the journal has seen, so it may import next to nothing.

import-linter and ruff forbid known impure modules, also behind others. Here the list is the other
way round: what the core may import at all, and which built-ins and operators would let something in
that differs from one process to the next.
"""

import ast
from collections.abc import Iterator, Sequence

from tools.checks.source import CORE, Finding, Source, imported

ALLOWED = (
    "__future__",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "functools",
    "hashlib",
    "heapq",
    "itertools",
    "operator",
    "typing",
    "msgspec",
    "journal.events",
    "scheduler.parameters",
    *(path.removesuffix(".py").replace("/", ".") for path in CORE),
)

# Each of these reads or writes the outside, or differs between two processes (hash, id).
IMPURE_BUILTINS = frozenset(
    (
        "__import__",
        "breakpoint",
        "eval",
        "exec",
        "float",
        "globals",
        "hash",
        "id",
        "input",
        "open",
        "print",
        "vars",
    )
)

# mlx takes seconds to import and needs the machine that it was built for; a journal must be
# readable without it.
HEAVY = ("mlx", "mlx_lm", "mlx_vlm", "transformers")
HEAVY_ALLOWED = ("scheduler/engine/", "scheduler/kvcache/", "tools/bench", "tests/")


def _is_within(module: str, packages: Sequence[str]) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def _core_imports(source: Source) -> Iterator[Finding]:
    for module, line in imported(source.tree):
        if not _is_within(module, ALLOWED):
            yield Finding(source.path, line, f"the core imports {module}")


def _iterations(tree: ast.Module) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.comprehension):
            yield node.iter


def _is_set(node: ast.expr) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("set", "frozenset")
    return isinstance(node, ast.Set | ast.SetComp)


def _core_determinism(source: Source) -> Iterator[Finding]:
    for node in ast.walk(source.tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in IMPURE_BUILTINS:
                yield Finding(source.path, node.lineno, f"the core calls {name}()")
            case ast.Constant(value=float()):
                yield Finding(source.path, node.lineno, f"the core has a float, {node.value}")
            case ast.BinOp(op=ast.Div()) | ast.AugAssign(op=ast.Div()):
                yield Finding(source.path, node.lineno, "the core divides to a float; use //")
            case _:
                continue
    for node in _iterations(source.tree):
        if _is_set(node):
            yield Finding(source.path, node.lineno, "the core iterates over a set; sort it")


def check_purity(sources: Sequence[Source]) -> Iterator[Finding]:
    """What the core imports and calls."""
    for source in sources:
        if source.is_core:
            yield from _core_imports(source)
            yield from _core_determinism(source)


def check_heavy(sources: Sequence[Source]) -> Iterator[Finding]:
    """mlx outside of the engine, the KV cache, the benches and the tests."""
    for source in sources:
        if source.path.startswith(HEAVY_ALLOWED):
            continue
        for module, line in imported(source.tree):
            if _is_within(module, HEAVY):
                what = f"imports {module}, which only the engine, kvcache and bench may"
                yield Finding(source.path, line, what)
