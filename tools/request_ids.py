"""Ids of requests as people write them: short, as long as they name one."""

from collections.abc import Iterable

PREFIX = "req_"
WHOLE = len(PREFIX) + 26
SHORTEST = len(PREFIX) + 6


class UnknownRequest(Exception):
    """No open request is meant, or several are. One line."""


def shortest(ids: Iterable[str]) -> dict[str, str]:
    """Each id cut to the same length, at which they still differ."""
    whole = list(ids)
    length = SHORTEST
    while len({name[:length] for name in whole}) < len(set(whole)):
        length += 1
    return {name: name[:length] for name in whole}


def meant(given: str, ids: Iterable[str]) -> str:
    """The id among these that begins as given, with or without `req_`. Raises UnknownRequest."""
    if not given.strip():
        raise UnknownRequest("an id is needed: `fermata ps` shows those of open requests")
    start = given if given.startswith(PREFIX) else PREFIX + given
    found = [name for name in ids if name.startswith(start)]
    if len(found) == 1:
        return found[0]
    if not found:
        raise UnknownRequest(f"no open request is {given}: `fermata ps` shows those that are")
    names = ", ".join(shortest(found).values())
    raise UnknownRequest(f"{given} may be any of {len(found)} requests: {names}")


def is_whole(given: str) -> bool:
    """Whether it can be no other's beginning, so that nobody need be asked."""
    return given.startswith(PREFIX) and len(given) >= WHOLE
