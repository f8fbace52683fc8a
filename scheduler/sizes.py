"""Sizes as people write them."""

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, PlainValidator

UNITS = {
    "": 1,
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}
SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*")


def parse_size(value: object) -> object:
    """Bytes from "48GB", "8GiB" or "1073741824". Anything but a text is left to the type's check.

    Raises ValueError for a text that is no size.
    """
    if not isinstance(value, str):
        return value
    match = SIZE.fullmatch(value)
    unit = UNITS.get(match[2].upper()) if match else None
    if match is None or unit is None:
        raise ValueError(f"{value!r} is no size: write bytes, or a number with GB, GiB, MB or MiB")
    return int(float(match[1]) * unit) if "." in match[1] else int(match[1]) * unit


def parse_ceiling(value: object) -> int | Literal["auto"] | None:
    """A size above 0, "auto", or null for "none". Raises ValueError for anything else."""
    if value is None or value == "none":
        return None
    if value == "auto":
        return "auto"
    size = parse_size(value)
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError("write auto, none, or a size above 0, such as 48GB")
    return size


Size = Annotated[int, BeforeValidator(parse_size)]
Ceiling = Annotated[int | Literal["auto"] | None, PlainValidator(parse_ceiling)]
