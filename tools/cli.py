"""The command line.

Each command imports its own module when it runs, so that `fermata --help` imports nothing heavy. A
command is a thin function: its options, and one call of `run` in the module of its name. Groups
of commands have modules of their own: cli_bench.py and cli_journal.py.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from tools.cli_audit import audit_app
from tools.cli_bench import bench
from tools.cli_crash import crash
from tools.cli_journal import journal_app
from tools.cli_options import (
    CeilingOption,
    ConfigOption,
    HostOption,
    JournalArgument,
    JsonOption,
    ModelOption,
    PortOption,
    ServedStateOption,
    StateOption,
    UrlOption,
)
from tools.cli_simulate import simulate
from tools.cli_timeline import timeline
from tools.cli_whatif import whatif
from tools.nameguard import NameTaken, check_names
from tools.output import checked_output
from tools.service_parts import DEFAULT_KIND, Kind

app = typer.Typer(
    help="Serve language models on MLX to coding agents; hold requests instead of killing them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

app.add_typer(journal_app, name="journal")
app.add_typer(audit_app, name="audit")
app.add_typer(bench, name="bench")
app.command()(timeline)
app.command()(crash)
app.command()(whatif)
app.command()(simulate)

API_KEY = "FERMATA_SERVER__API_KEY"
DEFAULT_STATE = Path("fermata-state")


@app.callback()
def root() -> None:
    """Makes `fermata` a group of commands, also while it has only one."""


@app.command()
def serve(
    *,
    model: ModelOption = None,
    host: HostOption = None,
    port: PortOption = None,
    state: ServedStateOption = None,
    ceiling: CeilingOption = None,
    config: ConfigOption = None,
) -> None:
    """Serve a model over HTTP until SIGINT or SIGTERM."""
    # Until the server looks after signals, there is nothing that an end could leave half done.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    from tools import serve as command

    overrides = served(model, state, host, port, ceiling)
    sys.exit(command.run(config, overrides))


def served(
    model: str | None, state: Path | None, host: str | None, port: int | None, ceiling: str | None
) -> dict[str, object]:
    """The options of a server by the names of their settings."""
    return {
        "model": model,
        "state": state,
        "server.host": host,
        "server.port": port,
        "memory.ceiling": ceiling,
    }


@app.command()
def service(
    *,
    model: ModelOption = None,
    host: HostOption = None,
    port: PortOption = None,
    state: ServedStateOption = None,
    ceiling: CeilingOption = None,
    config: ConfigOption = None,
    kind: Annotated[Kind, typer.Option(help="What starts it.")] = DEFAULT_KIND,
    user: Annotated[
        bool, typer.Option("--user", help="A service of your own, not one of the system.")
    ] = False,
) -> None:
    """Print a systemd unit or a launchd property list that starts `fermata serve` with these
    options, and again after its death.
    """
    from tools import service as command

    wanted = command.Wanted(kind, user, config, served(model, state, host, port, ceiling))
    sys.exit(command.run(wanted))


@app.command()
def ps(
    state: StateOption = DEFAULT_STATE,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the requests of a running server. Its API key is read from FERMATA_SERVER__API_KEY."""
    from tools import ps as command

    sys.exit(command.run(state, url, os.environ.get(API_KEY), as_json=as_json))


RequestArgument = Annotated[
    str, typer.Argument(metavar="ID", help="A request's id, or as much of it as names it alone.")
]


@app.command()
def pause(
    request: RequestArgument,
    state: StateOption = DEFAULT_STATE,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Hold a request of a running server: its KV leaves memory, its client's stream stays open."""
    from tools import hold as command

    key = os.environ.get(API_KEY)
    sys.exit(command.run("pause", request, state, url, key, as_json=as_json))


@app.command()
def resume(
    request: RequestArgument,
    state: StateOption = DEFAULT_STATE,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let a request that was held by hand go on, as soon as there is room for it."""
    from tools import hold as command

    key = os.environ.get(API_KEY)
    sys.exit(command.run("resume", request, state, url, key, as_json=as_json))


@app.command()
def replay(
    journal: JournalArgument,
    *,
    until: Annotated[int | None, typer.Option(help="Stop after this step.")] = None,
    show: Annotated[bool, typer.Option("--show", help="Print the state there.")] = False,
    request: Annotated[
        str | None, typer.Option(help="Print the life of this request, and decide nothing.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Decide a journal again, and show where it comes out differently.

    Exit status: 0 without divergence, 1 with one, 2 for a journal that cannot be read and a step or
    request that is not in it, 3 when only runs of another policy version differ.
    """
    from tools import replay as command

    if request is not None:
        sys.exit(command.run_life(journal, request, until=until, as_json=as_json))
    sys.exit(command.run(journal, command.Wanted(until, show, as_json)))


cache_app = typer.Typer(help="Look after saved KV.", no_args_is_help=True)
app.add_typer(cache_app, name="cache")


@cache_app.command("info")
def cache_info(
    state: StateOption = DEFAULT_STATE, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Show what a running server has saved of KV, and what that has saved of work."""
    from tools import cache as command

    sys.exit(command.info(state, url, os.environ.get(API_KEY), as_json=as_json))


@cache_app.command("clear")
def cache_clear(
    state: StateOption = DEFAULT_STATE, url: UrlOption = None, as_json: JsonOption = False
) -> None:
    """Throw saved KV away, but for what running requests hold. It needs a running server."""
    from tools import cache as command

    sys.exit(command.clear(state, url, os.environ.get(API_KEY), as_json=as_json))


@cache_app.command("verify")
def cache_verify(state: StateOption = DEFAULT_STATE, as_json: JsonOption = False) -> None:
    """Read every saved block and compare it with its checksum and the journal, beside a running
    server or without one. Exit status: 0 when all are sound, 1 when one is not, 2 when the journal
    cannot be read.
    """
    from tools import cache_verify as command

    sys.exit(command.run(state, as_json=as_json))


@app.command()
def demo(
    model: Annotated[str, typer.Option(help="What is served.")] = "smollm2-float32",
    blas: Annotated[str, typer.Option(help="auto, stock or openblas, on a CPU.")] = "auto",
    seed: Annotated[int, typer.Option(help="Decides which prompts are used.")] = 1,
) -> None:
    """Kill a server in the middle of three answers, and see that nothing is lost."""
    from tools import demo as command

    sys.exit(command.run(command.Wanted(model, blas, seed)))


@app.command()
def doctor(
    state: ServedStateOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say whether a server can run here. Exit status 1: something stops it."""
    from tools import doctor as command

    sys.exit(command.run(state, config, as_json=as_json))


def main() -> None:
    """The console script `fermata`."""
    try:
        check_names()
    except NameTaken as error:
        print(f"fermata: {error}", file=sys.stderr)
        sys.exit(2)
    with checked_output():
        app()


if __name__ == "__main__":
    main()
