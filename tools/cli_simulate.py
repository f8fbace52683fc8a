"""`fermata simulate`: its options."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tools.cli_options import JsonOption


def simulate(
    *,
    seeds: Annotated[int, typer.Option(help="How many stories, one for each seed.")] = 200,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes beside each other.")] = 2,
    scenario: Annotated[
        Path | None, typer.Option(help="Instead: the story of this file.", show_default=False)
    ] = None,
    mutations: Annotated[
        bool,
        typer.Option(
            "--mutations", help="Instead: break copies of the scheduler, and see each be found."
        ),
    ] = False,
    only: Annotated[
        str | None, typer.Option(help="Of --mutations: the one of this name.", show_default=False)
    ] = None,
    list_all: Annotated[
        bool, typer.Option("--list", help="Show the situations that are counted, or the mutations.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option(help="Where scenario files of failures are written.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Play whole servers with random clients, pressure, broken disks and deaths in virtual time,
    and check every step. A seed that fails is made smaller, and written as a scenario file.

    Exit status: 0, 1 when something does not hold, a mutation is not found, or a situation was
    never met in 200 seeds or more, 2 for bad input, 130 when it was interrupted.
    """
    from tools import simulate as command
    from tools import simulate_mutations as broken

    if scenario is not None and (mutations or list_all):
        sys.exit(command.refuse("--scenario plays one file: give no --mutations, no --list"))
    if only is not None and not mutations:
        sys.exit(command.refuse("--only names one of --mutations"))
    if scenario is not None:
        sys.exit(command.run_scenario(scenario, as_json=as_json))
    if list_all:
        listed = broken.list_mutations if mutations else command.list_situations
        sys.exit(listed(as_json=as_json))
    wanted = command.Wanted(seeds, seed, workers, out, as_json)
    if mutations:
        sys.exit(broken.run(wanted, only))
    sys.exit(command.run(wanted))
