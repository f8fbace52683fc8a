"""The command line.

Each command imports its own module when it runs, so that `fermata --help` imports nothing heavy.
"""

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


@app.callback()
def root() -> None:
    """Serve language models on MLX to coding agents."""


def main() -> None:
    """The console script `fermata`."""
    app()
