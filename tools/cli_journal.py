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


@journal_app.command("export")
def journal_export(
    journal: JournalArgument,
    file: Annotated[Path, typer.Argument(help="The bundle, a new file that ends in .db.")],
    *,
    since: Annotated[
        str | None,
        typer.Option(help="From this time on: 2026-01-31T12:00 (UTC), or 90m before the end."),
    ] = None,
    until: Annotated[str | None, typer.Option(help="Up to this time, in the same form.")] = None,
    request: Annotated[str | None, typer.Option(help="The life of this request alone.")] = None,
    with_tokens: Annotated[
        bool, typer.Option("--with-tokens", help="With prompts, parameters and answers.")
    ] = False,
) -> None:
    """Write part of a journal as a bundle: one file that can be sent, read and replayed. It holds
    neither prompts nor answers, unless they are wanted. Exit status 2: there is no such part, or a
    file cannot be read or written.
    """
    from tools import export as command

    sys.exit(command.run(journal, file, command.Wanted(since, until, request, with_tokens)))


@journal_app.command("compact")
def journal_compact(
    journal: JournalArgument,
    keep_days: Annotated[
        int, typer.Option(min=0, help="Events of so many days before the last one stay.")
    ] = 14,
    keep_bytes: Annotated[int, typer.Option(min=0, help="The file is to be smaller.")] = 5 * 10**9,
) -> None:
    """Shorten a journal while no server has it: old events become one, which holds what they came
    to. Exit status 2: it is no journal that can be shortened, and nothing was written.
    """
    from tools import compact as command

    sys.exit(command.run(journal, command.Kept(keep_days, keep_bytes)))
