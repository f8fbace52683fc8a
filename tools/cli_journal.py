"""`fermata journal`: its commands."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tools.cli_options import JournalArgument, JsonOption

journal_app = typer.Typer(help="Look into a journal.", no_args_is_help=True)


@journal_app.command("info")
def journal_info(journal: JournalArgument, as_json: JsonOption = False) -> None:
    """Show what a journal holds, in a few numbers."""
    from tools import journal_info as command

    sys.exit(command.info(journal, as_json=as_json))


@journal_app.command("verify")
def journal_verify(journal: JournalArgument) -> None:
    """Check a journal against its promises: exit status 0 when it is sound, 1 when it is not."""
    from tools import journal_info as command

    sys.exit(command.verify(journal))


@journal_app.command("backup")
def journal_backup(
    journal: JournalArgument,
    file: Annotated[Path, typer.Argument(help="The backup, a file that ends in .db.")],
    force: Annotated[bool, typer.Option("--force", help="Replace a file of that name.")] = False,
) -> None:
    """Copy a journal, while its server runs or without one, and verify the copy. Exit status 1: the
    journal is not sound, 2: it cannot be read, or the copy cannot be written.
    """
    from tools import backup as command

    sys.exit(command.run(journal, file, force=force))
