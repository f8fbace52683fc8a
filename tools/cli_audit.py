"""`fermata audit`: its questions."""

import sys
from typing import Annotated

import typer

from tools.cli_options import Format, FormatOption, JournalArgument

audit_app = typer.Typer(help="Ask a journal what happened, and why.", no_args_is_help=True)

SinceOption = Annotated[
    str | None,
    typer.Option(help="From this time on: 2026-01-31T12:00 (UTC), or 90m before the last event."),
]
UntilOption = Annotated[str | None, typer.Option(help="Up to this time, in the same forms.")]


@audit_app.command("hits")
def audit_hits(
    journal: JournalArgument,
    since: SinceOption = None,
    until: UntilOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Show how much of the prompts was found in saved KV, by hour and model.

    Requests count that were received in the window, whatever became of them later.
    """
    from tools import audit as command

    sys.exit(command.hits(journal, command.Wanted(since, until, form.value)))


@audit_app.command("misses")
def audit_misses(
    journal: JournalArgument,
    since: SinceOption = None,
    until: UntilOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Show for each request what its prompt found in saved KV, and why it found no more.

    Requests count that were received in the window.
    """
    from tools import audit as command

    sys.exit(command.misses(journal, command.Wanted(since, until, form.value)))


@audit_app.command("causes")
def audit_causes(
    journal: JournalArgument,
    since: SinceOption = None,
    until: UntilOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Show why prompts were computed, and how many tokens for each cause.

    Requests count that were received in the window.
    """
    from tools import audit as command

    sys.exit(command.causes(journal, command.Wanted(since, until, form.value)))


@audit_app.command("pauses")
def audit_pauses(
    journal: JournalArgument,
    since: SinceOption = None,
    until: UntilOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Show each time that a request was held: why, for how many bytes, and for how long.

    Pauses count of which some lies in the window, with how long they were held within it.
    """
    from tools import audit_memory as command

    sys.exit(command.pauses(journal, command.Wanted(since, until, form.value)))


@audit_app.command("held")
def audit_held(
    journal: JournalArgument,
    since: SinceOption = None,
    until: UntilOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Show how long requests were held, by the reason, with percentiles.

    Of each pause the time held within the window counts, also where it began before or was not
    over.
    """
    from tools import audit_memory as command

    sys.exit(command.held(journal, command.Wanted(since, until, form.value)))


@audit_app.command("memory")
def audit_memory(
    journal: JournalArgument,
    since: SinceOption = None,
    until: UntilOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Show the readings of memory that the scheduler has seen in the window, in bytes."""
    from tools import audit_memory as command

    sys.exit(command.memory(journal, command.Wanted(since, until, form.value)))


@audit_app.command("orphans")
def audit_orphans(
    journal: JournalArgument,
    since: SinceOption = None,
    until: UntilOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Show each time that a request had no client: why, for how long, and what came of it.

    Times count of which some lies in the window.
    """
    from tools import audit_orphans as command

    sys.exit(command.orphans(journal, command.Wanted(since, until, form.value)))


@audit_app.command("first-tokens")
def audit_first_tokens(
    journal: JournalArgument,
    since: SinceOption = None,
    until: UntilOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Show how long requests waited for their first token, by hour, with percentiles.

    Requests count that were received in the window.
    """
    from tools import audit_times as command

    sys.exit(command.first_tokens(journal, command.Wanted(since, until, form.value)))


@audit_app.command("phases")
def audit_phases(
    journal: JournalArgument,
    since: SinceOption = None,
    until: UntilOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Show each phase of each request in time, and who else was there as it began.

    Phases count of which some lies in the window, with how much of them does.
    """
    from tools import audit_times as command

    sys.exit(command.phases(journal, command.Wanted(since, until, form.value)))


@audit_app.command("waits")
def audit_waits(
    journal: JournalArgument,
    since: SinceOption = None,
    until: UntilOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Show who waited for whom: whose room, whose turn, or whose block it was.

    Waits count of which some lies in the window, with how much of them does.
    """
    from tools import audit_times as command

    sys.exit(command.waits(journal, command.Wanted(since, until, form.value)))


@audit_app.command("throughput")
def audit_throughput(
    journal: JournalArgument,
    since: SinceOption = None,
    until: UntilOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Show what each minute brought: whole minutes, of which some lies in the window."""
    from tools import audit_times as command

    sys.exit(command.throughput(journal, command.Wanted(since, until, form.value)))


@audit_app.command("writes")
def audit_writes(
    journal: JournalArgument,
    since: SinceOption = None,
    until: UntilOption = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Show what was written to disk in the window, by request, reason and part, in bytes."""
    from tools import audit_writes as command

    sys.exit(command.writes(journal, command.Wanted(since, until, form.value)))


@audit_app.command("at")
def audit_at(
    journal: JournalArgument,
    time: Annotated[
        str | None, typer.Option(help="2026-01-31T12:00 (UTC), or 90m before the last event.")
    ] = None,
    form: FormatOption = Format.TABLE,
) -> None:
    """Show what was happening at a time, by default at the last event: whether a server ran,
    memory, each open request in its phase, and the decisions around it.

    Those of every step are only counted.
    """
    from tools import audit_at as command

    sys.exit(command.at(journal, time, form.value))
