"""Settings by their full names, as the command line gives them and as errors name them."""

from collections.abc import Mapping
from typing import cast

from pydantic import ValidationError

from scheduler.api_keys import SECRETS


def nested(overrides: Mapping[str, object]) -> dict[str, object]:
    """`{"server.port": 0}` as `{"server": {"port": 0}}`; a null is what was not given."""
    values: dict[str, object] = {}
    for name, value in overrides.items():
        if value is None:
            continue
        group, dot, inner = name.partition(".")
        if dot:
            cast("dict[str, object]", values.setdefault(group, {}))[inner] = value
        else:
            values[name] = value
    return values


def explain(error: ValidationError) -> str:
    """Each wrong setting by its full name, with what is allowed, and what was given unless that
    holds a secret.
    """
    return "; ".join(
        f"setting {'.'.join(str(part) for part in item['loc'])}: {item['msg']}"
        + ("" if has_secret(item["loc"]) else f" (got {item['input']!r})")
        for item in error.errors()
    )


def has_secret(place: tuple[str | int, ...]) -> bool:
    """Whether what was given for this setting, or this whole group, may hold a key."""
    return place == ("server",) or any(name in SECRETS for name in place)
