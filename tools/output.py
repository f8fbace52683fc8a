"""Standard output that cannot be written ends a command in one line, whichever command it is.

A pipe that its reader has closed (`| head`) is nobody's mistake: the command ends without a word,
and with the status that a shell gives to a program which that has killed. Everything was written
when a command ends with a status of its own: what is still buffered is written out before.
"""

import errno
import io
import os
import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn, TextIO

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

UNWRITTEN, CLOSED = 2, 141
"""Exit statuses: no space, or another failure; and nobody reads any more (128 + SIGPIPE)."""


class OutputFailed(Exception):
    """Standard output cannot be written. It is no OSError, of which commands have their own."""

    def __init__(self, error: OSError) -> None:
        super().__init__(error.strerror)
        self.closed = error.errno == errno.EPIPE


class CheckedFile(io.FileIO):
    """A descriptor whose failures to be written are OutputFailed."""

    def write(self, data: "ReadableBuffer", /) -> int:
        """As of any raw file. Raises OutputFailed."""
        try:
            return super().write(data)
        except OSError as error:
            raise OutputFailed(error) from error


def checked(output: TextIO) -> TextIO:
    """The same output, as text of the same kind, over a CheckedFile."""
    assert isinstance(output, io.TextIOWrapper)
    return io.TextIOWrapper(
        io.BufferedWriter(CheckedFile(output.fileno(), "w", closefd=False)),
        encoding=output.encoding,
        errors=output.errors,
        line_buffering=output.line_buffering,
        write_through=output.write_through,
    )


@contextmanager
def checked_output() -> Generator[None, None, None]:
    """Around a command that ends by SystemExit. Anything else that it raises is let pass."""
    if sys.stdout is None:  # pyright: ignore[reportUnnecessaryComparison]
        yield  # it was closed before Python began, and what is printed goes nowhere
        return
    sys.stdout = checked(sys.stdout)
    try:
        try:
            yield
        except SystemExit:
            sys.stdout.flush()
            raise
    except OutputFailed as failure:
        give_up(failure)


def give_up(failure: OutputFailed) -> NoReturn:
    """Ends the process. What is still buffered goes nowhere, also when Python ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    if failure.closed:
        sys.exit(CLOSED)
    print(f"fermata: cannot write the output: {failure}", file=sys.stderr)
    sys.exit(UNWRITTEN)
