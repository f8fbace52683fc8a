"""The command line.

Each command imports its own module when it runs, so that `fermata --help` imports nothing heavy. A
command is a thin function here: its options, and one call of `run` in the module of its name.
"""

import sys

import typer

from tools.nameguard import NameTaken, check_names

app = typer.Typer(
    help="Serve language models on MLX to coding agents; hold requests instead of killing them.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)


@app.callback()
def root() -> None:
    """Makes `fermata` a group of commands, also while it has only one."""


def main() -> None:
    """The console script `fermata`."""
    try:
        check_names()
    except NameTaken as error:
        print(f"fermata: {error}", file=sys.stderr)
        sys.exit(2)
    app()
