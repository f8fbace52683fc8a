"""Draws the life of a request, from the table in scheduler/request.py, into ARCHITECTURE.md.

`python -m tools.diagram` writes the diagram, as mermaid text, between its two markers. With
`--check` nothing is written, and the exit status is 1 when the document shows another table.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from scheduler.request import ENDS, TRANSITIONS, Phase

BEGIN = "<!-- states: begin -->"
END = "<!-- states: end -->"
BIRTH = "request_received"


class DiagramError(Exception):
    """The diagram cannot be put into the document; the message says what to do."""


def diagram_of(transitions: Mapping[tuple[Phase, str], Phase]) -> str:
    """The table as a mermaid state diagram. Kinds that lead the same way share an arrow."""
    arrows: dict[tuple[Phase, Phase], list[str]] = {}
    for (phase, kind), target in transitions.items():
        arrows.setdefault((phase, target), []).append(kind)
    lines = [f"[*] --> {Phase.WAITING.value}: {BIRTH}"]
    for (phase, target), kinds in arrows.items():
        lines.append(f"{phase.value} --> {target.value}: {', '.join(kinds)}")
    lines += [f"{phase.value} --> [*]" for phase in ENDS]
    return "stateDiagram-v2\n" + "".join(f"    {line}\n" for line in lines)


def with_diagram(text: str, diagram: str) -> str:
    """The document with its diagram replaced. Raises DiagramError where a marker is missing."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise DiagramError(f"put the lines {BEGIN!r} and {END!r} where the diagram belongs")
    return f"{before}{BEGIN}\n```mermaid\n{diagram}```\n{END}{after}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Writes the diagram, or compares it; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.diagram", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing, exit 1 when stale")
    parser.add_argument("--file", type=Path, default=Path("ARCHITECTURE.md"))
    options = parser.parse_args(arguments)
    try:
        text = options.file.read_text()
        fresh = with_diagram(text, diagram_of(TRANSITIONS))
    except (OSError, DiagramError) as error:
        print(f"diagram: {options.file}: {error}", file=sys.stderr)
        return 2
    if options.check:
        if text != fresh:
            print("diagram: stale; run `python -m tools.diagram`", file=sys.stderr)
        return int(text != fresh)
    options.file.write_text(fresh)
    return 0


if __name__ == "__main__":
    sys.exit(main())
