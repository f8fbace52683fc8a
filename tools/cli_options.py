"""Options and arguments that several commands take."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

JournalArgument = Annotated[
    Path, typer.Argument(help="A state folder, or a journal's file.", show_default=False)
]
StateOption = Annotated[
    Path,
    typer.Option("--state", envvar="FERMATA_STATE", help="The state folder of the server."),
]
ModelOption = Annotated[
    str | None,
    typer.Option("--model", help="smollm2, tiny-hybrid, tiny-plain, fake, or a model's folder."),
]
HostOption = Annotated[str | None, typer.Option("--host", help="The address to listen on.")]
PortOption = Annotated[int | None, typer.Option("--port", help="The port; 0 for any free one.")]
ServedStateOption = Annotated[
    Path | None, typer.Option("--state", envvar="FERMATA_STATE", help="The state folder.")
]
CeilingOption = Annotated[
    str | None,
    typer.Option("--ceiling", help="The most memory to use, such as 48GB; auto or none."),
]
ConfigOption = Annotated[Path | None, typer.Option("--config", help="A TOML file with settings.")]
UrlOption = Annotated[
    str | None, typer.Option("--url", help="The server's address, instead of a state folder.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Put one JSON object on the last line of stdout.")
]


class Format(StrEnum):
    """How a command writes rows."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"
    JSONL = "jsonl"


FormatOption = Annotated[
    Format,
    typer.Option(
        "--format", help="How rows are written: json is one array, jsonl an object a line."
    ),
]
QuickOption = Annotated[bool, typer.Option("--quick", help="A short run, to see that it works.")]
FolderOption = Annotated[
    Path | None, typer.Option(help="Where its files are written and removed again.")
]
