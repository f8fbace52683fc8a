"""`fermata crash`: its options."""

import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from tools.cli_options import JsonOption


def crash(
    *,
    points: Annotated[
        str, typer.Option(help="all, or names with commas between them; `*` stands for anything.")
    ] = "all",
    seeds: Annotated[int, typer.Option(min=1, help="How often at each point.")] = 5,
    seed: Annotated[int, typer.Option(help="The first seed.")] = 1,
    story: Annotated[
        str | None, typer.Option(help="One story again, as a violation names it.")
    ] = None,
    list_points: Annotated[
        bool, typer.Option("--list", help="Show all points, and end nothing.")
    ] = False,
    kills: Annotated[
        int, typer.Option(min=0, help="Instead: kill a loaded server so often, at any moment.")
    ] = 0,
    model: Annotated[
        str, typer.Option(help="fake; or tiny-hybrid or tiny-plain: a run with real files alone.")
    ] = "fake",
    workers: Annotated[int, typer.Option(min=1, help="Stories beside each other.")] = 4,
    new_processes: Annotated[
        int, typer.Option(min=0, help="Ends of servers that are new processes, not forked.")
    ] = 20,
    limit_s: Annotated[
        float, typer.Option(min=1, help="Begin no more stories after so many seconds.")
    ] = math.inf,
    keep: Annotated[
        Path | None, typer.Option(help="Where the state folders of violations are kept.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """End a server hard at named points, start it again, and check that nothing is lost. Exit
    status 1: something is, or a point is never reached.
    """
    from tools import crash as command
    from tools import crash_kills, crash_model

    if model in crash_model.MODELS and kills:
        print(f"fermata: --kills is for the fake model, not for {model}", file=sys.stderr)
        sys.exit(2)
    if model in crash_model.MODELS:
        sys.exit(crash_model.run(model, seed, keep, as_json=as_json))
    if model != "fake":
        print(f"fermata: --model {model}: fake, tiny-hybrid or tiny-plain", file=sys.stderr)
        sys.exit(2)
    if kills and (points != "all" or story is not None):
        print("fermata: --kills ends at any moment: give no --points, no --story", file=sys.stderr)
        sys.exit(2)
    if kills:
        sys.exit(crash_kills.run(kills, seed, keep, as_json=as_json))
    if list_points:
        sys.exit(command.list_points())
    wanted = command.Wanted(points, seeds, seed, workers, keep, story, limit_s, new_processes)
    sys.exit(command.run(wanted, as_json=as_json))
