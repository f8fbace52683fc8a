"""`fermata whatif`: its options."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from tools.cli_options import JsonOption

JournalArgument = Annotated[
    Path | None, typer.Argument(help="A state folder, or a journal's file.", show_default=False)
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="A setting that is changed: memory.ceiling=52GB. Repeatable."),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        help="Instead of a journal: JSON lines with timestamp (ms), input_length, output_length "
        "and hash_ids of blocks of 512 tokens.",
    ),
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        help="Of a trace: what serves it, on a workstation: hybrid-27b (the default) or "
        "hybrid-27b-8bit.",
    ),
]
SpeedsOption = Annotated[
    Path | None,
    typer.Option(
        "--journal", help="Of a trace: the server whose model, settings and speeds are taken."
    ),
]
CeilingOption = Annotated[
    list[str] | None,
    typer.Option("--ceiling", help="Of a trace: a memory.ceiling, such as 48GB. Repeatable."),
]
DiskOption = Annotated[
    list[str] | None,
    typer.Option("--ssd", help="Of a trace: a kv.max_bytes, such as 500GB. Repeatable."),
]
LimitOption = Annotated[
    int | None, typer.Option("--limit", min=1, help="Of a trace: so many requests, from its start.")
]


def whatif(
    journal: JournalArgument = None,
    *,
    changes: SetOption = None,
    trace: TraceOption = None,
    model: ModelOption = None,
    speeds: SpeedsOption = None,
    ceiling: CeilingOption = None,
    ssd: DiskOption = None,
    limit: LimitOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the requests of a journal again with other settings, in a simulation whose speeds are
    those that the journal has recorded; or those of a trace, on a server that need not exist, with
    each combination of the ceilings and disk budgets that are given. Without a ceiling a trace has
    all the memory that it needs.

    How far the simulation is off comes first. Of the figures, held_ms is the sum over all requests,
    total_ms goes from the first arrival to the last end, first_token_* from a request's arrival,
    gap_* between two decode steps of a request that is not held; peak_bytes is the most that was
    in use, hit_tokens of the finished prompts were restored and prefilled_tokens computed. The
    README explains each.

    Exit status: 0, 1 when it comes to no end with these settings, 2 for a journal, a trace or a
    setting that cannot be used.
    """
    from tools import whatif as command
    from tools import whatif_trace

    of_a_trace = (model, speeds, ceiling, ssd, limit)
    if trace is not None and journal is None:
        wanted = whatif_trace.Wanted(
            model=model,
            journal=speeds,
            changes=tuple(changes or ()),
            ceilings=tuple(ceiling or ()),
            budgets=tuple(ssd or ()),
            limit=limit,
            as_json=as_json,
        )
        sys.exit(whatif_trace.run(trace, wanted))
    if journal is None or trace is not None or any(option is not None for option in of_a_trace):
        sys.exit(command.refuse_options())
    sys.exit(command.run(journal, command.Wanted(tuple(changes or ()), as_json)))
