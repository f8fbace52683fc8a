"""`fermata bench`: its commands."""

import sys
from typing import Annotated

import typer

from tools.cli_options import FolderOption, JsonOption, QuickOption

bench = typer.Typer(help="Measure, and hold the numbers against their targets.")


@bench.command("scheduler")
def bench_scheduler(
    quick: QuickOption = False,
    folder: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """What scheduler and journal cost, without a model. Exit status 1: a target is missed."""
    from tools import bench_scheduler as command

    size = command.QUICK if quick else command.Size()
    sys.exit(command.run(size, folder, as_json=as_json))


@bench.command("decode")
def bench_decode(
    model: Annotated[str, typer.Option(help="A built-in name, or a model's folder.")] = "smollm2",
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """The engine's decoding against mlx-lm's. Exit status 1: a target is missed."""
    from tools import bench_decode as command

    size = command.QUICK if quick else command.Size()
    sys.exit(command.run(size, model, as_json=as_json))


@bench.command("kv")
def bench_kv(
    quick: QuickOption = False,
    folder: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """Saving and restoring blocks against a plain writer and reader. Exit status 1: a target is
    missed.
    """
    from tools import bench_kv as command

    size = command.QUICK if quick else command.Size()
    sys.exit(command.run(size, folder, as_json=as_json))


@bench.command("pause")
def bench_pause(
    quick: QuickOption = False,
    folder: FolderOption = None,
    as_json: JsonOption = False,
) -> None:
    """From the decision to hold a request to its memory, and back from disk. Exit status 1: a
    target is missed.
    """
    from tools import bench_pause as command

    size = command.QUICK if quick else command.Size()
    sys.exit(command.run(size, folder, as_json=as_json))


@bench.command("hits")
def bench_hits(
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """What saved KV gives a prompt that comes again, and what saving costs. Exit status 1: a target
    is missed.
    """
    from tools import bench_hits as command

    size = command.QUICK if quick else command.Size()
    sys.exit(command.run(size, as_json=as_json))


@bench.command("pressure")
def bench_pressure(as_json: JsonOption = False) -> None:
    """Long prompts that share too little memory, in virtual time. Exit status 1: a target is
    missed.
    """
    from tools import bench_pressure as command

    sys.exit(command.run(as_json=as_json))


@bench.command("mixed")
def bench_mixed(
    model: Annotated[
        str, typer.Option(help="A built-in name, or a model's folder.")
    ] = "smollm2-float32",
    blas: Annotated[str, typer.Option(help="auto, stock or openblas, on a CPU.")] = "auto",
    peer: Annotated[
        list[str] | None,
        typer.Option(
            help="A command that serves {model} on {port}, to compare with; may come again. "
            "Without one it is mlx-lm's BatchGenerator."
        ),
    ] = None,
    quick: QuickOption = False,
    as_json: JsonOption = False,
) -> None:
    """Four prompts beside an answer that runs, against a peer. Exit status 1: a target is
    missed.
    """
    from tools import bench_mixed as command

    size = command.QUICK if quick else command.Size()
    sys.exit(command.run(command.Wanted(model, blas, tuple(peer or ()), size), as_json=as_json))


@bench.command("recovery")
def bench_recovery(
    quick: QuickOption = False, folder: FolderOption = None, as_json: JsonOption = False
) -> None:
    """How long a server that died is away, by its journal. Exit status 1: a target is missed."""
    from tools import bench_recovery as command

    size = command.QUICK if quick else command.Size()
    sys.exit(command.run(size, folder, as_json=as_json))


@bench.command("whatif")
def bench_whatif(
    quick: QuickOption = False, folder: FolderOption = None, as_json: JsonOption = False
) -> None:
    """What-ifs against servers that do it. Exit status 1: a target is missed."""
    from tools import bench_whatif as command

    size = command.QUICK if quick else command.Size()
    sys.exit(command.run(size, folder, as_json=as_json))


@bench.command("audit")
def bench_audit(
    quick: QuickOption = False, folder: FolderOption = None, as_json: JsonOption = False
) -> None:
    """How long each audit takes on ten million events. Exit status 1: a target is missed."""
    from tools import bench_audit as command

    size = command.QUICK if quick else command.Size()
    sys.exit(command.run(size, folder, as_json=as_json))
