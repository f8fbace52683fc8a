"""`fermata journal`: its commands."""

import sys

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
