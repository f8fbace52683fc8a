"""Words: one word for one thing, and nothing that is not about the project.

The needles are put together from pieces, so that this file does not contain them.
"""

import ast
import re
from collections.abc import Iterator, Sequence

from tools.checks.source import Finding, Source

# Other projects' words for what is called here pause, request, block and step. Only names that this
# code binds are looked at: what it merely uses (`asyncio.Task`, `collections.abc.Sequence`, a
# keyword argument of somebody's function) was named by others.
BANNED = re.compile(
    r"park(s|ed|ing)?|suspend(s|ed|ing)?|suspension|swap(s|ped|ping)?|retract(s|ed|ing|ion)?"
    r"|pages?|paged|paging|sequences?|jobs?|tasks?"
)
WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")

ADDRESSES = re.compile(
    "|".join(
        re.escape(host + tail)
        for host, tail in (
            ("pypi", ".org"),
            ("pypi", ".python.org"),
            ("python", "hosted.org"),
            ("registry", ".npmjs"),
            ("conda.", "anaconda"),
            ("download.", "pytorch"),
        )
    )
)
ELSEWHERE = re.compile(
    r"(?<![\w.])/(wo" + r"rk|fa" + r"rm|ro" + r"ot)/"
    r"|\bsub" + r"agent|\bdeveloper ses" + r"sion|\bC" + r"EO\b|\bissue #?\d+\b"
)
UNFINISHED = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b|NotImplemented" + "Error")


def _bound(node: ast.AST) -> Iterator[str]:
    """The names that one node of the syntax gives to something."""
    match node:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.arg(arg=name) | ast.alias(asname=str(name)):
            yield name
        case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
            yield name
        case ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
            yield name
        case _:
            return


def _banned_in(name: str) -> Iterator[str]:
    return (word for word in WORD.findall(name) if BANNED.fullmatch(word.lower()))


def check_names(sources: Sequence[Source]) -> Iterator[Finding]:
    """Names with a banned word in them: of modules, classes, functions, arguments, variables."""
    for source in sources:
        if not source.is_python:
            continue
        for word in _banned_in(source.path):
            yield Finding(source.path, 1, f"the word '{word}' in the file's name")
        for node in ast.walk(source.tree):
            for name in _bound(node):
                for word in _banned_in(name):
                    line = getattr(node, "lineno", 1)
                    yield Finding(source.path, line, f"the word '{word}' in the name {name}")


def _matches(source: Source, pattern: re.Pattern[str], what: str) -> Iterator[Finding]:
    for number, line in enumerate(source.lines, 1):
        if found := pattern.search(line):
            yield Finding(source.path, number, f"{what}: {found[0]}")


def check_text(sources: Sequence[Source]) -> Iterator[Finding]:
    """Every text file: addresses of registries, and words about how and where it is written."""
    for source in sources:
        yield from _matches(source, ADDRESSES, "the address of a package registry")
        yield from _matches(source, ELSEWHERE, "not about the project")


def check_unfinished(sources: Sequence[Source]) -> Iterator[Finding]:
    """Python that says of itself that it is not finished."""
    for source in sources:
        if source.is_python:
            yield from _matches(source, UNFINISHED, "unfinished")
