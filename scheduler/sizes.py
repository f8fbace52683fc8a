"""Sizes as people write them, and groups of settings: none is larger than can be recorded."""

import re
from typing import Annotated, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    PlainValidator,
    ValidationInfo,
    field_validator,
)

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
MAX_BYTES = 2**62
"""The journal and SQLite keep 64 bits with a sign."""

MAX_NS = 2**61
"""73 years: with today's time added it still fits the journal."""

MAX_COUNT = 2**40
"""Of tokens, blocks, events: times the bytes of one it still fits the journal."""

TIMES = {"_ms": MAX_NS // 10**6, "_s": MAX_NS // 10**9, "_days": MAX_NS // (86_400 * 10**9)}
"""The longest time in the units that end the names of settings."""

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
    if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MAX_BYTES:
        raise ValueError(f"write auto, none, or a size from 1 to {MAX_BYTES} bytes, such as 48GB")
    return size


def check_largest(name: str, value: object) -> None:
    """Raises ValueError for a number that is too large for a setting of this name."""
    if not isinstance(value, int):
        return
    if name.endswith("_bytes") or name == "ceiling":
        most = MAX_BYTES
    else:
        most = next((most for unit, most in TIMES.items() if name.endswith(unit)), MAX_COUNT)
    if value > most:
        raise ValueError(f"{most} is the most")


Size = Annotated[int, BeforeValidator(parse_size)]
Ceiling = Annotated[int | Literal["auto"] | None, PlainValidator(parse_ceiling)]


class Group(BaseModel):
    """A group of settings. A name that it does not have is an error, never ignored."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*")
    @classmethod
    def keep_in_bounds(cls, value: object, info: ValidationInfo) -> object:
        """See `check_largest`."""
        check_largest(str(info.field_name), value)
        return value
