"""What a picture shows of an event: its numbers, exactly, and nothing that nobody reads."""

from typing import Any

import msgspec

from journal import events
from journal.events import AnyEvent

EXACT_IN_BROWSER = 2**53 - 1
"""The largest whole number that JavaScript keeps exactly; larger ones are written as digits."""

SHOWN_OF_MANY = 3
"""How many of a longer list of names are shown."""

UNSHOWN = {
    "state_carried": ("state",),
    "request_received": ("content_digest", "session_digest", "key_digest", "owner_digest"),
}
"""Fields that are left out: a whole state, and what programs compare and people do not."""


def body_of(event: AnyEvent, *, has_lane: bool) -> dict[str, Any]:
    """The body without what its entry says anyway: its kind and, where its request has a lane, that
    one's id and number.
    """
    body: dict[str, Any] = msgspec.to_builtins(event)
    said = ("request_id", "number") if has_lane else ()
    for name in (*said, *UNSHOWN.get(body.pop("kind"), ())):
        body.pop(name, None)
    return {name: shown(value) for name, value in body.items()}


def shown(value: Any) -> Any:
    """A value as JavaScript can keep it, with long lists cut short."""
    match value:
        case bool():
            return value
        case int() if abs(value) > EXACT_IN_BROWSER:
            return str(value)
        case dict():
            return {str(name): shown(inner) for name, inner in value.items()}  # pyright: ignore[reportUnknownVariableType, reportUnknownArgumentType]
        case list() | tuple():
            return shown_list(list(value))  # pyright: ignore[reportUnknownArgumentType]
        case _:
            return value


def shown_list(values: list[Any]) -> list[Any]:
    """A list, or of many names the first ones and how many there are."""
    if len(values) <= SHOWN_OF_MANY or isinstance(values[0], int):
        return [shown(value) for value in values]
    return [*map(shown, values[:SHOWN_OF_MANY]), f"{len(values)} in all"]


def numbers_of(event: AnyEvent) -> tuple[int, ...]:
    """The numbers of requests that an event without a request's id is about."""
    match event:
        case events.TokensDecoded(numbers=numbers, counts=counts):
            return tuple(n for n, count in zip(numbers, counts, strict=True) if count)
        case events.BatchChanged(joined=joined, left=left):
            return (*joined, *left)
        case _:
            return ()


def ids_of(event: AnyEvent) -> tuple[str, ...]:
    """The ids of the requests that an event names."""
    match event:
        case events.RequestAdopted(request_id=request_id, adopter_id=other):
            return (request_id, other)
        case events.RequestJoined(request_id=request_id, joined_id=other):
            return (request_id, other)
        case _:
            request_id: str | None = getattr(event, "request_id", None)
            return () if request_id is None else (request_id,)


def decoded_body(event: events.TokensDecoded) -> dict[str, Any]:
    """What decode steps of one batch come to; further steps are added by `add_step`."""
    tokens = {str(n): count for n, count in zip(event.numbers, event.counts, strict=True) if count}
    return {
        "batch": event.batch,
        "num_steps": 1,
        "tokens": tokens,
        "duration_ns": event.duration_ns,
        "ended": shown(msgspec.to_builtins(event.ended)),
    }


def add_step(body: dict[str, Any], event: events.TokensDecoded) -> None:
    """One more step of the same batch, in which nobody has ended."""
    body["num_steps"] += 1
    body["duration_ns"] += event.duration_ns
    for number, count in zip(event.numbers, event.counts, strict=True):
        if count:
            body["tokens"][str(number)] = body["tokens"].get(str(number), 0) + count
