"""Server-sent events, as bytes.

`id:` is the number of output tokens that this event and all before it have used up. Heartbeats
carry none, so that a reader that comes back never names one.
"""

import msgspec

DONE = "[DONE]"
COMMENT = b": heartbeat\n\n"

HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


def event(data: object, position: int | None) -> bytes:
    """One event with this value as JSON (or, for `DONE`, as it is)."""
    body = DONE.encode() if data is DONE else msgspec.json.encode(data)
    name = b"" if position is None else b"id: %d\n" % position
    return b"%sdata: %s\n\n" % (name, body)
