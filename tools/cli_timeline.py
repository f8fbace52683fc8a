"""`fermata timeline`."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tools.cli_options import JournalArgument

OutputOption = Annotated[
    Path, typer.Option("--output", "-o", help="The file to write; one that is there is replaced.")
]
SinceOption = Annotated[
    str | None,
    typer.Option(help="From this event or time on: a seq, 2026-01-31T12:00 (UTC), or 90m."),
]
UntilOption = Annotated[
    str | None, typer.Option(help="Up to this event or time, in the same forms.")
]
OneRequestOption = Annotated[
    str | None, typer.Option(help="The life of this request, and what the server did meanwhile.")
]


def timeline(
    journal: JournalArgument,
    output: OutputOption = Path("timeline.html"),
    since: SinceOption = None,
    until: UntilOption = None,
    request: OneRequestOption = None,
) -> None:
    """Draw who was served, held and let go when, and why: one HTML file that needs no network. The
    server may run meanwhile. A time such as 90m is counted back from the journal's last event. Exit
    status 2: the journal cannot be read, nothing of it is meant, or the file cannot be written.
    """
    from tools import timeline as command

    sys.exit(command.run(journal, output, command.Wanted(since, until, request)))
