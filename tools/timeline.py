"""`fermata timeline`: a picture of a journal as one file for any browser."""

import os
import sys
from pathlib import Path

from journal.bundle import refuse_changed
from journal.errors import JournalError
from journal.reader import JournalReader
from tools.replay_life import NoSuchRequest
from tools.timeline_file import html_of
from tools.timeline_fold import picture_of
from tools.timeline_window import NoPicture, Wanted, window_of

DONE, UNUSABLE = 0, 2
SUFFIXES = (".html", ".htm")
"""How the picture's name must end: no file of a journal ends so, and none can be replaced."""


def run(path: Path, output: Path, wanted: Wanted | None = None) -> int:
    """Draws a journal, or part of it, and says what is in the picture. Returns 0, or 2 when the
    journal cannot be read, nothing or too much of it is wanted, or the file cannot be written.
    """
    wanted = wanted or Wanted()
    try:
        check_output(output)
        with JournalReader.open(path) as reader:
            refuse_changed(reader)
            window = window_of(reader, wanted)
            picture = picture_of(reader.read(0, window.last_seq), reader.file.name, window)
        text = html_of(picture)
        write(output, text)
    except (JournalError, NoPicture, NoSuchRequest) as error:
        print(f"fermata timeline: {error}", file=sys.stderr)
        return UNUSABLE
    seqs = f"seq {picture.first_seq} to {picture.last_seq}"
    if not picture.num_events:
        seqs = f"between seq {picture.last_seq} and {picture.first_seq}"
    print(
        f"{output}: {picture.num_events} events ({seqs}), "
        f"{len(picture.lanes)} requests, {len(picture.holds)} times held, "
        f"{len(text.encode()) / 1e6:.1f} MB"
    )
    return DONE


def check_output(output: Path) -> None:
    """Raises NoPicture where no picture can be put, before anything is read for it."""
    if output.suffix.lower() not in SUFFIXES:
        raise NoPicture(f"{output}: the file is for a browser; give it a name that ends in .html")
    try:
        if output.is_dir():
            raise NoPicture(f"{output}: is a folder; name a file")
        if not output.parent.is_dir():
            raise NoPicture(f"{output}: there is no folder {output.parent}")
    except OSError as error:
        raise unwritable(output, error) from error


def write(output: Path, text: str) -> None:
    """Puts the whole file in place at once: whoever opens it sees the old one or the new one.
    Raises NoPicture.
    """
    partial = output.with_name(f".timeline.{os.getpid()}.new")
    try:
        try:
            partial.write_text(text, encoding="utf-8")
            partial.replace(output)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise unwritable(output, error) from error


def unwritable(output: Path, error: OSError) -> NoPicture:
    """The error for a file that cannot be written."""
    return NoPicture(f"{output}: cannot be written ({error.strerror})")
