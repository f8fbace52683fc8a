"""What may happen to a file of saved KV behind the server's back."""

import os
from pathlib import Path


def truncate(path: Path, other: Path) -> None:
    del other
    os.truncate(path, path.stat().st_size // 2)


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def flip_in_header(path: Path, other: Path) -> None:
    del other
    flip(path, 100)


def flip_in_data(path: Path, other: Path) -> None:
    del other
    flip(path, -9)


def exchange(path: Path, other: Path) -> None:
    ours, theirs = path.read_bytes(), other.read_bytes()
    path.write_bytes(theirs)
    other.write_bytes(ours)


def delete(path: Path, other: Path) -> None:
    del other
    path.unlink()


def make_folder(path: Path, other: Path) -> None:
    del other
    path.unlink()
    path.mkdir()


def forbid(path: Path, other: Path) -> None:
    """Root may read all files, but nobody reads through a link to itself."""
    del other
    if os.geteuid():
        path.chmod(0)
    else:
        path.unlink()
        path.symlink_to(path.name)


DAMAGES = (truncate, flip_in_header, flip_in_data, exchange, delete, make_folder, forbid)
