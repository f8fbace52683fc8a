"""An event as columns, and back: strict in both directions.

The body is JSON text with sorted keys, so that equal events give equal bytes; but a carried state
stays in its order, which is part of it (who was used least recently, whose time is over first).
`kind`, `request_id` and `version` are columns of their own and are not repeated in it.
"""

from typing import Any, NamedTuple, cast

import msgspec

from journal.errors import UnreadableEvent
from journal.events import KINDS, AnyEvent, Event, StateCarried

_encode = msgspec.json.Encoder(order="sorted").encode
_encode_as_it_is = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_KIND_OF_CLASS: dict[type[Event], str] = {cls: kind for kind, cls in KINDS.items()}
_NAMES_REQUEST = frozenset(
    kind for kind, cls in KINDS.items() if "request_id" in cls.__struct_fields__
)


class EncodedEvent(NamedTuple):
    """The columns that depend on the event alone."""

    kind: str
    request_id: str | None
    version: int
    body: str


def encode_event(event: AnyEvent) -> EncodedEvent:
    """The columns of an event. Called once for each event of a commit."""
    fields = msgspec.structs.asdict(event)
    request_id: str | None = fields.pop("request_id", None)
    encode = _encode_as_it_is if isinstance(event, StateCarried) else _encode
    body = encode(fields)
    return EncodedEvent(_KIND_OF_CLASS[type(event)], request_id, event.version, body.decode())


def decode_event(kind: str, request_id: str | None, version: int, body: str) -> AnyEvent:
    """The inverse of `encode_event`. Raises UnreadableEvent for an unknown kind or version, a
    missing, unknown or wrongly typed field, and a request_id in the wrong place.
    """
    cls = KINDS.get(kind)
    if cls is None:
        raise UnreadableEvent(f"unknown kind of event: {kind!r}")
    if version != cls.version:
        raise UnreadableEvent(f"{kind}: version {version}, this release reads {cls.version}")
    try:
        fields = _decode(body)
        if "request_id" in fields or (request_id is None) == (kind in _NAMES_REQUEST):
            raise UnreadableEvent(f"{kind}: request_id belongs in its column, and only there")
        if request_id is not None:
            fields["request_id"] = request_id
        return cast("AnyEvent", msgspec.convert(fields, cls))
    except (msgspec.ValidationError, msgspec.DecodeError) as error:
        raise UnreadableEvent(f"{kind}: {error}") from error
